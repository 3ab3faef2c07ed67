"""Outbox: what this end has sent to a peer and the peer has not received, within a budget.

A message goes one of three ways. If there is room, it is copied and the sender returns; a large one
is copied while its offer is in flight, because the request for it arrives later. If there is no
room, the sender waits for room. If the peer requests the message during that wait, its bytes are
sent from the sender's own memory. So a full budget never keeps a receiver from the message that it
wants.

Senders run on their own threads; requests of the peer come from the thread that reads. The outbox
does not know sockets: `io.FrameWriter` writes its frames.
"""

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from lookup_buffer.errors import BufferFull, LookupBufferError
from lookup_buffer.pipes.carrier import Carrier
from lookup_buffer.pipes.io import FrameWriter, Outgoing
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.protocol.header import TensorHeader

INLINE_BYTES: Final = 64 << 10
"""Up to so many bytes are sent with their offer: that costs less than a round trip."""


class Bytes(Protocol):
    """The bytes of a message in the sender's memory: a view of them, or a copy."""

    def lent(self) -> memoryview: ...

    def copied(self) -> memoryview: ...


class Outbox:
    """Guarded by the peer's lock, `changed`, which is notified of every change.

    Args:
        check: raises, under the lock, if the peer cannot be used any more.
        carrier: where copies are put if possible; None for pipes without shared memory.
        attend: called before a frame is sent that the other end will reply to.
    """

    def __init__(
        self,
        changed: threading.Condition,
        speaker: FrameWriter,
        check: Callable[[], None],
        limits: PipeLimits,
        carrier: Carrier | None = None,
        attend: Callable[[], None] | None = None,
    ) -> None:
        self._changed = changed
        self._speaker = speaker
        self._carrier = carrier
        self._check_link = check
        self._attend = attend
        self._limits = limits
        self._messages: dict[int, Outgoing] = {}
        self._last_number = 0
        self._ending: LookupBufferError | None = None
        """The error for new sends, while it only finishes what was sent before."""
        self.used_bytes = 0
        """Bytes of the budget in use: 0 once all that was sent was received or given up."""

    def send(
        self, key: bytes | None, header: TensorHeader, bytes_of: "Bytes", deadline: float
    ) -> None:
        """Offer a message. Returns when its bytes are copied, or are in the kernel's buffers.

        Raises:
            BufferFull: there was no room by `deadline`, a monotonic time.
        """
        cost = self._limits.cost(header.nbytes)
        if self._charge(cost):
            # A large message is copied while its offer is in flight.
            copying = self._carrier is None and header.nbytes > INLINE_BYTES
            out = Outgoing(key, memoryview(b""), cost, charged=True, copying=copying)
            try:
                if not copying:
                    out.memory, out.at = self._copy(bytes_of)
                    out.inline = out.at is None and header.nbytes <= INLINE_BYTES
                self._offer(out, header)
            except BaseException:
                self._free(out.at)
                self._give_back(cost)
                raise
            if copying:
                self._copy_offered(out, bytes_of)
        elif deadline <= time.monotonic():  # do not offer it: it would be withdrawn at once
            raise self._no_room(header.nbytes)
        else:
            out = Outgoing(key, bytes_of.lent(), cost)
            self._offer(out, header)
            self._wait_for_room(out, bytes_of, deadline)

    def _copy_offered(self, out: Outgoing, bytes_of: "Bytes") -> None:
        try:
            out.memory = bytes_of.copied()
        except BaseException:
            with self._changed:
                self._speaker.put(["withdraw", out.number, out.key])
                if out.pulled:
                    self._speaker.put(["gone", out.number])
            self._speaker.write()
            self.settle(out.number)
            raise
        with self._changed:
            out.copying = False
            if out.pulled and not out.over:
                self._speaker.put(["data", out.number], out)
        self._speaker.write()

    def _offer(self, out: Outgoing, header: TensorHeader) -> None:
        with self._changed:
            self._check()
            self._last_number += 1
            out.number = self._last_number
            self._messages[out.number] = out
            offer = ["offer", out.number, out.key, header.to_fields()]
            if out.at is not None:
                offer.append(out.at)
            elif self._attend is not None and not out.inline:
                self._attend()
            self._speaker.put(offer, out if out.inline else None)
        self._speaker.write()

    def _wait_for_room(self, out: Outgoing, bytes_of: "Bytes", deadline: float) -> None:
        """Wait until the message can be copied, or was requested and sent from the caller's
        memory."""
        with self._changed:
            try:
                while not (out.over or out.pulled):
                    self._check()
                    if self._has_room(out.cost):
                        self.used_bytes += out.cost
                        out.charged = True
                        break
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise self._no_room(len(out.memory))
            except LookupBufferError:
                if not (out.over or out.pulled):
                    self._messages.pop(out.number, None)
                    self._speaker.say(["withdraw", out.number, out.key])
                    raise
        copied, at = self._copy(bytes_of) if out.charged else (None, None)
        with self._changed:
            if copied is not None and not (out.pulled or out.over):
                out.memory, out.at = copied, at
                return
            self._free(at)
            while not out.over:  # in flight: it ends by itself, or with the link
                self._check_link()
                self._changed.wait()

    def _no_room(self, nbytes: int) -> BufferFull:
        return BufferFull(f"no room for {nbytes} bytes in time")

    def _copy(self, bytes_of: "Bytes") -> tuple[memoryview, int | None]:
        """Copy the bytes. Returns the copy, and its offset in the shared memory, if it lies
        there."""
        placed = self._carrier.put(bytes_of.lent()) if self._carrier else None
        return placed or (bytes_of.copied(), None)

    def _free(self, at: int | None) -> None:
        if at is not None and self._carrier is not None:
            self._carrier.free(at)

    def _charge(self, cost: int) -> bool:
        with self._changed:
            self._check()
            has_room = self._has_room(cost)
            self.used_bytes += cost if has_room else 0
            return has_room

    def _has_room(self, cost: int) -> bool:
        return self.used_bytes + cost <= self._limits.buffer_bytes

    def _give_back(self, cost: int) -> None:
        with self._changed:
            self.used_bytes = max(0, self.used_bytes - cost)
            self._changed.notify_all()

    def drain(self, ending: LookupBufferError, deadline: float) -> None:
        """Wait until all that was sent is received, at most until `deadline`. Other waiting callers
        get `ending`."""
        with self._changed:
            self._ending = ending
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._messages,
                max(0.0, deadline - time.monotonic()),
            )

    def settle(self, number: int) -> None:
        """The message of that number is finished: release its memory and its share of the
        budget."""
        with self._changed:
            out = self._messages.pop(number, None)
            if out is None:
                return
            out.over = True
            self._free(out.at)
            if out.charged:
                self.used_bytes -= out.cost
            self._changed.notify_all()

    def pull(self, number: int) -> None:
        """The other end requests the bytes of this message."""
        with self._changed:
            out = self._messages.get(number)
            if out is None or out.inline or out.pulled:
                self._speaker.put(["gone", number])
            elif out.at is not None:
                self._speaker.put(["data", number, out.at])  # copied there since its offer
            else:
                out.pulled = True
                if not out.copying:
                    self._speaker.put(["data", number], out)
        self._speaker.write()

    def clear(self) -> None:
        """Call with the lock held. Drop all messages: no receiver is left."""
        self._messages.clear()
        self.used_bytes = 0

    def _check(self) -> None:
        self._check_link()
        if self._ending is not None:
            raise type(self._ending)(str(self._ending))
