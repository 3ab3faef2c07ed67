"""Which weights an engine runs: a digest of a checkpoint folder, cheap and equal on every host.

Called once per process, before the model is loaded. Reads the header of each safetensors file and
samples its tensors; every file is read at the same places on every host, so the digest depends on
content alone (no times, no paths). What it can miss is a change confined to values between the
samples: whoever changes weights in place sets `weights_version`.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

SAMPLE_BYTES = 4096
SAMPLED_ENCODER_TENSORS_MAX = 2048
SAMPLED_OTHER_TENSORS_MAX = 64
OPAQUE_SAMPLES = 64
MAX_HEADER_BYTES = 100 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Names under which checkpoints keep the parts that make encoder outputs. Their tensors are all
# sampled; of the language model, far larger and rarely different alone, a few.
ENCODER_NAMES = (
    "vision", "visual", "vit", "image", "audio", "speech", "whisper", "tower", "encoder", "patch",
    "projector", "projection", "connector", "merger", "aligner", "multi_modal", "mm_", "resampler",
)  # fmt: skip


def weights_digest(folder: Path) -> str:
    """Hex digest of the weight files in `folder`, or "" when there are none.

    Raises:
        OSError: a file cannot be read; the engine could not load it either.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if not files:
        return ""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb", buffering=0) as file:
            for offset, length in _samples(file, path, size):
                file.seek(offset)
                digest.update(file.read(length))
    return digest.hexdigest()


def _samples(file: BinaryIO, path: Path, size: int) -> list[tuple[int, int]]:
    """Offset and length of what is read of one file."""
    if path.suffix == ".safetensors":
        header = _safetensors_header(file, size)
        if header is not None:
            start, tensors = header
            return [(0, start), *_tensor_samples(start, tensors)]
    last = max(0, size - SAMPLE_BYTES)
    offsets = [index * last // (OPAQUE_SAMPLES - 1) for index in range(OPAQUE_SAMPLES)]
    return [(offset, SAMPLE_BYTES) for offset in offsets]


def _safetensors_header(file: BinaryIO, size: int) -> tuple[int, dict[str, Any]] | None:
    """Where the data begins, and the description of the tensors; None when it is malformed."""
    prologue = file.read(8)
    if len(prologue) < 8:
        return None
    (length,) = struct.unpack("<Q", prologue)
    if length > min(MAX_HEADER_BYTES, size - 8):
        return None
    try:
        tensors = json.loads(file.read(length))
    except ValueError:
        return None
    return (8 + length, tensors) if isinstance(tensors, dict) else None


def _tensor_samples(start: int, tensors: dict[str, Any]) -> list[tuple[int, int]]:
    """The first bytes and some from the middle of each tensor that counts."""
    names = sorted(name for name in tensors if name != "__metadata__")
    encoder = [name for name in names if any(word in name.lower() for word in ENCODER_NAMES)]
    encoder_names = set(encoder)
    others = [name for name in names if name not in encoder_names]
    chosen = [
        *_evenly(encoder, SAMPLED_ENCODER_TENSORS_MAX),
        *_evenly(others, SAMPLED_OTHER_TENSORS_MAX),
    ]
    samples: list[tuple[int, int]] = []
    for name in chosen:
        begin, end = tensors[name]["data_offsets"]
        length = min(SAMPLE_BYTES, end - begin)
        samples.append((start + begin, length))
        samples.append((start + begin + (end - begin - length) // 2, length))
    return samples


def _evenly(names: list[str], count: int) -> list[str]:
    if len(names) <= count:
        return names
    return [names[index * len(names) // count] for index in range(count)]
