"""`LookupBufferECConnector`: vLLM's encoder-cache interface, forwarded to one of two delegates.

vLLM makes one instance for the scheduler and one for each worker, in one process or in several.
Each method forwards to the delegate of its side, on the thread that vLLM calls it on, and does
nothing on the other side. vLLM's API server imports this module only for the class methods, so
delegates are imported when an instance is made.

Parameter names are vLLM's, because vLLM passes some by keyword. Newer versions may pass more
arguments, older versions call fewer methods; docs/compatibility.md says what each version gets.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from connectors.counters import RateLimitedLog
from connectors.ec.metadata import StepMetadata, WorkerCounts

if TYPE_CHECKING:
    import torch

    from connectors.ec.scheduler import EcScheduler
    from connectors.ec.without_gate import EcWithoutGate
    from connectors.ec.worker import EcWorker
    from connectors.identifiers import MetadataFields
    from connectors.settings import ConnectorSettings

# vLLM requires only a registered class. Inheritance would make this plain data, and with it the
# scheduler side and its tests, import vLLM.
ECConnectorMetadata.register(StepMetadata)

HAS_GATE = hasattr(ECConnectorBase, "ensure_cache_available")
"""Whether vLLM calls `ensure_cache_available` before it schedules a request (0.23 and newer)."""


class LookupBufferECConnector(ECConnectorBase):
    """Shares encoder outputs between engines through lookup buffer nodes and Redis."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self.scheduler: EcScheduler | None = None
        self.without_gate: EcWithoutGate | None = None
        self.worker: EcWorker | None = None
        self._reported: MetadataFields | None = None
        self._log = RateLimitedLog()
        settings = _checked_settings(vllm_config, role)
        if role == ECConnectorRole.SCHEDULER:
            fields = _metadata_fields(vllm_config)
            self.scheduler, self.without_gate = _make_scheduler(vllm_config, settings, fields)
            self._reported = fields if _is_encode_only(vllm_config, settings) else None
        else:
            self.worker = _make_worker(vllm_config, settings)
            if self.worker is not None and not hasattr(ECConnectorBase, "start_worker_services"):
                self.worker.start()  # vLLM before 0.30 never calls `start_worker_services`

    # -- worker --------------------------------------------------------------------------------

    def start_worker_services(self, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.start()
            self.worker.model_loaded()

    def start_save_caches(self, **kwargs: Any) -> None:
        # vLLM before 0.30 never calls this. Newer versions call it in each step of a producer.
        metadata = self._connector_metadata
        if self.worker is not None and metadata is not None:
            self.worker.save_again(kwargs["encoder_cache"], metadata)

    def start_load_caches(self, encoder_cache: "dict[str, torch.Tensor]", **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if self.worker is not None and metadata is not None:
            self.worker.load(encoder_cache, metadata)

    def save_caches(
        self, encoder_cache: "dict[str, torch.Tensor]", mm_hash: str, **kwargs: Any
    ) -> None:
        metadata = self._connector_metadata  # not bound for encoder-decoder models
        if self.worker is not None and metadata is not None:
            self.worker.save(encoder_cache, mm_hash, metadata)

    def build_connector_worker_meta(self) -> WorkerCounts | None:
        # vLLM 0.32 does not collect statistics from workers, so their counts go through the
        # scheduler.
        return self.worker.report() if self.worker is not None else None

    # -- scheduler -----------------------------------------------------------------------------

    def update_connector_output(self, connector_output: Any) -> None:
        counts = getattr(connector_output, "ec_connector_worker_meta", None)
        if self.scheduler is not None and isinstance(counts, WorkerCounts):
            self.scheduler.add_worker_counts(counts)

    def ensure_cache_available(self, request: Any, num_computed_tokens: int, **kwargs: Any) -> bool:
        assert self.scheduler is not None
        return self.scheduler.gate.ensure_cache_available(request, num_computed_tokens)

    def has_cache_item(self, identifier: str, **kwargs: Any) -> bool:
        assert self.scheduler is not None
        if self.without_gate is not None:
            self.without_gate.look_up(identifier)
        return self.scheduler.has_cache_item(identifier)

    def has_caches(self, request: Any, **kwargs: Any) -> list[bool]:
        """Called by vLLM before 0.15, for a whole request in each step."""
        assert self.without_gate is not None
        return self.without_gate.has_caches(request)

    def update_state_after_alloc(self, request: Any, index: int, **kwargs: Any) -> None:
        # vLLM before 0.18 calls this for loads only, later versions for every item. The lookup goes
        # through `self`, because vLLM's own tests replace the method there.
        assert self.scheduler is not None
        is_hit = self.has_cache_item(request.mm_features[index].identifier)
        self.scheduler.item_allocated(request, index, is_hit=is_hit)
        if self.without_gate is not None:
            self.without_gate.allocated(request.request_id, index)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self.scheduler is not None
        if self.without_gate is not None:
            self.without_gate.end_pass(scheduler_output)
        return self.scheduler.build_metadata(scheduler_output)

    def take_unavailable_requests(self) -> set[str]:
        assert self.scheduler is not None
        unavailable = self.scheduler.gate.take_unavailable_requests()
        for request_id, why in unavailable.items():  # vLLM gives its client no reason
            message = "request %s fails: it carries no media, and %s"
            self._log.report(f"unavailable:{why.reason}", message, request_id, why.text)
        return set(unavailable)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        # Never True: vLLM would never free the request.
        assert self.scheduler is not None
        self.scheduler.gate.forget(request.request_id)
        try:
            reported = self._reported and self._reported.report(request.mm_features)
        except Exception as error:  # noqa: BLE001 -- vLLM's code on a client's fields
            message = "request %s: its items are not reported in ec_transfer_params: %s"
            self._log.report("not_reported", message, request.request_id, error)
            return False, None
        return False, reported or None

    # -- both ----------------------------------------------------------------------------------

    def get_ec_connector_stats(self) -> Any:
        side = self.scheduler or self.worker
        fresh = side.counters.take() if side is not None else {}
        return self.build_ec_connector_stats(fresh) if fresh else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from connectors.ec.stats import EcStats

        return EcStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        from connectors.ec.stats import EcPromMetrics

        return EcPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.without_gate is not None:
            self.without_gate.close()
        if self.scheduler is not None:
            self.scheduler.close()
        if self.worker is not None:
            self.worker.close()


def _checked_settings(vllm_config: Any, role: ECConnectorRole) -> "ConnectorSettings":
    """Read and validate the settings. On an error, log one line that names the reason and raise."""
    from connectors.counters import logger
    from connectors.ec.lane import validate_device_lane
    from connectors.ec.seat import loading_ranks, roles
    from connectors.identifiers import validate_identifiers
    from connectors.settings import parse_settings, validate_engine, validate_role
    from lookup_buffer.errors import ConfigError

    try:
        settings = parse_settings(vllm_config.ec_transfer_config.ec_connector_extra_config or {})
        validate_engine(vllm_config)
        validate_role(settings, "ec_producer", is_consumer=roles(vllm_config, settings)[1])
        validate_device_lane(settings, loading_ranks(vllm_config))
        validate_identifiers(vllm_config)
    except ConfigError as error:
        if role == ECConnectorRole.SCHEDULER or vllm_config.parallel_config.rank == 0:
            logger.error("LookupBufferECConnector: %s", error)
        raise
    return settings


def _metadata_fields(vllm_config: Any) -> "MetadataFields":
    from connectors.identifiers import MetadataFields

    return MetadataFields(vllm_config.model_config)


def _is_encode_only(vllm_config: Any, settings: "ConnectorSettings") -> bool:
    """Whether this engine only encodes. Other engines then serve the requests, and need the
    metadata of its items."""
    from connectors.ec.seat import roles

    is_producer, is_consumer = roles(vllm_config, settings)
    return is_producer and not is_consumer


def _make_scheduler(
    vllm_config: Any, settings: "ConnectorSettings", fields: "MetadataFields"
) -> "tuple[EcScheduler, EcWithoutGate | None]":
    from connectors.ec.scheduler import EcScheduler
    from connectors.ec.seat import engine_shape, open_buffer

    buffer = open_buffer(vllm_config, settings, rank=None)
    shape = engine_shape(vllm_config, settings)
    metadata_fields = fields.fields_for
    scheduler = EcScheduler(buffer, settings, shape, metadata_fields=metadata_fields)
    if HAS_GATE:
        return scheduler, None
    from connectors.ec.without_gate import EcWithoutGate

    return scheduler, EcWithoutGate(
        scheduler, buffer, settings, shape, metadata_fields=metadata_fields
    )


def _make_worker(vllm_config: Any, settings: "ConnectorSettings") -> "EcWorker | None":
    from connectors.ec.lane import WorkerDeviceLane
    from connectors.ec.seat import engine_id, identity, open_buffer, roles, worker_seat
    from connectors.ec.worker import EcWorker
    from connectors.identifiers import reach_encoder
    from connectors.weights import WeightsWatch

    seat = worker_seat(vllm_config, settings)
    if seat is None:
        return None
    # Read now: the model may change its configuration while it loads, and its files may change.
    mark = identity(vllm_config, settings).weights.mark
    rank, device = seat.rank, seat.device
    experts_move = bool(getattr(vllm_config.parallel_config, "enable_eplb", False))
    weights = None
    if rank == 0:
        weights = WeightsWatch(
            engine_id(vllm_config),
            experts_move=experts_move,
            mark=mark,
            adapters=reach_encoder(vllm_config),
        )

    def make_lane() -> WorkerDeviceLane | None:
        if settings.device_lane == "off":
            return None
        loads, stores = roles(vllm_config, settings)[1], seat.stores
        return WorkerDeviceLane(settings, device, loads=loads, stores=stores)

    return EcWorker(
        lambda: open_buffer(vllm_config, settings, rank=rank),
        settings,
        seat,
        weights=weights,
        make_lane=make_lane,
    )
