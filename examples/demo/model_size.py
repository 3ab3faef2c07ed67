"""Sizes and file names of the demo's model. Pure: nothing random, nothing on disk.

The model is an Idefics3 (the architecture of SmolVLM): a SigLIP-like vision tower, one projection
and a small Llama. It is not trained; it lets a real engine encode a photograph.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

# Raise it when the bytes that `write_model` makes from the same size and seed change.
FORMULA_VERSION = 1


@dataclass(frozen=True, slots=True)
class VisionSize:
    """The vision tower; one photograph becomes one square tile of `image_size` pixels."""

    image_size: int
    patch_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int


@dataclass(frozen=True, slots=True)
class TextSize:
    """The language model after the tower; small, since the demo measures encoding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A complete model; equal values and an equal seed give equal weights."""

    name: str
    vision: VisionSize
    text: TextSize

    @property
    def embeddings_per_image(self) -> int:
        """Rows of one encoder output, which is also the number of image tokens in a prompt."""
        return (self.vision.image_size // self.vision.patch_size) ** 2

    @property
    def nbytes_per_image(self) -> int:
        """Size of one encoder output in float32, the precision the demo runs in."""
        return self.embeddings_per_image * self.text.hidden * 4

    def digest(self, seed: int) -> str:
        """The name of the weights: twelve hex digits of a hash of their size, seed and formula."""
        made_from = {"formula": FORMULA_VERSION, "seed": seed, "size": asdict(self)}
        return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]


TINY = ModelSize(
    name="tiny",
    vision=VisionSize(
        image_size=224, patch_size=14, hidden=128, intermediate=256, layers=2, heads=4
    ),
    text=TextSize(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, head_dim=64),
)

# The tower has the dimensions of SigLIP-so400m. With one output row per patch (scale factor 1) and
# a text model 3,072 wide, one photograph becomes 676 rows, 8.3 MB in float32. Apart from its width
# the text model is as small as possible: the time that remains after a hit is mostly its prefill.
HEAVY = ModelSize(
    name="heavy",
    vision=VisionSize(
        image_size=364, patch_size=14, hidden=1152, intermediate=4304, layers=27, heads=16
    ),
    text=TextSize(hidden=3072, intermediate=64, layers=1, heads=2, kv_heads=1, head_dim=64),
)

SIZES = {size.name: size for size in (TINY, HEAVY)}
