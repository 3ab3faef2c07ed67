"""What the scheduler side has to know about its engine's KV cache."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvShape:
    """Plain facts, known at start."""

    is_producer: bool
    is_consumer: bool
    block_size: int
    """Tokens of a block."""
    chunk_tokens: int
    """Tokens of a chunk, whole blocks."""
    chunk_bytes: int
    """Of all ranks together."""
    ranks: int
    stores_generated: bool
    """Whether chunks that end in generated tokens are stored: not with speculation, where what was
    computed may be taken back."""
    adapters_encode: bool = False
    """Whether LoRA adapters have a part in encoder outputs."""
