"""What the scheduler side has to know about its engine."""

from dataclasses import dataclass, field

from connectors.ec.outputs import EncoderOutputs


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Plain facts, known at start."""

    is_producer: bool
    is_consumer: bool
    steps_in_flight: int
    """Steps that vLLM may have scheduled and not finished (`max_concurrent_batches`)."""
    embed_bytes: int
    """Size of one row of an encoder output, a first guess; learned from what arrives."""
    adapters_encode: bool = False
    """Whether LoRA adapters have a part in encoder outputs."""
    outputs: EncoderOutputs = field(default_factory=EncoderOutputs)
    """What encoder outputs of this engine look like."""
    encode_rows: int = 0
    """Rows that vLLM encodes in one step at most."""
