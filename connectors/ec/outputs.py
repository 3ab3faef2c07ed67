"""What the outputs of this engine's encoder look like, so that nothing else is promised to vLLM.

Owned by the scheduler's thread. Pure data: knows neither vLLM nor torch.

An output is `[num_embeds, width]`. The width is that of the model's input embeddings, or a multiple
where an encoder packs several layers side by side (DeepStack), and some numbers more where it adds
positions (pruning of video). vLLM 0.30 and newer measure it by a dummy encode on engines that
produce. Elsewhere it is told by the model's configuration, and by what this engine has encoded.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lookup_buffer.errors import MaybeMissed, MissReason

if TYPE_CHECKING:
    from lookup_buffer.protocol.header import TensorHeader

Form = tuple[str, int]
"""Dtype, as headers name it, and width of an output."""
POSITIONS_MAX = 16
"""Numbers that stand behind an embedding for its position; vLLM's models have four or five."""


@dataclass(slots=True)
class EncoderOutputs:
    """What is known of them. Without any value nothing is refused but what is no matrix."""

    dtype: str = ""
    """The model's; \"\" where it is not to be compared."""
    width: int = 0
    """Of the model's input embeddings; 0 where it is not known."""
    levels: frozenset[int] = frozenset({1})
    """How many times as wide outputs may be, as far as the configuration tells."""
    has_positions: bool = False
    """Whether positions may stand behind that."""
    measured: Mapping[str, int] = field(default_factory=dict)
    """Widths by modality, as vLLM measured them."""
    encoded: set[Form] = field(default_factory=set)
    """Of outputs that this engine's workers encoded: right whatever the configuration says."""

    def misfit(
        self, header: "TensorHeader", modalities: Collection[str], *, any_float: bool = False
    ) -> MaybeMissed:
        """Why the tensor is no output of this encoder: SHAPE or DTYPE; "" if it may be one.

        Args:
            header: of the stored tensor.
            modalities: what requests say that it is; empty where they did not say.
            any_float: whether a dtype that this engine has not seen is taken, because vLLM casts
                it and the item cannot be encoded here.
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
