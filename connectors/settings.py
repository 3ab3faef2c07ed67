"""The settings in `ec_connector_extra_config`, and those that `kv_connector_extra_config` shares
with them (`SharedSettings`). They are validated before use.

The buffer's own settings keep their names (`store_url`, `capacity_bytes`, `node_socket`, ...; see
`BufferConfig`); this module adds those of the connector. Parsing is pure, except that it reads the
files that hold secrets.

Also here: which engines no connector can serve, with what their operator is to do instead (called
at start, before the weights are loaded, for scheduler and workers); and `disclosed`. A namespace is
published in clear text to everyone who reads Redis. `disclosed` replaces a credential, or a value
named like one, by a digest, and a path on this machine by its last part and a digest. So different
values stay different.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from lookup_buffer.config import GIB, SECRETS, BufferConfig, Bytes, explain, guard_listener
from lookup_buffer.environment import read_secret
from lookup_buffer.errors import ConfigError
from lookup_buffer.protocol.messages import SECONDS_MAX
from store import redact
from store.url import parse

logger = logging.getLogger(__name__)

SECRET_FILES = {f"{name}_file": name for name in SECRETS}
MILLISECOND_SECONDS = 1e-3
_PRINTED = "vLLM prints its settings when it starts, so a secret cannot be one; allowed"

Settings = TypeVar("Settings", bound="SharedSettings")


class SharedSettings(BufferConfig):
    """The settings of both connectors. Immutable; unknown names are refused."""

    required: bool = False
    """Whether the engine refuses to start when node or store cannot be reached."""
    token_file: Path | None = None
    """File with the fleet's token, instead of `token`."""
    http_token_file: Path | None = None
    """File with the token for `/metrics`, instead of `http_token`."""
    store_password_file: Path | None = None
    """File with the store's password, instead of `store_password`."""
    store_sentinel_password_file: Path | None = None
    """File with the sentinels' password, instead of `store_sentinel_password`."""
    weights_version: str = Field(default="", max_length=256)
    """Names the weights where their content cannot be read: change it when they change in place."""
    namespace_extra: str = Field(default="", max_length=256)
    """Engines with different values do not share, e.g. one value per tenant."""
    ttl_seconds: float | None = Field(default=None, ge=1, le=SECONDS_MAX)
    """Lifetime of what is stored; none means until it is evicted."""
    fetch_wait_seconds: float = Field(default=2.0, ge=0, le=600)
    """How long one request may wait, in all, for bytes in flight; then the engine computes them.
    Before that it may wait as long again for room in the budget that other requests hold
    (`prefetch_bytes`)."""
    first_sight_seconds: float = Field(default=MILLISECOND_SECONDS, ge=0, le=1)
    """How long one scheduling pass may wait, in all, for the node's answers about new requests."""
    prefetch_bytes: Bytes | None = Field(default=None, ge=0)
    """Bound on bytes pinned for requests that wait; none means a quarter of the arena."""
    save_queue_bytes: Bytes = Field(default=GIB // 2, ge=0)
    """Bound on the bytes that wait to be stored. One tensor is always accepted, whatever its
    size."""
    save_queue_items: int = Field(default=256, ge=1, le=65536)
    """Bound on the number of tensors that wait to be stored."""
    drain_seconds: float = Field(default=2.0, ge=0, le=60)
    """How long an engine that shuts down waits until its queue is stored."""

    @field_validator("store_url")
    @classmethod
    def _readable_url(cls, value: str) -> str:
        if value != "embedded":
            parse(value)
        return value

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
    """How long one request may wait, in all, for items of which it carries only metadata. While
    another engine holds the claim for one of them it may wait longer, up to 600 seconds in all.
    Then the request fails."""
    claim_wait_seconds: float | None = Field(default=None, ge=0, le=600)
    """How long one request may wait, in all, while other engines encode its items. None means five
    times the duration of an encode here, within 10 to 60 seconds. 0: no claims, so no waiting."""
    claim_lease_seconds: float = Field(default=20.0, ge=1, le=600)
    """Lease of this engine's claims: how long other engines wait for its encode without a renewal.
    Must be longer than any of its steps."""
    idle_wait_seconds: float = Field(default=2 * MILLISECOND_SECONDS, ge=0, le=1)
    """How long a scheduling pass may block, in all, for what its requests wait for, where the pass
    before it found nothing to run. vLLM would only ask again at once. 0: it polls without a
    pause."""
    sync_fetch_seconds: float = Field(default=0.0, ge=0, le=10)
    """For vLLM before 0.23 only, which cannot hold a request back: how long one scheduling pass may
    wait, in all, for bytes of other hosts. Nothing else runs meanwhile. 0 means
    `first_sight_seconds`."""
    device_lane: Literal["off", "gloo", "nccl"] = "off"
    """Whether outputs also go from device to device: nccl between GPUs, gloo between CPUs."""
    device_pool_bytes: Bytes = Field(default=GIB, ge=1 << 20)
    """Device memory that each worker reserves for that, on top of vLLM's own."""
    device_lane_host: str | None = Field(default=None, min_length=1, max_length=255)
    """Address that the workers' pools listen on; none means the host that `listen` names."""
    device_lane_forced: bool = False
    """Use a device lane together with tensor parallelism, although it may hang the engine."""

    @model_validator(mode="after")
    def _guarded_lane(self) -> "ConnectorSettings":
        if self.device_lane != "off" and self.device_lane_host is not None:
            guard_listener("'device_lane_host'", self.device_lane_host, "token", self.token)
        return self


def parse_settings(raw: Mapping[str, Any]) -> ConnectorSettings:
    """The settings in `ec_connector_extra_config`. Raises as `parse_as`."""
    return parse_as(ConnectorSettings, raw, "ec_connector_extra_config")


def parse_as(kind: type[Settings], raw: Mapping[str, Any], where: str) -> Settings:
    """The settings that the user wrote into vLLM's option `where`.

    Raises:
        ConfigError: one line that names the first wrong setting, its value (unless it is a secret)
            and what is allowed; for an unknown name, the most similar known one.
    """
    secrets: dict[str, str] = {}
    for file_setting, name in SECRET_FILES.items():
        if raw.get(name) is not None:
            raise ConfigError(f"setting {name!r} is (hidden); {_PRINTED}: {file_setting!r}")
        if isinstance(path := raw.get(file_setting), str | Path):
            secrets[name] = read_secret(Path(path), f"the file of setting {file_setting!r}")
    try:
        settings = kind(**(dict(raw) | secrets))
    except ValidationError as error:
        raise explain(error, kind, raw) from None
    except TypeError as error:  # a key that is no string cannot be a keyword argument
        raise ConfigError(f"{where}: every name must be a text") from error
    if settings.store_url != "embedded" and parse(settings.store_url).with_secret:
        raise ConfigError(
            f"setting 'store_url' is {redact(settings.store_url)!r}; {_PRINTED}: a URL without "
            "password, and 'store_password_file' or 'store_sentinel_password_file'"
        )
    return settings


_WITHOUT_US = "start this engine without --ec-transfer-config"


def refuse_unfit_engine(vllm_config: Any) -> None:
    """Refuse an engine that has no encoder outputs to share, or whose weights change in place.

    Raises:
        ConfigError: a model without media, an encoder-decoder, weights that change in place, or
            workers that the connector does not reach. The text says what to do.
    """
    if why := unfit_ranks(vllm_config.parallel_config):
        raise ConfigError(f"{why}; {_WITHOUT_US}")
    model = vllm_config.model_config
    name = getattr(model, "model", "")
    if getattr(model, "multimodal_config", None) is None:
        raise ConfigError(
            f"the model {name} takes no images, video or audio: there is nothing to share; "
            f"{_WITHOUT_US}"
        )
    if getattr(model, "is_encoder_decoder", False):
        # For those vLLM's workers never call a connector to load: a promised item ends the engine.
        raise ConfigError(
            f"the model {name} is an encoder-decoder, whose encoder outputs vLLM takes from no "
            f"connector; {_WITHOUT_US}"
        )
    if getattr(vllm_config, "weight_transfer_config", None):
        raise ConfigError(
            "--weight-transfer-config changes the weights while the engine runs, and vLLM tells no "
            "connector of that: outputs of old weights would be taken for those of new ones; "
            f"{_WITHOUT_US}"
        )


def unfit_ranks(parallel: Any) -> str:
    """Why the connectors cannot serve workers in this layout; "" where they can.

    One scheduler decides for all workers of its engine what to load, and all of them map the arena
    of one node. Data parallel engines have a scheduler each, so each counts as an engine.

    Args:
        parallel: vLLM's ParallelConfig.
    """
    if _is_externally_launched(parallel) and parallel.world_size > 1:
        return (
            "with distributed_executor_backend=external_launcher each of the "
            f"{parallel.world_size} processes has a scheduler of its own, and they would not agree "
            "on what is loaded; use the backend mp, which has one scheduler for all workers"
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


def _is_externally_launched(parallel: Any) -> bool:
    backend = getattr(parallel, "distributed_executor_backend", None)
    kinds = [kind.__name__ for kind in getattr(backend, "__mro__", ())]
    return backend == "external_launcher" or "ExecutorWithExternalLauncher" in kinds


_SECRET = re.compile(r"(?:^|[_-])(?:key|token|secret|password|passwd|credentials?|auth)s?$", re.I)
_USER = re.compile(r"(?<=://)[^/@]*@")
_DIGITS = 16


def disclosed(value: Any) -> Any:
    """`value`, however nested, without secrets and paths. Equal for equal values."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {
            key: _withheld(member) if _SECRET.search(str(key)) else disclosed(member)
            for key, member in value.items()
        }
    if isinstance(value, list | tuple):
        return [disclosed(member) for member in value]
    if isinstance(value, set | frozenset):
        return {disclosed(member) for member in value}
    return value


def _text(text: str) -> str:
    if text.startswith(("/", "~", "file:")):
        name = text.rstrip("/").rpartition("/")[2]
        return f"{name} (path {_digest(text)})"
    if _USER.search(text):
        return f"{_USER.sub('', text)} (login {_digest(text)})"
    return text


def _withheld(value: Any) -> str:
    return f"(withheld {_digest(repr(value))})" if value else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
