"""A buffer that holds KV for the KV connector in memory, with a ledger of its pins.

It loses, evicts and fails by chance. What it evicts is overwritten, so who reads it without a pin
computes with garbage. Of each chunk that is stored it checks the content, see `expected`.
"""

import random
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from lookup_buffer import codec
from lookup_buffer.client.handles import LoadOrder, PrefetchHandle, PrefetchState
from lookup_buffer.errors import BufferFull, MissingTensor, MissReason, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import InsertOutcome

if TYPE_CHECKING:
    from lookup_buffer.protocol.header import TensorHeader

ARENA_BYTES: Final = 1 << 20
GARBAGE: Final = 0xEE
ORPHAN_TURNS: Final = 10


class LedgerHandle(PrefetchHandle):
    """Nobody answers while the scheduler waits."""

    def wait(self, timeout: float) -> PrefetchState:
        return self.state


class KvLedger:
    """Looks like `LookupBuffer`, as far as the KV connector uses it. The scheduler and one worker's
    thread at a time may call it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._settled = threading.Condition()
        self._arena = bytearray(ARENA_BYTES)
        self._used = 0
        self._stored: dict[str, tuple[int, int, TensorHeader]] = {}
        self._handoffs: dict[str, torch.Tensor] = {}
        self._pending: list[PrefetchHandle] = []
        self._orphans: dict[int, int] = {}
        """By offset: for how many turns what a lost session had pinned stays."""
        self._tickets = 0
        self.pinned: dict[int, PrefetchHandle] = {}
        self.boot = "b" * 16
        self.namespace = "n" * 64
        self.load_fails = self.insert_fails = 0.0
        """The chance of one to fail."""
        self.expected: dict[str, list[int]] = {}
        """By key: what a chunk has to contain, as 64-bit numbers."""
        self.wrong: list[str] = []
        """What was stored under a name that has other content, or none."""

    # -- what happens to it

    def answer(self) -> None:
        """A turn: some of what is in flight arrives, or turns out to be nowhere."""
        self._drop_orphans()
        for handle in list(self._pending):
            if self._chance.random() < 0.4:
                self._pending.remove(handle)
                self._settle(handle)

    def evict(self) -> None:
        """Half of what nobody has pinned."""
        in_use = self._pinned_offsets() | self._orphans.keys()
        for text, (offset, _, _) in list(self._stored.items()):
            if offset not in in_use and self._chance.random() < 0.5:
                self._drop(text)

    def lose_node(self) -> None:
        """A new one without items is there. The arena of the old one stays mapped."""
        self._end_pins()
        self._stored.clear()
        self.boot = f"{self._chance.getrandbits(64):016x}"

    def lose_session(self) -> None:
        """The node lives on. What was pinned stays for as long as loads take that have begun."""
        self._orphans |= dict.fromkeys(self._pinned_offsets(), ORPHAN_TURNS)
        self._end_pins()

    def _end_pins(self) -> None:
        for handle in [*self.pinned.values(), *self._pending]:
            handle.state, handle.reason = PrefetchState.FAILED, MissReason.NODE_DOWN
        self.pinned.clear()
        self._pending.clear()

    def _pinned_offsets(self) -> set[int]:
        return {handle.order.offset for handle in self.pinned.values() if handle.order}

    def _drop_orphans(self) -> None:
        self._orphans = {offset: turns - 1 for offset, turns in self._orphans.items()}
        due = [offset for offset, turns in self._orphans.items() if turns <= 0]
        for text, (offset, _, _) in list(self._stored.items()):
            if offset in due and offset not in self._pinned_offsets():
                self._drop(text)
        for offset in due:
            del self._orphans[offset]

    def _drop(self, text: str) -> None:
        offset, nbytes, _ = self._stored.pop(text)
        self._arena[offset : offset + nbytes] = bytes([GARBAGE]) * nbytes

    # -- the scheduler's side

    def prefetch(self, keys: Sequence[TensorKey], *, timeout: float = 0.0) -> list[PrefetchHandle]:
        handles: list[PrefetchHandle] = [LedgerHandle(key, self._settled) for key in keys]
        for handle in handles:
            if self._chance.random() < 0.3:
                self._pending.append(handle)
            else:
                self._settle(handle)
        return handles

    def _settle(self, handle: PrefetchHandle) -> None:
        stored = self._stored.get(handle.key.text)
        if stored is None or self._chance.random() < 0.05:
            handle.state, handle.reason = PrefetchState.MISSING, MissReason.ABSENT
            return
        offset, nbytes, header = stored
        self._tickets += 1
        handle.order = LoadOrder(self.boot, self._tickets, offset, nbytes, 1, header)
        handle.source = self._chance.choice(["local", "another"])
        handle.state = PrefetchState.RESIDENT
        self.pinned[self._tickets] = handle

    def release(self, *handles: PrefetchHandle) -> None:
        for handle in handles:
            handle.released = True
            if handle in self._pending:
                self._pending.remove(handle)
            if handle.order is not None:
                self.pinned.pop(handle.order.ticket, None)

    def has_caches(self, keys: Sequence[TensorKey], *, timeout: float = 0.0) -> list[bool]:
        return [key.text in self._stored or key.text in self._handoffs for key in keys]

    # -- the workers' side

    def arena(self, boot: str) -> memoryview:
        if self._chance.random() < self.load_fails:
            raise NodeUnavailable("by chance")
        return memoryview(self._arena).toreadonly()

    def insert(self, key: TensorKey, tensor: torch.Tensor, **_: Any) -> InsertOutcome:
        if self._chance.random() < self.insert_fails:
            raise BufferFull("by chance")
        if key.request_id is not None:
            self._handoffs[key.text] = tensor.clone()
            return InsertOutcome.STORED
        found = tensor.contiguous().view(torch.int64).flatten().tolist()
        if self.expected.get(key.text) != found:
            self.wrong.append(f"{key.text}: {found}, not {self.expected.get(key.text)}")
        if key.text in self._stored:
            return InsertOutcome.EXISTS
        content = bytes(tensor.contiguous().view(torch.uint8).flatten().numpy())
        offset, self._used = self._used, self._used + len(content)
        assert self._used <= ARENA_BYTES, "the test stores too much"
        self._arena[offset : self._used] = content
        self._stored[key.text] = offset, len(content), codec.header_of(tensor)
        return InsertOutcome.STORED

    def drop_select(self, key: TensorKey, *, timeout: float = 0.0) -> torch.Tensor:
        if key.text not in self._handoffs:
            raise MissingTensor(key.text)
        return self._handoffs.pop(key.text)

    def enter(self, namespace: str, parts: Mapping[str, str] | None = None) -> None:
        """The workers of a real engine come to know it later than the scheduler."""

    def close(self) -> None:
        """Nothing to give back."""
