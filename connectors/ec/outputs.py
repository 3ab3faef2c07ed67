"""The possible dtypes and shapes of this engine's encoder outputs.

Only bytes that match are promised to vLLM. An output is `[num_embeds, width]`. The width is that of
the model's input embeddings, or a multiple where an encoder puts several layers side by side
(DeepStack). An encoder that adds positions (pruning of video) appends a few numbers more. vLLM 0.30
and newer measure the width with a dummy encode on engines that produce. Elsewhere it comes from the
model's configuration and from what this engine has encoded.

Pure data without vLLM or torch. `PinTable` uses it on vLLM's scheduler thread.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lookup_buffer.errors import MaybeMissed, MissReason

if TYPE_CHECKING:
    from lookup_buffer.protocol.header import TensorHeader

Form = tuple[str, int]
"""Dtype, as in headers, and width of an output."""
POSITIONS_MAX = 16
"""Limit for the numbers that an encoder appends for positions; vLLM's models append four or
five."""


@dataclass(slots=True)
class EncoderOutputs:
    """What is known of the outputs. Without values, only tensors that are not matrices are
    refused."""

    dtype: str = ""
    """Of the model; "" where the dtype is not compared."""
    width: int = 0
    """Of the model's input embeddings; 0 where it is not known."""
    levels: frozenset[int] = frozenset({1})
    """Possible multiples of `width`, from the model's configuration."""
    has_positions: bool = False
    """Whether the encoder may append positions."""
    measured: Mapping[str, int] = field(default_factory=dict)
    """Widths by modality, as measured by vLLM."""
    encoded: set[Form] = field(default_factory=set)
    """Of outputs that this engine's workers encoded. These are valid whatever the configuration
    says."""

    def misfit(
        self, header: "TensorHeader", modalities: Collection[str], *, any_float: bool = False
    ) -> MaybeMissed:
        """Return SHAPE or DTYPE where the tensor is no output of this encoder, "" where it may be
        one.

        Args:
            header: of the stored tensor.
            modalities: the modalities that requests give for the item; empty where they give none.
            any_float: accept a float dtype that this engine has not encoded. vLLM casts it, and the
                item cannot be encoded here.
        """
        if header.kind != "tensor" or len(header.shape) != 2:
            return MissReason.SHAPE
        width = header.shape[1]
        if not self._may_have(width, modalities):
            return MissReason.SHAPE
        if not self.dtype or header.dtype in {self.dtype, *(dtype for dtype, _ in self.encoded)}:
            return ""
        return (
            "" if any_float and not self.encoded and "float" in header.dtype else MissReason.DTYPE
        )

    def _may_have(self, width: int, modalities: Collection[str]) -> bool:
        if self.measured:
            widths = [self.measured[name] for name in modalities if name in self.measured]
            return set(widths) == {width} if widths else width in self.measured.values()
        if not self.width or width in (own for _, own in self.encoded):
            return True
        beyond = POSITIONS_MAX if self.has_positions else 0
        return any(0 <= width - level * self.width <= beyond for level in self.levels)
