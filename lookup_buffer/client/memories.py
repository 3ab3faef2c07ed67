"""The shared memory of nodes, mapped read-only by a client.

`NodeMemories` maps the memory of each boot, and keeps it mapped for a while after the node's death:
pinned bytes can still be loaded. The last reader of retired memory unmaps it. Any thread may call.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from lookup_buffer.errors import Closed, NodeUnavailable
from lookup_buffer.shm.index import LocalIndexReader, RemoteIndexReader
from lookup_buffer.shm.memory import Mapping, adopt

LOST_SECONDS: Final = 120.0
"""How long the memory of a lost node stays mapped; longer than any engine step."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The shared memory of one boot of a node: its arena, the local index of the arena's items,
    and the remote index of keys on other nodes."""

    arena: Mapping
    local_index: LocalIndexReader
    remote_index: RemoteIndexReader

    @classmethod
    def adopt(cls, descriptors: Sequence[int], arena_bytes: int) -> "NodeMemory":
        """Map the memory that a node sent. The caller keeps ownership of the descriptors.

        Raises:
            OSError, ValueError, ProtocolError: the descriptors are not the expected ones, or
                others could change or shrink that memory.
        """
        arena, local_index, remote_index = descriptors
        mapped = adopt(arena, most_bytes=arena_bytes)
        if mapped.nbytes != arena_bytes:
            raise ValueError(f"an arena of {mapped.nbytes} bytes instead of {arena_bytes}")
        return cls(
            mapped,
            LocalIndexReader(local_index),
            RemoteIndexReader(remote_index),
        )

    def close(self) -> None:
        self.arena.close()
        self.local_index.close()
        self.remote_index.close()


@dataclass(slots=True, eq=False)
class _Mapped:
    memory: NodeMemory
    uses: int = 0
    lost_at: float | None = None
    retired: bool = False


class NodeMemories:
    """Mapped memory, by the boot ids of nodes. Thread-safe. Nothing is unmapped under the lock,
    which every read takes: the unmapping of a large arena takes seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, _Mapped] = {}
        self._closed = False

    def add(self, boot: str, memory: NodeMemory) -> None:
        """Add the memory of a new session's boot. From now on this object owns it.

        Raises:
            Closed: after `close`; the memory is unmapped.
        """
        with self._lock:
            is_closed = self._closed
            unused = self._retire([boot] if boot in self._mapped else [])  # of a session before
            if not is_closed:
                self._mapped[boot] = _Mapped(memory)
        _unmap_soon(unused)
        if is_closed:
            memory.close()
            raise Closed("the buffer is closed")

    @contextmanager
    def use(self, boot: str) -> Iterator[NodeMemory]:
        """The memory of `boot`, kept mapped inside the `with`.

        Raises:
            NodeUnavailable: it is not mapped here.
            Closed: `close` has unmapped it.
        """
        with self._lock:
            mapped = self._mapped.get(boot)
            if mapped is None:
                if self._closed:
                    raise Closed("the buffer is closed")
                raise NodeUnavailable(f"the memory of boot {boot or '(none)'} is not mapped here")
            mapped.uses += 1
        try:
            yield mapped.memory
        finally:
            with self._lock:
                mapped.uses -= 1
                is_last = mapped.retired and mapped.uses == 0
            if is_last:
                mapped.memory.close()

    def mark_lost(self, boot: str) -> None:
        """Record the loss of the node; its memory is retired after `LOST_SECONDS`."""
        with self._lock:
            mapped = self._mapped.get(boot)
            if mapped is not None:  # else `close` has retired it
                mapped.lost_at = time.monotonic()

    def retire_lost(self) -> None:
        """Unmap memory lost more than `LOST_SECONDS` ago, on a thread. Call it periodically."""
        since = time.monotonic() - LOST_SECONDS
        with self._lock:
            unused = self._retire(
                boot
                for boot, mapped in self._mapped.items()
                if mapped.lost_at is not None and mapped.lost_at < since
            )
        _unmap_soon(unused)

    def close(self) -> None:
        """Unmap all memory. Idempotent."""
        with self._lock:
            self._closed = True
            unused = self._retire(self._mapped)
        for memory in unused:
            memory.close()

    def _retire(self, boots: Iterable[str]) -> list[NodeMemory]:
        """Take these out; returns what the caller unmaps. The last reader unmaps the others."""
        unused = []
        for boot in list(boots):
            mapped = self._mapped.pop(boot)
            mapped.retired = True
            if mapped.uses == 0:
                unused.append(mapped.memory)
        return unused


def _unmap_soon(memories: Sequence[NodeMemory]) -> None:
    for memory in memories:
        with suppress(RuntimeError):  # no memory for a thread: the last reference unmaps it
            threading.Thread(target=memory.close, name="lb-unmap", daemon=True).start()
