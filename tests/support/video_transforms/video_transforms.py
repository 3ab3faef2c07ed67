"""Five transforms of torchvision's, which vLLM's processor of InternVL takes from there.

The build of torch that vLLM for CPU needs has no torchvision. vLLM loads this module as a plugin,
in each process whose PYTHONPATH has this folder. It lends itself to the processor, while that is
imported, under torchvision's name. Everybody else still finds no torchvision.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from PIL import Image

_PROCESSOR = "vllm.transformers_utils.processors.internvl"
_IMPORTED_BY_IT = ("transformers.processing_utils", "vllm.multimodal.processing")
"""They look for torchvision themselves, so they are imported first."""


def lend() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in _IMPORTED_BY_IT:
        importlib.import_module(name)
    assert importlib.import_module("transformers").BaseVideoProcessor
    package = ModuleType("torchvision")
    package.__dict__["transforms"] = sys.modules[__name__]
    lent = {"torchvision": package, "torchvision.transforms": sys.modules[__name__]}
    sys.modules.update(lent)
    try:
        importlib.import_module(_PROCESSOR)
    finally:
        for name in lent:
            del sys.modules[name]


InterpolationMode = Image.Resampling


class Compose:
    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self._steps = steps

    def __call__(self, value: Any) -> Any:
        for step in self._steps:
            value = step(value)
        return value


class Lambda:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, value: Any) -> Any:
        return self._function(value)


class Resize:
    def __init__(self, size: tuple[int, int], interpolation: Any) -> None:
        self._height, self._width = size
        self._interpolation = interpolation

    def __call__(self, image: Any) -> Any:
        return image.resize((self._width, self._height), self._interpolation)


class ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, 3).permute(2, 0, 1) / 255


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels - self._mean) / self._std
