"""A small InternVL, made on disk with seeded random weights, and clips and pictures for it.

Of the architectures of vLLM that take videos it needs the least of torchvision: five transforms,
which `video_transforms` has. A clip's placeholder has text between the frames ("Frame2: "), so not
all of its tokens stand for rows of the encoder's output.

The configuration has the model type of Qianfan-OCR. That model is an InternVL which takes no
videos; vLLM has a class for its configuration, and for that of InternVL it has none.
"""

import base64
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from examples.demo.weights import WeightPlan
from models import (
    EMBEDDING_WIDTH,
    LANGUAGE_CONFIG,
    ensure_written,
    language_plans,
    linear,
    norm,
    write_model,
)

PLUGIN = Path(__file__).parent / "video_transforms"
"""A folder for the PYTHONPATH of an engine with this model."""
FRAMES, EDGE = 8, 112
MODEL_TOKENS_MAX = 640
_MARKS = ("<image>", "<video>", "<img>", "</img>", "<IMG_CONTEXT>", "<|video_pad|>")
_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", *_MARKS)
_PATCH, _TOWER, _TOWER_FFN, _TOWER_LAYERS = 14, 64, 128, 2
_MERGED = 4 * _TOWER
_NAME = "video-1"
"""Raise the number when the files change."""


def ensure_video_model(directory: Path) -> Path:
    return ensure_written(directory / _NAME, _write)


def clip(number: int, *, backwards: bool = False) -> dict[str, Any]:
    """A content part: a clip that belongs to this number, as an MP4 in a data URL."""
    frames = _frames(number)
    return _part("video", "video/mp4", _mp4(frames[::-1] if backwards else frames))


def frame_list(number: int) -> dict[str, Any]:
    """A content part: the clip's frames one by one, as vLLM takes them also."""
    jpegs = [_encoded(frame, "JPEG") for frame in _frames(number)]
    return _part("video", "video/jpeg", *jpegs)


def picture(number: int) -> dict[str, Any]:
    """A content part: one frame of the clip with this number."""
    return _part("image", "image/png", _encoded(_frames(number)[FRAMES // 2], "PNG"))


def _part(kind: str, media_type: str, *files: bytes) -> dict[str, Any]:
    content = ",".join(base64.b64encode(file).decode() for file in files)
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{media_type};base64,{content}"}}


def _frames(number: int) -> list[Any]:
    """A pattern of big squares that changes and fades to black, as RGB arrays."""
    generator = torch.Generator().manual_seed(number)
    frames = []
    for index in range(FRAMES):
        squares = torch.randint(0, 256, (3, 4, 4), generator=generator).float()
        pixels = squares.repeat_interleave(EDGE // 4, 1).repeat_interleave(EDGE // 4, 2)
        frames.append((pixels * (1 - index / FRAMES)).byte().permute(1, 2, 0).numpy())
    return frames


def _encoded(frame: Any, kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, kind)
    return file.getvalue()


def _mp4(frames: list[Any]) -> bytes:
    import cv2

    descriptor, path = tempfile.mkstemp(suffix=".mp4")
    os.close(descriptor)
    try:
        writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*"mp4v"), 4.0, (EDGE, EDGE))
        for frame in frames:
            writer.write(frame[:, :, ::-1])  # OpenCV has blue first
        writer.release()
        return Path(path).read_bytes()
    finally:
        os.unlink(path)


def _write(directory: Path) -> None:
    write_model(directory, _settings(), _SPECIAL_TOKENS, _plans())


def _settings() -> dict[str, dict[str, Any]]:
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    ids = {f"{name}_id": _SPECIAL_TOKENS.index(token) for name, token in special.items()}
    tower = {
        "hidden_size": _TOWER,
        "image_size": EDGE,
        "intermediate_size": _TOWER_FFN,
        "num_attention_heads": 2,
        "num_hidden_layers": _TOWER_LAYERS,
        "patch_size": _PATCH,
    }
    config = {
        "architectures": ["InternVLChatModel"],
        "downsample_ratio": 0.5,
        "dynamic_image_size": False,  # one tile for each image, as for each frame
        "force_image_size": EDGE,
        "image_token_id": _SPECIAL_TOKENS.index("<IMG_CONTEXT>"),
        "model_type": "qianfan_ocr",
        "text_config": LANGUAGE_CONFIG | ids,
        "use_thumbnail": False,
        "vision_config": tower,
        **ids,
    }
    tokenizer = {
        "model_max_length": MODEL_TOKENS_MAX,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
    }
    return {"config": config, "tokenizer_config": tokenizer}


def _plans() -> Iterator[WeightPlan]:
    """Scales as in `examples.demo.weights`: the tokens then depend on the clip."""
    embeddings = "vision_model.embeddings"
    positions = (EDGE // _PATCH) ** 2 + 1
    yield WeightPlan(f"{embeddings}.class_embedding", (1, 1, _TOWER), 0.3)
    yield WeightPlan(f"{embeddings}.position_embedding", (1, positions, _TOWER), 0.3)
    yield from linear(f"{embeddings}.patch_embedding", _TOWER, 3, _PATCH, _PATCH, gain=2.0)
    for index in range(_TOWER_LAYERS):
        layer = f"vision_model.encoder.layers.{index}"
        yield from linear(f"{layer}.attn.qkv", 3 * _TOWER, _TOWER)
        yield from linear(f"{layer}.attn.proj", _TOWER, _TOWER)
        yield from linear(f"{layer}.mlp.fc1", _TOWER_FFN, _TOWER)
        yield from linear(f"{layer}.mlp.fc2", _TOWER, _TOWER_FFN)
        for half in (1, 2):
            yield from norm(f"{layer}.norm{half}", _TOWER)
            yield WeightPlan(f"{layer}.ls{half}", (_TOWER,), 0.1, mean=1.0)
    yield from norm("mlp1.0", _MERGED)
    yield from linear("mlp1.1", EMBEDDING_WIDTH, _MERGED, gain=2.0)
    yield from linear("mlp1.3", EMBEDDING_WIDTH, EMBEDDING_WIDTH, gain=2.0)
    yield from language_plans()
