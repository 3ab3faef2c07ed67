"""`LookupBufferKVConnector`: vLLM's KV-cache interface, routed to one of two delegates.

vLLM makes one instance for the scheduler and one per worker, in one process or in several. A method
here forwards to the delegate of its side and does nothing on the other. vLLM's API server imports
this module only for the class methods, so it imports no delegate until an instance is made.

Parameter names are vLLM's: it passes some by keyword. The class does not declare `SupportsHMA`. So
vLLM disables its hybrid cache manager, unless the user forces it, and there is one kind of block.
"""

from typing import TYPE_CHECKING, Any

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
except ImportError as error:
    raise ImportError("LookupBufferKVConnector needs vLLM 0.30 or newer") from error

from connectors.kv.metadata import KvStepMetadata, KvWorkerReport
from connectors.plugin import register

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from connectors.kv.engine import KvSettings
    from connectors.kv.scheduler import KvScheduler
    from connectors.kv.worker import KvWorker

# vLLM's MultiConnector looks up connectors by the names in their statistics, and ends the engine if
# a name is not registered. So register here too, in case plugins are off.
register()
# vLLM only requires virtual subclasses; inheritance would make the plain data import vLLM.
KVConnectorMetadata.register(KvStepMetadata)
KVConnectorWorkerMetadata.register(KvWorkerReport)


class LookupBufferKVConnector(KVConnectorBase_V1):
    """Shares the KV cache of prompt prefixes between engines, through lookup buffer nodes and
    Redis."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler: KvScheduler | None = None
        self.worker: KvWorker | None = None
        self._lost_blocks: set[int] = set()
        settings = _checked_settings(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = _make_scheduler(vllm_config, kv_cache_config, settings)
        else:
            self.worker = _make_worker(vllm_config, kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: KV that is not stored is computed again."""
        return False

    # -- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "Mapping[str, torch.Tensor]") -> None:
        if self.worker is not None:
            self.worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self.worker is not None:
            self.worker.copy_out_before_writes(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM schedules a request only after all of its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole chunks are stored, after all of their layers are computed."""

    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For vLLM releases and wrappers that do not call `get_transfer_results`."""
        if self.worker is None:
            return None, None
        metadata = self._connector_metadata
        is_idle = isinstance(metadata, KvStepMetadata) and metadata.is_idle
        results = self.worker.results(is_idle=is_idle)
        self._lost_blocks |= results.lost_blocks
        return None, results.loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        _, loaded = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=loaded or set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def build_connector_worker_meta(self) -> KvWorkerReport | None:
        return self.worker.report() if self.worker is not None else None

    # -- scheduler -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvStepMetadata:
        assert self.scheduler is not None
        return self.scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        mine = report if isinstance(report, KvWorkerReport) else None
        self.scheduler.process_report(mine, set(connector_output.finished_recving or ()))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        # False: vLLM may reuse the blocks at once; see `handle_preemptions`.
        return False, self.scheduler.finished(request)

    def reset_cache(self) -> bool | None:
        """vLLM drops its own prefix cache, also on `/pause` and `/sleep`. Nothing is dropped here:
        chunks stay valid for these weights, and the workers detect a change of weights.
        """
        return True

    # -- both ----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        # The scheduler's counters include the workers', from their reports.
        fresh = self.scheduler.counters.take() if self.scheduler is not None else {}
        return self.build_kv_connector_stats(fresh) if fresh else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from connectors.kv.stats import KvStats

        return KvStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        from connectors.kv.stats import KvPromMetrics

        return KvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        if self.worker is not None:
            self.worker.close()


def _checked_settings(vllm_config: Any, role: Any, kv_cache_config: Any) -> "KvSettings":
    """Parse the settings and check the engine.

    Raises:
        ConfigError: the settings or the engine are refused. vLLM's start ends; one line in the log
            has the reason.
    """
    from connectors.counters import logger
    from connectors.identifiers import validate_identifiers
    from connectors.kv.engine import parse_kv_settings, set_recompute_policy, validate_cache
    from connectors.settings import validate_role
    from lookup_buffer.errors import ConfigError

    transfer = vllm_config.kv_transfer_config
    try:
        settings = parse_kv_settings(transfer.kv_connector_extra_config or {})
        validate_role(settings, "kv_producer", is_consumer=bool(transfer.is_kv_consumer))
        validate_cache(vllm_config, kv_cache_config)
        validate_identifiers(vllm_config)
    except ConfigError as error:
        if role == KVConnectorRole.SCHEDULER or vllm_config.parallel_config.rank == 0:
            logger.error("LookupBufferKVConnector: %s", error)
        raise
    if role == KVConnectorRole.SCHEDULER:
        set_recompute_policy(transfer)
    return settings


def _make_scheduler(
    vllm_config: Any, kv_cache_config: Any, settings: "KvSettings"
) -> "KvScheduler":
    from connectors.kv.rank import kv_shape, open_buffer
    from connectors.kv.scheduler import KvScheduler

    shape = kv_shape(vllm_config, kv_cache_config, settings)
    buffer = open_buffer(vllm_config, kv_cache_config, settings, rank=None)
    return KvScheduler(buffer, settings, shape)


def _make_worker(vllm_config: Any, kv_cache_config: Any, settings: "KvSettings") -> "KvWorker":
    from connectors.kv.rank import engine_id, identity, open_buffer, rank_of
    from connectors.kv.worker import KvWorker
    from connectors.weights import WeightsWatch

    rank = rank_of(vllm_config)
    mark = identity(vllm_config, kv_cache_config, settings).weights.mark
    experts_move = bool(getattr(vllm_config.parallel_config, "enable_eplb", False))
    return KvWorker(
        lambda: open_buffer(vllm_config, kv_cache_config, settings, rank=rank),
        settings,
        rank=rank,
        num_blocks=kv_cache_config.num_blocks,
        weights=WeightsWatch(
            engine_id(vllm_config),
            names=(),
            experts_move=experts_move,
            mark=mark,
            adapters=getattr(vllm_config, "lora_config", None) is not None,
        ),
    )
