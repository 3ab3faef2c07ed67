"""Which weights an engine runs: named by a version or a commit, or by every byte of their files.

`weights_source` is asked before the model is loaded and costs a stat of each file. Hashing them is
`weights_digest`'s, on a thread that may take minutes: see `naming`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from connectors import hub

# Formats that put the checkpoint's own values into the model. Any other (dummy, a registered
# loader) makes weights in a way that only its name, its settings and the seed describe.
CHECKPOINT_FORMATS = frozenset(
    {"auto", "hf", "pt", "safetensors", "fastsafetensors", "instanttensor", "npcache", "mistral",
     "runai_streamer", "runai_streamer_sharded", "sharded_state", "tensorizer", "ipc_cache"}
)  # fmt: skip
_ELSEWHERE: Final = frozenset({"tensorizer", "ipc_cache"})
"""Of these, the formats whose weights do not come from the model's folder or repository."""
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

FileState = tuple[int, int, int, int, int]
"""Device, inode, bytes, mtime and ctime in ns: no write leaves all of them as they were."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    name: str
    """Within its folder, the same on every host."""
    path: Path
    state: FileState

    def is_current(self) -> bool:
        """Whether the file is the one that was found, unchanged."""
        try:
            return state_of(self.path) == self.state
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """What names an engine's weights: one of the three."""

    version: str = ""
    """Names them without a look at any file; empty for weights that are made, not read."""
    files: tuple[WeightFile, ...] = ()
    """To be hashed."""
    unknown: str = ""
    """Why nothing names them."""

    @property
    def mark(self) -> bytes:
        """16 bytes that differ where another process found something else."""
        states = [(file.name, file.state) for file in self.files]
        found = repr((self.version, states, self.unknown))
        return hashlib.sha256(found.encode("utf-8", "surrogatepass")).digest()[:16]

    def is_current(self) -> bool:
        return all(file.is_current() for file in self.files)


def weights_source(vllm_config: Any, weights_version: str) -> WeightsSource:
    """What names the weights that vLLM is about to load.

    Raises:
        OSError: a file cannot be looked at; the engine could not load it either.
    """
    if weights_version:
        return WeightsSource(weights_version)
    model, load = vllm_config.model_config, vllm_config.load_config
    if format_of(load) in _ELSEWHERE:
        return WeightsSource(
            unknown=f"--load-format {format_of(load)} reads weights from elsewhere"
        )
    other = str(getattr(model, "model_weights", None) or "")
    commit = hub.commit_of(model, load)
    if commit and not other:
        return WeightsSource(f"commit {commit}")
    if other and not Path(other).exists():
        return WeightsSource(unknown="--model-weights names no folder of this host")
    files = tuple(_files_of(str(model.model)))
    if other:  # which of the two is read depends on the loader
        files += tuple(_files_of(other))
    if files:
        return WeightsSource(files=files)
    if format_of(load) not in CHECKPOINT_FORMATS:
        return WeightsSource()
    return WeightsSource(unknown="neither a commit of the model nor a file of weights is found")


def format_of(load_config: Any) -> str:
    """vLLM's name of how the weights are read or made."""
    return str(getattr(load_config.load_format, "value", load_config.load_format))


def _files_of(text: str) -> Iterator[WeightFile]:
    """Of a folder and those below it; of the one that a file lies in, that folder alone."""
    place = Path(text)
    if place.is_dir():
        paths = sorted(place.rglob("*"))
    elif place.is_file():
        place = place.parent
        paths = sorted(place.iterdir())
    else:
        return
    for path in paths:
        if path.suffix in WEIGHT_SUFFIXES and path.is_file():
            yield WeightFile(path.relative_to(place).as_posix(), path, state_of(path))


def state_of(path: Path) -> FileState:
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
