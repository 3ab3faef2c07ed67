"""The settings of the connectors, and the checks of the engine that they run in.

`ConnectorSettings` are those in `ec_connector_extra_config`. `kv_connector_extra_config` shares
`SharedSettings` with them. The buffer's own settings keep their names (`store_url`,
`capacity_bytes`, `node_socket`, ...; see `BufferConfig`). Parsing is pure, except that it checks
the files of the store's passwords.

`validate_engine` refuses engines that the connector cannot serve, and says what to do instead.
Scheduler and workers call it at start, before the weights are loaded.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from connectors.pass_time import FIRST_SIGHT_SECONDS, IDLE_SECONDS
from lookup_buffer.access import check_store_url
from lookup_buffer.config import (
    GIB,
    SECRETS,
    WILDCARDS,
    BufferConfig,
    Bytes,
    explain,
    guard_listener,
    parse_address,
    setting_advice,
)
from lookup_buffer.errors import ConfigError
from lookup_buffer.protocol.fields import SECONDS_MAX
from store import redact
from store.schemes import may_hold_password

_PRINTED = "vLLM prints its settings at start, so a secret must not be one; allowed"
_WITHOUT_US = "start this engine without --ec-transfer-config"

Settings = TypeVar("Settings", bound="SharedSettings")


class SharedSettings(BufferConfig):
    """The settings of both connectors. Immutable; unknown names are refused."""

    required: bool = False
    """Whether the engine refuses to start when node or store cannot be reached."""
    weights_version: str = Field(default="", max_length=256)
    """A name for the weights, for when their content cannot be read. Change it when the weights
    change in place."""
    namespace_extra: str = Field(default="", max_length=256)
    """Engines with different values do not share; for example one value per tenant."""
    ttl_seconds: float | None = Field(default=None, ge=1, le=SECONDS_MAX)
    """Lifetime of what is stored; none means until eviction."""
    fetch_wait_seconds: float = Field(default=2.0, ge=0, le=600)
    """How long one request may wait, in all, for bytes in flight; then the engine computes them.
    Before that it may wait equally long for its share of `prefetch_bytes`."""
    first_sight_seconds: float = Field(default=FIRST_SIGHT_SECONDS, ge=0, le=1)
    """How long one scheduling pass may wait, in all, for the node's answers about new requests."""
    prefetch_bytes: Bytes | None = Field(default=None, ge=0)
    """Bound on the bytes pinned for waiting requests; none means a quarter of the arena."""
    save_queue_bytes: Bytes = Field(default=GIB // 2, ge=0)
    """Bound on the bytes that wait to be stored. An empty queue accepts a tensor of any size."""
    save_queue_items: int = Field(default=256, ge=1, le=65536)
    """Bound on the number of tensors that wait to be stored."""
    drain_seconds: float = Field(default=2.0, ge=0, le=60)
    """How long an engine that shuts down waits until its queue is stored."""

    @field_validator("store_url")
    @classmethod
    def _readable_url(cls, value: str) -> str:
        return check_store_url(value)

    @model_validator(mode="after")
    def _reader_without_lane_or_handoffs(self) -> "SharedSettings":
        for name, off in (("device_lane", "off"), ("behind_router", False)):
            if self.read_only and (value := getattr(self, name, off)) != off:
                raise ValueError(
                    f"'read_only' is set, and {name!r} is {value!r}, which changes what others "
                    f"find; allowed with it: {off!r}"
                )
        return self

    @property
    def pin_budget_bytes(self) -> int:
        """The most bytes that waiting requests may pin. The node allows a third of its arena."""
        return self.capacity_bytes // 4 if self.prefetch_bytes is None else self.prefetch_bytes

    def buffer_config(self) -> BufferConfig:
        """The settings of the buffer."""
        return BufferConfig(**{name: getattr(self, name) for name in BufferConfig.model_fields})


class ConnectorSettings(SharedSettings):
    """Settings of one engine's encoder-cache connector."""

    metadata_wait_seconds: float = Field(default=30.0, ge=0, le=600)
    """How long one request may wait, in all, for items of which it carries only metadata; then it
    fails. While another engine holds the claim for one of them, the limit is 600 seconds in all."""
    claim_wait_seconds: float | None = Field(default=None, ge=0, le=600)
    """How long one request may wait, in all, while other engines encode its items. None means five
    times the duration of an encode here, within 10 to 60 seconds. 0: no claims, so no waiting."""
    claim_lease_seconds: float = Field(default=20.0, ge=1, le=600)
    """Lease of this engine's claims: how long other engines wait for its encode if it does not
    renew the claim. Must be longer than any of its steps."""
    idle_wait_seconds: float = Field(default=IDLE_SECONDS, ge=0, le=1)
    """How long a scheduling pass may block, in all, for what its requests wait for, if the previous
    pass found nothing to run. vLLM would otherwise poll. 0: it polls without a pause."""
    sync_fetch_seconds: float = Field(default=0.0, ge=0, le=10)
    """For vLLM before 0.23 only, which cannot delay a single request: how long one scheduling pass
    may wait, in all, for bytes of other hosts. Nothing else runs meanwhile. 0 means
    `first_sight_seconds`."""
    device_lane: Literal["off", "gloo", "nccl"] = "off"
    """Whether outputs also go from device to device: nccl between GPUs, gloo between CPUs."""
    device_pool_bytes: Bytes = Field(default=GIB, ge=1 << 20)
    """Device memory that each worker reserves for its pool, in addition to vLLM's own."""
    device_lane_host: str | None = Field(default=None, min_length=1, max_length=255)
    """Address that the workers' pools listen on; none means the host that `listen` names, or if
    that is all addresses, `advertise`."""
    device_lane_forced: bool = False
    """Use a device lane together with tensor parallelism, although it may hang the engine."""

    @model_validator(mode="after")
    def _guarded_lane(self) -> "ConnectorSettings":
        if self.device_lane != "off":
            token = self.token or self.token_file  # tls:// needs none
            guard_listener("'device_lane_host'", self.lane_host, setting_advice("token"), token)
        return self

    @property
    def lane_host(self) -> str:
        """The address that the workers' pools listen on."""
        host, _ = parse_address(self.listen)
        if host in WILDCARDS and self.advertise is not None:
            host, _ = parse_address(self.advertise)
        return self.device_lane_host or host


def parse_settings(raw: Mapping[str, Any]) -> ConnectorSettings:
    """The settings in `ec_connector_extra_config`. Raises as `parse_as`."""
    return parse_as(ConnectorSettings, raw, "ec_connector_extra_config")


def parse_as(kind: type[Settings], raw: Mapping[str, Any], where: str) -> Settings:
    """The settings that the user wrote into vLLM's option `where`.

    Raises:
        ConfigError: one line that names the first wrong setting, its value (unless it is a secret)
            and what is allowed; for an unknown name, the most similar known one.
    """
    for name in SECRETS:
        if raw.get(name) is not None:
            raise ConfigError(f"setting {name!r} is (hidden); {_PRINTED}: '{name}_file'")
    try:
        settings = kind(**raw)
    except ValidationError as error:
        raise explain(error, kind, raw, refused=SECRETS) from None
    except TypeError as error:  # a key that is no string cannot be a keyword argument
        raise ConfigError(f"{where}: every name must be a string") from error
    if settings.store_url != "embedded" and may_hold_password(settings.store_url):
        raise ConfigError(
            f"setting 'store_url' is {redact(settings.store_url)!r}; {_PRINTED}: a URL without "
            "password, and 'store_password_file' or 'store_sentinel_password_file'"
        )
    return settings


def validate_role(settings: SharedSettings, role: str, *, is_consumer: bool) -> None:
    """Raises ConfigError: the engine is to store only (`role`), and its settings say that it only
    reads."""
    if settings.read_only and not is_consumer:
        raise ConfigError(
            f"setting 'read_only' is on, and this engine has the role {role}, which only stores; "
            "give it another one, or remove 'read_only'"
        )


def validate_engine(vllm_config: Any) -> None:
    """Refuse an engine that the EC connector cannot serve.

    Raises:
        ConfigError: a model without media, an encoder-decoder, weights that change in place, or
            an unsupported layout of workers. The text says what to do.
    """
    if why := unsupported_layout(vllm_config.parallel_config):
        raise ConfigError(f"{why}; {_WITHOUT_US}")
    model = vllm_config.model_config
    name = getattr(model, "model", "")
    if getattr(model, "multimodal_config", None) is None:
        raise ConfigError(
            f"the model {name} takes no images, video or audio: there is nothing to share; "
            f"{_WITHOUT_US}"
        )
    if getattr(model, "is_encoder_decoder", False):
        # vLLM's workers never call a connector to load for these; a promised item ends the engine.
        raise ConfigError(
            f"the model {name} is an encoder-decoder, and vLLM loads encoder outputs of those from "
            f"no connector; {_WITHOUT_US}"
        )
    if getattr(vllm_config, "weight_transfer_config", None):
        raise ConfigError(
            "--weight-transfer-config changes the weights while the engine runs, and vLLM notifies "
            "no connector: outputs of old weights would be used with the new ones; "
            f"{_WITHOUT_US}"
        )


def unsupported_layout(parallel: Any) -> str:
    """Why the connectors do not support this layout of workers; empty if they do.

    One scheduler decides what all workers of its engine load, and all of them map the arena of one
    node. Data-parallel engines have one scheduler each, so each is an engine of its own.

    Args:
        parallel: vLLM's ParallelConfig.
    """
    if _is_externally_launched(parallel) and parallel.world_size > 1:
        return (
            "with distributed_executor_backend=external_launcher each of the "
            f"{parallel.world_size} processes has its own scheduler, and these may differ in what "
            "they load; use the backend mp, which has one scheduler for all workers"
        )
    if _is_run_by_ray(parallel) and parallel.world_size > 1:
        return (
            f"with distributed_executor_backend=ray the {parallel.world_size} workers of an engine "
            "may run on other hosts than its scheduler, and the memory of a lookup buffer node is "
            "shared on one host only; use the backend mp, which keeps them on one host"
        )
    nodes = getattr(parallel, "nnodes_within_dp", 1)
    if nodes > 1:
        return (
            f"--nnodes spreads the workers of one engine over {nodes} hosts, and the memory of a "
            "lookup buffer node is shared on one host only; keep each engine on one host, with "
            "--data-parallel-size for more of them"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        return "--enable-elastic-ep adds and removes workers while the engine runs"
    return ""


def _is_run_by_ray(parallel: Any) -> bool:
    """Also where vLLM chose the backend itself, in a placement group or by
    `--data-parallel-backend ray`."""
    backend = getattr(parallel, "distributed_executor_backend", None)
    return backend == "ray" or getattr(backend, "uses_ray", False) is True


def _is_externally_launched(parallel: Any) -> bool:
    backend = getattr(parallel, "distributed_executor_backend", None)
    kinds = [kind.__name__ for kind in getattr(backend, "__mro__", ())]
    return backend == "external_launcher" or "ExecutorWithExternalLauncher" in kinds
