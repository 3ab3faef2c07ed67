"""Facts about the engine that the scheduler side needs. `seat.engine_shape` makes them at start."""

from dataclasses import dataclass, field

from connectors.ec.outputs import EncoderOutputs


@dataclass(frozen=True, slots=True)
class EngineShape:
    is_producer: bool
    is_consumer: bool
    steps_in_flight: int
    """Steps that vLLM may have scheduled and not finished (`max_concurrent_batches`)."""
    embed_bytes: int
    """First estimate for the size of one output row; items that arrive correct it."""
    adapters_encode: bool = False
    """Whether LoRA adapters change encoder outputs."""
    outputs: EncoderOutputs = field(default_factory=EncoderOutputs)
    """Possible dtypes and shapes of encoder outputs."""
    encode_rows: int = 0
    """Limit for the rows that vLLM encodes in one step."""
