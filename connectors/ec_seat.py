"""Where an engine's scheduler and workers sit, read from vLLM's configuration, and their clients.

The one place that knows vLLM's configuration classes apart from `namespace`; called at start.
"""

import time
from typing import Any, cast

from connectors.counters import logger
from connectors.ec_current import CurrentBuffer
from connectors.ec_shape import EngineShape
from connectors.ec_worker import WorkerSeat
from connectors.namespace import namespace_parts
from connectors.plugin import CONNECTOR_NAME
from connectors.settings import ConnectorSettings
from connectors.weights_flag import WeightsFlag
from lookup_buffer.client import EngineSeat, LookupBuffer
from lookup_buffer.errors import LookupBufferError, NodeUnavailable
from lookup_buffer.namespace import Namespace
from store import redact

STORE_SECONDS = 5.0
_PARTS = "_lookup_buffer_namespace"


def roles(vllm_config: Any) -> tuple[bool, bool]:
    """Whether the engine produces, and whether it consumes."""
    ec = vllm_config.ec_transfer_config
    is_producer = bool(ec.is_ec_producer)
    # Before 0.17 there is no `ec_both`: whoever does not produce consumes.
    return is_producer, bool(getattr(ec, "is_ec_consumer", not is_producer))


def loading_ranks(vllm_config: Any) -> int:
    """How many workers load each item: those of the first pipeline stage."""
    parallel = vllm_config.parallel_config
    return int(
        parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    )


def engine_shape(vllm_config: Any) -> EngineShape:
    is_producer, is_consumer = roles(vllm_config)
    model = vllm_config.model_config
    itemsize = getattr(model.dtype, "itemsize", 2)
    return EngineShape(
        is_producer=is_producer,
        is_consumer=is_consumer,
        steps_in_flight=_steps_in_flight(vllm_config),
        embed_bytes=int(model.get_hidden_size()) * itemsize,
    )


def _steps_in_flight(vllm_config: Any) -> int:
    known = getattr(vllm_config, "max_concurrent_batches", None)
    if known is not None:
        return int(known)
    # Hosts that keep the number in the executor; one more than theirs costs only a later release.
    return int(vllm_config.parallel_config.pipeline_parallel_size) + 1


def worker_seat(vllm_config: Any) -> WorkerSeat | None:
    """This worker's seat, or None on the pipeline stages that run no encoder."""
    stage, rank = divmod(int(vllm_config.parallel_config.rank), loading_ranks(vllm_config))
    if stage > 0:
        return None
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    if device != "cpu":
        import torch

        device = f"{device}:{torch.accelerator.current_device_index()}"
    return WorkerSeat(rank=rank, is_producer=roles(vllm_config)[0], device=device)


def open_buffer(vllm_config: Any, settings: ConnectorSettings, rank: int | None) -> LookupBuffer:
    """The client of the scheduler (`rank` None) or of one worker.

    Raises:
        LookupBufferError: the configuration is refused, or node or store are required and absent.
    """
    seat = EngineSeat(
        engine_id=engine_id(vllm_config),
        rank=rank,
        world_size=loading_ranks(vllm_config),
    )
    namespace = engine_namespace(vllm_config, settings)
    if rank in (None, 0):
        logger.info("lookup buffer: namespace %s", namespace.fingerprint)
    try:
        buffer = LookupBuffer(
            settings.buffer_config(), namespace, engine=seat, required=settings.required
        )
        if rank is None:
            _check_reachable(buffer, settings)
            return _while_current(buffer, seat.engine_id)
    except LookupBufferError as error:
        if rank in (None, 0):  # the first of them ends the start, so this is said once
            logger.error("%s: %s", CONNECTOR_NAME, error)
        raise
    return buffer


def engine_id(vllm_config: Any) -> str:
    """vLLM tells data-parallel engines apart for KV connectors only; ours would share their claims,
    and one would take the other's workers for its own."""
    common, parallel = vllm_config.ec_transfer_config.engine_id, vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    return f"{common}_dp{index}" if index else str(common)


def _while_current(buffer: LookupBuffer, engine_id: str) -> LookupBuffer:
    """The client for as long as this engine has the weights that its namespace names."""
    try:
        flag = WeightsFlag.adopt(engine_id)
    except OSError:
        logger.warning("lookup buffer: weights that change in this engine would not be noticed")
        return buffer
    return cast("LookupBuffer", CurrentBuffer(buffer, flag))


def _check_reachable(buffer: LookupBuffer, settings: ConnectorSettings) -> None:
    """Say at start what would otherwise only show as misses."""
    if not buffer.attached:
        logger.warning("lookup buffer: no node yet; until there is one, nothing is shared")
    elif not _store_comes_up(buffer):
        what = f"the store at {redact(settings.store_url)} cannot be reached"
        if settings.required:
            buffer.close()
            raise NodeUnavailable(f"{what}, and setting 'required' is on")
        logger.warning("lookup buffer: %s; until it can, hosts share nothing", what)


def _store_comes_up(buffer: LookupBuffer) -> bool:
    """Whether the node reaches its store; a node that just started is given time to connect."""
    deadline = time.monotonic() + STORE_SECONDS
    while time.monotonic() < deadline:
        try:
            if buffer.stats()["store_up"]:
                return True
        except NodeUnavailable:
            return False
        time.sleep(0.05)
    return False


def engine_namespace(vllm_config: Any, settings: ConnectorSettings) -> Namespace:
    """One namespace per engine.

    Where scheduler and worker share a process they share the configuration's objects too, and a
    model may change its own configuration while it loads. So the first to ask leaves its answer.
    """
    ec = vllm_config.ec_transfer_config
    parts = getattr(ec, _PARTS, None)
    if parts is None:
        parts = namespace_parts(vllm_config, settings)
        object.__setattr__(ec, _PARTS, parts)
    return Namespace(parts)
