"""Where an engine's scheduler and workers sit, read from vLLM's configuration, and their clients.

The one place that knows vLLM's configuration classes apart from `namespace`; called at start.
"""

from typing import Any

from connectors import seat
from connectors.ec.shape import EngineShape
from connectors.ec.worker import WorkerSeat
from connectors.namespace import engine_identity
from connectors.naming import Identity, remembered
from connectors.plugin import CONNECTOR_NAME
from connectors.settings import ConnectorSettings
from lookup_buffer.client import EngineSeat, LookupBuffer

_IDENTITY = "_lookup_buffer_identity"


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
    """The client of the scheduler (`rank` None) or of one worker. Raises as `open_client`."""
    place = EngineSeat(
        engine_id=engine_id(vllm_config),
        rank=rank,
        world_size=loading_ranks(vllm_config),
        encodes=True,
        device="" if rank is None else seat.device_name(),
    )
    return seat.open_client(settings, place, identity(vllm_config, settings), CONNECTOR_NAME)


def engine_id(vllm_config: Any) -> str:
    return seat.engine_id(vllm_config.ec_transfer_config.engine_id, vllm_config.parallel_config)


def identity(vllm_config: Any, settings: ConnectorSettings) -> Identity:
    """One per engine; to be asked for before the model is loaded."""
    owner = vllm_config.ec_transfer_config
    return remembered(owner, _IDENTITY, lambda: engine_identity(vllm_config, settings))
