"""A fleet without a process: the client of a node that comes and goes, and a ledger of its pins."""

from collections.abc import Sequence
from typing import Any

from connector_standins import EMBED_BYTES, LedgerBuffer, LedgerHandle, Stored
from lookup_buffer.client.buffer import InsertOutcome
from lookup_buffer.client.handles import LoadOrder, PrefetchState
from lookup_buffer.key import TensorKey
from scheduler_drive import content, output_of

WIDTH = EMBED_BYTES // 4


class LedgerFleet(LedgerBuffer):
    """Has bytes to load as well.

    As with a real node, the arena of one that is lost stays mapped: what was pinned there loads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._orphans: dict[int, LedgerHandle] = {}
        self._boots = 0

    def keep(
        self,
        name: str,
        outcome: PrefetchState = PrefetchState.RESIDENT,
        *,
        needs_fetch: bool = False,
    ) -> None:
        self.stored[content(name)] = Stored(outcome, needs_fetch)
        self.published(content(name))

    def lose_node(self) -> None:
        self.boot = ""
        self._orphans |= self.pinned
        self.pinned.clear()
        for handle in self.pending + self.awaited:
            if not handle.is_released:
                handle.reason, handle.state = "node_down", PrefetchState.FAILED
        self.pending.clear()
        self.awaited.clear()

    def find_node(self) -> None:
        if not self.boot:
            self._boots += 1
            self.boot = f"{self._boots:016}"

    def is_held(self, load: Any) -> bool:
        """Whether the bytes may be read now."""
        order = load.order
        return order.ticket in (self.pinned if order.boot == self.boot else self._orphans)

    def prefetch(
        self, keys: Sequence[TensorKey], *, timeout: float = 0.0, wait_seconds: float = 0.0
    ) -> list[LedgerHandle]:
        if self.boot:
            return super().prefetch(keys, timeout=timeout, wait_seconds=wait_seconds)
        return [LedgerHandle(key, PrefetchState.FAILED, "node_down") for key in keys]

    def load(self, order: LoadOrder) -> Any:
        return output_of((self.pinned | self._orphans)[order.ticket].key.mm_hash, WIDTH)

    def insert(self, key: TensorKey, tensor: Any, **_: Any) -> InsertOutcome:
        self.stored.setdefault(key.mm_hash, Stored())
        return InsertOutcome.STORED
