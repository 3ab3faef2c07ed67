"""What nodes share with this process: mapped for reading, a while longer than its node lives.

An arena that was mapped stays readable after its node died, so what was promised from it can still
be loaded. Any thread; what is being read is unmapped by its last reader.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from lookup_buffer.board import BoardReader
from lookup_buffer.elsewhere import ElsewhereReader
from lookup_buffer.errors import NodeUnavailable
from lookup_buffer.shm.memory import Mapping

LOST_SECONDS: Final = 120.0
"""How long the memory of a lost node stays mapped: longer than any engine step."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Of one boot of a node: its arena, the board that says what lies in it, and the table of what
    lies elsewhere."""

    arena: Mapping
    board: BoardReader
    elsewhere: ElsewhereReader

    @classmethod
    def adopt(cls, descriptors: Sequence[int], arena_bytes: int) -> "NodeMemory":
        """Map what a node has sent; the descriptors stay the caller's.

        Raises:
            OSError, ValueError: they are not what they should be.
        """
        arena, board, elsewhere = descriptors
        return cls(
            Mapping(arena, arena_bytes, writable=False),
            BoardReader(board),
            ElsewhereReader(elsewhere),
        )

    def close(self) -> None:
        self.arena.close()
        self.board.close()
        self.elsewhere.close()


@dataclass(slots=True, eq=False)
class _Mapped:
    memory: NodeMemory
    uses: int = 0
    lost_at: float | None = None
    retired: bool = False


class NodeMemories:
    """By the boots of nodes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, _Mapped] = {}

    def add(self, boot: str, memory: NodeMemory) -> None:
        """Of a boot that was attached to; closed by us from now on."""
        with self._lock:
            self._mapped[boot] = _Mapped(memory)

    @contextmanager
    def use(self, boot: str) -> Iterator[NodeMemory]:
        """The memory of `boot`, kept mapped meanwhile.

        Raises:
            NodeUnavailable: it is not mapped here.
        """
        with self._lock:
            mapped = self._mapped.get(boot)
            if mapped is None:
                raise NodeUnavailable(f"the memory of boot {boot or '(none)'} is not mapped here")
            mapped.uses += 1
        try:
            yield mapped.memory
        finally:
            with self._lock:
                mapped.uses -= 1
                if mapped.retired and mapped.uses == 0:
                    mapped.memory.close()

    def lose(self, boot: str) -> None:
        """The node is gone."""
        with self._lock:
            mapped = self._mapped.get(boot)
            if mapped is not None:  # else it was closed meanwhile
                mapped.lost_at = time.monotonic()

    def retire_lost(self) -> None:
        """Unmap what was lost long ago. To be called now and then."""
        now = time.monotonic()
        with self._lock:
            for boot, mapped in list(self._mapped.items()):
                if mapped.lost_at is not None and now - mapped.lost_at > LOST_SECONDS:
                    self._retire(boot)

    def close(self) -> None:
        """Unmap all of it. Idempotent."""
        with self._lock:
            for boot in list(self._mapped):
                self._retire(boot)

    def _retire(self, boot: str) -> None:
        mapped = self._mapped.pop(boot)
        mapped.retired = True
        if mapped.uses == 0:
            mapped.memory.close()
