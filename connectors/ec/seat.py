"""Reads vLLM's configuration for scheduler and workers, and opens their clients.

`LookupBufferECConnector` calls it at start. Apart from `namespace`, no other module reads vLLM's
configuration classes.
"""

from collections.abc import Iterator
from typing import Any

from connectors import client
from connectors.ec.outputs import EncoderOutputs
from connectors.ec.shape import EngineShape
from connectors.ec.worker import WorkerSeat
from connectors.identifiers import reach_encoder
from connectors.namespace import Identity, cached_identity, engine_identity
from connectors.plugin import CONNECTOR_NAME
from connectors.settings import ConnectorSettings
from lookup_buffer.client.buffer import EngineRank, LookupBuffer

_IDENTITY = "_lookup_buffer_identity"


def roles(vllm_config: Any, settings: ConnectorSettings) -> tuple[bool, bool]:
    """Whether the engine produces, and whether it consumes. One that only reads consumes alone."""
    ec = vllm_config.ec_transfer_config
    is_producer = bool(ec.is_ec_producer)
    # vLLM before 0.17 has no `ec_both`: an engine that does not produce consumes.
    is_consumer = bool(getattr(ec, "is_ec_consumer", not is_producer))
    return is_producer and not settings.read_only, is_consumer


def loading_ranks(vllm_config: Any) -> int:
    """How many workers load each item: those of the first pipeline stage."""
    parallel = vllm_config.parallel_config
    return int(
        parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    )


def engine_shape(vllm_config: Any, settings: ConnectorSettings) -> EngineShape:
    is_producer, is_consumer = roles(vllm_config, settings)
    model = vllm_config.model_config
    itemsize = getattr(model.dtype, "itemsize", 2)
    return EngineShape(
        is_producer=is_producer,
        is_consumer=is_consumer,
        steps_in_flight=_steps_in_flight(vllm_config),
        embed_bytes=int(model.get_hidden_size()) * itemsize,
        adapters_encode=reach_encoder(vllm_config),
        outputs=_encoder_outputs(vllm_config),
        encode_rows=int(vllm_config.scheduler_config.max_num_encoder_input_tokens),
    )


def _encoder_outputs(vllm_config: Any) -> EncoderOutputs:
    """What is known of the encoder's outputs before it has run for a request."""
    model = vllm_config.model_config
    # vLLM before 0.30 does not forward what workers report. An encoder with a dtype of its own
    # would then be refused forever, so the dtype is not compared there.
    dtype = str(model.dtype).removeprefix("torch.") if _workers_report() else ""
    width = getattr(model, "get_inputs_embeds_size", None) or model.get_hidden_size
    multimodal = getattr(model, "multimodal_config", None)
    is_pruned = getattr(multimodal, "is_multimodal_pruning_enabled", lambda: False)
    read = getattr(getattr(model, "hf_config", None), "to_dict", dict)
    return EncoderOutputs(
        dtype=dtype,
        width=int(width()),
        levels=frozenset({1, *_levels(read())}),
        has_positions=is_pruned(),
        # Set on engines that produce, since vLLM 0.30.
        measured=getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", None) or {},
    )


def _workers_report() -> bool:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    return hasattr(ECConnectorBase, "start_worker_services")


def _levels(config: Any) -> Iterator[int]:
    """Possible multiples of the width by DeepStack, from the model's configuration at any depth:
    the number of layers that it names, with and without the encoder's own output."""
    if isinstance(config, list):
        for value in config:
            yield from _levels(value)
    if not isinstance(config, dict):
        return
    for name, value in config.items():
        yield from _levels(value)
        if value and "deepstack" in str(name):
            count = len(value) if isinstance(value, list | tuple | dict) else value
            if isinstance(count, int) and count is not True:
                yield from (count, count + 1)


def _steps_in_flight(vllm_config: Any) -> int:
    known = getattr(vllm_config, "max_concurrent_batches", None)
    if known is not None:
        return int(known)
    # Older vLLM versions keep the number in the executor. One more than theirs only delays a
    # release.
    return int(vllm_config.parallel_config.pipeline_parallel_size) + 1


def worker_seat(vllm_config: Any, settings: ConnectorSettings) -> WorkerSeat | None:
    """The position of this worker; None on pipeline stages that run no encoder."""
    stage, rank = divmod(int(vllm_config.parallel_config.rank), loading_ranks(vllm_config))
    if stage > 0:
        return None
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    if device != "cpu":
        import torch

        device = f"{device}:{torch.accelerator.current_device_index()}"
    return WorkerSeat(rank=rank, is_producer=roles(vllm_config, settings)[0], device=device)


def open_buffer(vllm_config: Any, settings: ConnectorSettings, rank: int | None) -> LookupBuffer:
    """The client of the scheduler (`rank` None) or of one worker. Raises as `open_client`."""
    engine_rank = EngineRank(
        engine_id=engine_id(vllm_config),
        rank=rank,
        world_size=loading_ranks(vllm_config),
        encodes=True,
        device="" if rank is None else client.device_name(),
    )
    return client.open_client(
        settings, engine_rank, identity(vllm_config, settings), CONNECTOR_NAME
    )


def engine_id(vllm_config: Any) -> str:
    return client.engine_id(vllm_config.ec_transfer_config.engine_id, vllm_config.parallel_config)


def identity(vllm_config: Any, settings: ConnectorSettings) -> Identity:
    """One per engine. Has to be read before the model is loaded."""
    owner = vllm_config.ec_transfer_config
    return cached_identity(owner, _IDENTITY, lambda: engine_identity(vllm_config, settings))
