"""Small LoRA adapters with seeded random weights for the model of `engines`.

They change the vision tower and nothing else: what an engine answers with one of them then depends
on whose encoder output it was given, and on no other part of the adapter.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file

from engines import SIZE
from examples.demo.weights import WeightPlan, make_tensor

RANK = 8
_MODULES = ("fc1", "fc2")
_GAIN = 1.0


def write_adapter(folder: Path, *, seed: int) -> Path:
    """The folder, with an adapter in it; equal seeds make equal files."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(_MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, sort_keys=True))
    tensors = {plan.name: make_tensor(plan, seed) for plan in _plans()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _plans() -> Iterator[WeightPlan]:
    vision = SIZE.vision
    narrow, wide = vision.hidden, vision.intermediate
    widths = {"fc1": (narrow, wide), "fc2": (wide, narrow)}
    for layer in range(vision.layers):
        for name, (inputs, outputs) in widths.items():
            root = f"base_model.model.model.vision_model.encoder.layers.{layer}.mlp.{name}"
            yield WeightPlan(f"{root}.lora_A.weight", (RANK, inputs), _GAIN * inputs**-0.5)
            yield WeightPlan(f"{root}.lora_B.weight", (outputs, RANK), _GAIN * RANK**-0.5)
