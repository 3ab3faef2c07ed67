"""The digest of an engine's weight files: every byte of them, each file read once per host.

What a file's content was is kept in the user's cache, under the file's device, inode, size and
times of change, so that the next start of an engine only looks those up.
"""

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from xxhash import xxh3_128

from connectors.counters import logger
from connectors.weights import FileState, WeightFile

CHUNK_BYTES = 4 << 20
FILES_KEPT = 4096
LOCK_SECONDS = 600.0
"""How long another process that hashes is waited for; then this one hashes beside it."""
LOCK_POLL_SECONDS = 0.1
PROGRESS_SECONDS = 30.0
SETTLED_NS = 2_000_000_000
_HEX_DIGITS = 32


class Stopped(Exception):
    """The engine ends."""


class DigestCache:
    """Digests of files by their state, in one file that all engines of a user share.

    A cache that cannot be read or written is an empty one. Thread-safe, between processes too.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or _user_cache()
        self._path = self._directory / "weights.json"

    def known(self, files: Sequence[WeightFile]) -> dict[FileState, str]:
        digests = self._read()
        return {f.state: digests[_key(f.state)] for f in files if _key(f.state) in digests}

    def add(self, state: FileState, digest: str) -> None:
        """To be called by who holds the lock."""
        digests = self._read()
        digests.pop(_key(state), None)
        digests[_key(state)] = digest
        kept = dict(list(digests.items())[-FILES_KEPT:])
        with (
            suppress(OSError),
            NamedTemporaryFile(
                "w",
                dir=self._directory,
                prefix=".weights-",
                delete=False,  # made with mode 0600
            ) as file,
        ):
            try:
                json.dump(kept, file)
                file.flush()
                os.replace(file.name, self._path)
            except BaseException:
                os.unlink(file.name)
                raise

    @contextmanager
    def lock(self, is_stopped: threading.Event) -> Iterator[None]:
        """Held by who hashes, so that engines that start together read each file once.

        Raises:
            Stopped: before it was to be had.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            descriptor = os.open(self._directory / "weights.lock", flags, 0o600)
        except OSError:
            yield
            return
        try:
            _take(descriptor, is_stopped)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {k: d for k, d in found.items() if isinstance(d, str) and len(d) == _HEX_DIGITS}


def combined(files: Sequence[WeightFile], digests: dict[FileState, str]) -> str:
    """The digest of all files, by their names and contents; equal on every host."""
    lines = sorted(f"{file.name}:{file.state[2]}:{digests[file.state]}\n" for file in files)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def hash_files(
    files: Sequence[WeightFile], cache: DigestCache | None, is_stopped: threading.Event
) -> dict[FileState, str]:
    """The digest of each file by its state; from the cache, where there is one and it has it.

    Raises:
        OSError: a file cannot be read.
        Stopped: see `is_stopped`.
    """
    with cache.lock(is_stopped) if cache else nullcontext():
        digests = cache.known(files) if cache else {}
        left = [file for file in files if file.state not in digests]
        progress = _Progress(sum(file.state[2] for file in left))
        for file in left:
            if file.state in digests:  # two names of one file
                continue
            digest = _hash(file.path, progress.add, is_stopped)
            if cache and file.is_current() and _is_settled(file.state):
                cache.add(file.state, digest)
            digests[file.state] = digest
    return digests


def _hash(path: Path, on_bytes: Callable[[int], None], is_stopped: threading.Event) -> str:
    digest, buffer = xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if is_stopped.is_set():
                raise Stopped
            digest.update(buffer[:count])
            on_bytes(count)
    return digest.hexdigest()


class _Progress:
    """A line in the log now and then, where hashing takes long."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._told = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._told > PROGRESS_SECONDS:
            self._told = time.monotonic()
            message = "lookup buffer: %.1f of %.1f GB of weights are hashed; nothing is shared yet"
            logger.info(message, self._done / 1e9, self._total / 1e9)


def _take(descriptor: int, is_stopped: threading.Event) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if is_stopped.wait(LOCK_POLL_SECONDS):
                raise Stopped from None
        except OSError:
            return  # a file system without locks


def _is_settled(state: FileState) -> bool:
    """Whether a later write would show: file systems keep times by ticks, the coarsest by 2 s."""
    return time.time_ns() - max(state[3:]) > SETTLED_NS


def _key(state: FileState) -> str:
    return ":".join(map(str, state))


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # Not `expanduser` of a path, which raises where there is no home.
    return Path(base if base.startswith("/") else os.path.expanduser("~/.cache")) / "lookup-buffer"
