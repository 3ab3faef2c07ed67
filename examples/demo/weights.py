"""Seeded random weights for the demo's model, tensor by tensor.

Each tensor has its own generator, seeded by its name, so the values do not depend on the order of
creation. The scales keep the signal of every layer near one. The tokens then depend on the
photograph and the prompt, and rounding errors stay far below the gap between the two most likely
tokens. Weights near zero, as of the load format "dummy", give every photograph the same tokens,
and a comparison of tokens would prove nothing.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from examples.demo.model_size import ModelSize, TextSize, VisionSize

# The text model. Attention contributes as much to the residual stream as the token's own embedding.
# Its scores are sharp enough that different tokens attend to different parts of the photograph.
# Without either, a long prompt of image rows averages out and every answer is one repeated token.
_TOKEN_STD = 1.0
_ATTENTION_GAIN = 2.0
_SHARPNESS_GAIN = 2.0
_LOGIT_GAIN = 8.0
# The vision tower.
_POSITION_STD = 0.3
_PATCH_GAIN = 2.0
_BIAS_STD = 0.1


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """One tensor to make: values are `mean + std * normal`."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def plan_weights(size: ModelSize, vocabulary: int) -> list[WeightPlan]:
    """Every tensor of the checkpoint, by the names that Idefics3 checkpoints use."""
    projection = WeightPlan(
        "model.connector.modality_projection.proj.weight",
        (size.text.hidden, size.vision.hidden),
        _fan_in_std(size.vision.hidden),
    )
    return [
        *_vision_plans(size.vision),
        projection,
        *_text_plans(size.text, vocabulary),
    ]


def make_tensor(plan: WeightPlan, seed: int) -> torch.Tensor:
    """The tensor of one plan in bfloat16: half the disk, and exact when read as float32."""
    digest = hashlib.sha256(f"{seed}:{plan.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    values = torch.empty(plan.shape, dtype=torch.float32)
    values.normal_(plan.mean, plan.std, generator=generator)
    return values.to(torch.bfloat16)


def _fan_in_std(inputs: int, gain: float = 1.0) -> float:
    return gain / math.sqrt(inputs)


def _vision_plans(vision: VisionSize) -> Iterator[WeightPlan]:
    root = "model.vision_model"
    patch_inputs = 3 * vision.patch_size**2
    patch_shape = (vision.hidden, 3, vision.patch_size, vision.patch_size)
    patches = (vision.image_size // vision.patch_size) ** 2
    patch_name = f"{root}.embeddings.patch_embedding"
    yield WeightPlan(f"{patch_name}.weight", patch_shape, _fan_in_std(patch_inputs, _PATCH_GAIN))
    yield WeightPlan(f"{patch_name}.bias", (vision.hidden,), _BIAS_STD)
    yield WeightPlan(
        f"{root}.embeddings.position_embedding.weight", (patches, vision.hidden), _POSITION_STD
    )
    for index in range(vision.layers):
        yield from _vision_layer_plans(f"{root}.encoder.layers.{index}", vision)
    yield from _layer_norm_plans(f"{root}.post_layernorm", vision.hidden)


def _vision_layer_plans(root: str, vision: VisionSize) -> Iterator[WeightPlan]:
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from _linear_plans(f"{root}.self_attn.{name}", vision.hidden, vision.hidden)
    yield from _linear_plans(f"{root}.mlp.fc1", vision.hidden, vision.intermediate)
    yield from _linear_plans(f"{root}.mlp.fc2", vision.intermediate, vision.hidden)
    yield from _layer_norm_plans(f"{root}.layer_norm1", vision.hidden)
    yield from _layer_norm_plans(f"{root}.layer_norm2", vision.hidden)


def _linear_plans(root: str, inputs: int, outputs: int) -> Iterator[WeightPlan]:
    yield WeightPlan(f"{root}.weight", (outputs, inputs), _fan_in_std(inputs))
    yield WeightPlan(f"{root}.bias", (outputs,), _BIAS_STD)


def _layer_norm_plans(root: str, width: int) -> Iterator[WeightPlan]:
    yield WeightPlan(f"{root}.weight", (width,), _BIAS_STD, mean=1.0)
    yield WeightPlan(f"{root}.bias", (width,), _BIAS_STD)


def _text_plans(text: TextSize, vocabulary: int) -> Iterator[WeightPlan]:
    root = "model.text_model"
    yield WeightPlan(f"{root}.embed_tokens.weight", (vocabulary, text.hidden), _TOKEN_STD)
    for index in range(text.layers):
        yield from _text_layer_plans(f"{root}.layers.{index}", text)
    yield WeightPlan(f"{root}.norm.weight", (text.hidden,), _BIAS_STD, mean=1.0)
    logit_std = _fan_in_std(text.hidden, _LOGIT_GAIN)
    yield WeightPlan("lm_head.weight", (vocabulary, text.hidden), logit_std)


def _text_layer_plans(root: str, text: TextSize) -> Iterator[WeightPlan]:
    hidden, queries = text.hidden, text.heads * text.head_dim
    keys = text.kv_heads * text.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden, _SHARPNESS_GAIN),
        "self_attn.k_proj": (keys, hidden, _SHARPNESS_GAIN),
        "self_attn.v_proj": (keys, hidden, 1.0),
        "self_attn.o_proj": (hidden, queries, _ATTENTION_GAIN),
        "mlp.gate_proj": (text.intermediate, hidden, 1.0),
        "mlp.up_proj": (text.intermediate, hidden, 1.0),
        "mlp.down_proj": (hidden, text.intermediate, 1.0),
    }
    for name, (outputs, inputs, gain) in shapes.items():
        yield WeightPlan(f"{root}.{name}.weight", (outputs, inputs), _fan_in_std(inputs, gain))
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield WeightPlan(f"{root}.{name}.weight", (hidden,), _BIAS_STD, mean=1.0)
