"""Opens the clients of the KV connector: the scheduler's, and one for each worker's rank.

Reads rank, number of ranks and cache shape from vLLM's configuration. Called at start.
"""

from typing import Any

from connectors import client
from connectors.identifiers import mixes_adapters, reach_encoder
from connectors.kv.engine import KvSettings, KvShape, chunk_blocks, kv_identity
from connectors.namespace import Identity, cached_identity
from connectors.plugin import KV_CONNECTOR_NAME
from lookup_buffer.client.buffer import EngineRank, LookupBuffer

_IDENTITY = "_lookup_buffer_kv_identity"


def kv_shape(vllm_config: Any, kv_cache_config: Any, settings: KvSettings) -> KvShape:
    transfer, ranks = vllm_config.kv_transfer_config, ranks_of(vllm_config)
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    blocks = chunk_blocks(settings.chunk_tokens, spec.block_size)
    return KvShape(
        is_producer=bool(transfer.is_kv_producer) and not settings.read_only,
        is_consumer=bool(transfer.is_kv_consumer),
        block_size=spec.block_size,
        chunk_tokens=blocks * spec.block_size,
        chunk_bytes=blocks * spec.page_size_bytes * len(group.layer_names) * ranks,
        ranks=ranks,
        stores_generated=settings.store_generated and vllm_config.speculative_config is None,
        adapters_encode=reach_encoder(vllm_config),
        adapters_mixed=mixes_adapters(vllm_config),
    )


def ranks_of(vllm_config: Any) -> int:
    """The number of workers that hold a part of the cache."""
    return int(vllm_config.parallel_config.tensor_parallel_size)


def rank_of(vllm_config: Any) -> int:
    return int(vllm_config.parallel_config.rank) % ranks_of(vllm_config)


def engine_id(vllm_config: Any) -> str:
    transfer = vllm_config.kv_transfer_config
    # With both connectors in one engine, each needs its own weights flag: hence the suffix.
    return client.engine_id(f"{transfer.engine_id}-kv", vllm_config.parallel_config)


def open_buffer(
    vllm_config: Any, kv_cache_config: Any, settings: KvSettings, rank: int | None
) -> LookupBuffer:
    """Open the client of the scheduler (`rank` None) or of one worker. Raises as `open_client`."""
    engine_rank = EngineRank(
        engine_id(vllm_config),
        rank,
        ranks_of(vllm_config),
        device="" if rank is None else client.device_name(),
    )
    engine_identity = identity(vllm_config, kv_cache_config, settings)
    return client.open_client(settings, engine_rank, engine_identity, KV_CONNECTOR_NAME)


def identity(vllm_config: Any, kv_cache_config: Any, settings: KvSettings) -> Identity:
    """The engine's identity, made once: vLLM makes KV connectors after the model is loaded."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    owner = vllm_config.kv_transfer_config
    return cached_identity(owner, _IDENTITY, lambda: kv_identity(vllm_config, settings, spec))
