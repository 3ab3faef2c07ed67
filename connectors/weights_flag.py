"""The flag by which an engine's worker tells its scheduler that its weights have changed.

One byte that two processes of a host map, and what the worker saw of the weights' files before it
loaded them. Nothing else leads from worker to scheduler without a
step of the engine, and the next pass has to know. The worker makes the file; the scheduler, which
vLLM makes later, takes its name away, so that nothing is left behind, however they end.
"""

import hashlib
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

_DIRECTORY = Path("/dev/shm")
"""Where vLLM's own processes share memory, too; the engine's id is not to be guessed."""


class WeightsFlag:
    """Either side's; see `make` and `adopt`."""

    def __init__(self, path: Path, flags: int, mark: bytes = b"") -> None:
        self._path = path
        descriptor = os.open(path, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(f"{path} is another user's")
            if flags:
                os.write(descriptor, b"\0" + mark)
            self._byte = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    @classmethod
    def make(cls, engine_id: str, mark: bytes = b"") -> Self:
        """The worker's.

        Raises:
            OSError: it cannot be made.
        """
        path = _path(engine_id)
        with suppress(FileNotFoundError):
            path.unlink()  # of an engine that had this id, and ended while it started
        return cls(path, os.O_CREAT | os.O_EXCL, mark)

    @classmethod
    def adopt(cls, engine_id: str) -> Self:
        """The scheduler's.

        Raises:
            OSError: no worker of this engine made one on this host.
        """
        flag = cls(_path(engine_id), 0)
        flag._path.unlink()
        return flag

    @property
    def mark(self) -> bytes:
        """What the worker gave; empty where that was nothing."""
        return self._byte[1:]

    def put_up(self) -> None:
        self._byte[0] = 1

    def is_up(self) -> bool:
        return self._byte[0] != 0

    def close(self) -> None:
        """The worker ends, perhaps before there was a scheduler. Idempotent."""
        self._path.unlink(missing_ok=True)


def _path(engine_id: str) -> Path:
    name = hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return _DIRECTORY / f"lookup-buffer-weights-{os.getuid()}-{name}"
