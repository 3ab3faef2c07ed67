"""What the scheduler side has to know about its engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Plain facts, known at start."""

    is_producer: bool
    is_consumer: bool
    steps_in_flight: int
    """Steps that vLLM may have scheduled and not finished (`max_concurrent_batches`)."""
    embed_bytes: int
    """Size of one row of an encoder output, a first guess; learned from what arrives."""
    encode_rows: int = 0
    """Rows that vLLM encodes in one step at most."""
