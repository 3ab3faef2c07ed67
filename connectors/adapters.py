"""LoRA adapters by content.

vLLM puts only an adapter's name in front of an item's identifier, and two instances may load
different adapters under one name. So what an adapter had a part in is shared under a digest of its
files. Reading them takes a moment, on a thread of this module's; until then such items are not
shared.
"""

import hashlib
import threading
from collections import deque
from pathlib import Path
from typing import Any, Final

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".json")
"""Files that make an adapter: its weights, its configuration, its embeddings."""
ADAPTERS_MAX: Final = 4096
UNNAMED_MAX: Final = 1 << 16
"""Of items that adapters encoded under names without the adapter's; beyond, no item is shared."""
_CHUNK_BYTES: Final = 1 << 20

_Adapter = tuple[str, int, str]
"""Name, vLLM's number and path: a new one where an adapter is loaded again under its name."""


def reach_encoder(vllm_config: Any) -> bool:
    """Whether a request's adapter has a part in what its media are encoded to."""
    lora = getattr(vllm_config, "lora_config", None)
    return bool(getattr(lora, "enable_tower_connector_lora", False))


class Adapters:
    """Digests of adapters, each read once: as vLLM loads it, what lies there later is no matter.

    Args:
        encode: whether they have a part in encoder outputs.
    """

    def __init__(self, *, encode: bool = False) -> None:
        self.encode = encode
        self._unnamed: set[str] = set()
        self._lock = threading.Lock()
        self._digests: dict[_Adapter, str] = {}
        """Empty while it is being read, and for ever where that did not succeed."""
        self._unread: deque[_Adapter] = deque()
        self._reader: threading.Thread | None = None
        self._replaced: set[str] = set()
        """Names of adapters that were changed in place: the engine may hold outputs of both."""

    def digest_of(self, lora_request: Any) -> str:
        """The digest of a request's adapter, empty where it is not known (yet). Never waits."""
        name: str = lora_request.lora_name
        adapter = (name, int(lora_request.lora_int_id), str(lora_request.lora_path))
        with self._lock:
            if getattr(lora_request, "load_inplace", False):
                self._replaced.add(name)
            if name in self._replaced:
                return ""
            known = self._digests.get(adapter)
            if known is not None or len(self._digests) >= ADAPTERS_MAX:
                return known or ""
            self._digests[adapter] = ""
            self._unread.append(adapter)
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="lb-adapter", daemon=True)
                self._reader.start()
        return ""

    def encoded_unnamed(self, identifier: str) -> None:
        """A request with an adapter calls an item by a name without it, as vLLM's Rust front end
        does: from now on vLLM's own caches may have outputs of any adapter under it."""
        if len(self._unnamed) < UNNAMED_MAX:
            self._unnamed.add(identifier)

    def is_ambiguous(self, identifier: str) -> bool:
        """Whether vLLM may mean the output of some adapter by this name."""
        return identifier in self._unnamed or len(self._unnamed) >= UNNAMED_MAX

    def _read(self) -> None:
        """Until nothing is left to be read."""
        while True:
            with self._lock:
                if not self._unread:
                    self._reader = None
                    return
                adapter = self._unread.popleft()
            digest = content_digest(Path(adapter[2]))
            with self._lock:
                self._digests[adapter] = digest


def content_digest(folder: Path) -> str:
    """A digest of all files of an adapter; empty where they cannot be read, or change meanwhile.

    What is not a folder of this host (a name on a hub, a tensorizer URI) has none.
    """
    try:
        before = _files(folder)
        if not any(path.suffix != ".json" for path, _, _ in before):
            return ""
        digest = hashlib.sha256()
        for path, nbytes, _ in before:
            digest.update(f"{path.name}:{nbytes}\n".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest() if _files(folder) == before else ""
    except (OSError, ValueError):  # no file has a name with a zero in it
        return ""


def _files(folder: Path) -> list[tuple[Path, int, int]]:
    """Path, size and time of change of each file that counts."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and path.is_file():
            state = path.stat()
            found.append((path, state.st_size, state.st_mtime_ns))
    return found
