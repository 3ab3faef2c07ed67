"""Outbox: what this end has sent and the remote end has not received, within a budget.

If there is room, a message is copied and the sender returns. A large one is copied while its offer
is in flight, because the request for it arrives later. If there is no room, the sender waits for
room. If the remote end requests the message during that wait, its bytes are sent from the sender's
own memory. So a full budget never withholds from a receiver the message that it requests.

Senders call it on their own threads; the thread that reads calls it with the remote end's requests.
`io.FrameWriter` writes its frames.
"""

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from lookup_buffer.errors import BufferFull, LookupBufferError, ProtocolError
from lookup_buffer.pipes.io import FrameWriter, Outgoing
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.pipes.shared_region import SharedRegion
from lookup_buffer.protocol.header import TensorHeader

INLINE_BYTES: Final = 64 << 10
"""Up to this size the bytes are sent with their offer: that costs less than a round trip."""


class Bytes(Protocol):
    """The bytes of a message in the sender's memory: a view of them, or a copy."""

    def view(self) -> memoryview: ...

    def copy(self) -> memoryview: ...


class Outbox:
    """Guarded by the remote end's lock, `changed`, which is notified of every change.

    Args:
        check: raises, under the lock, if the connection cannot be used any more.
        region: shared memory for the copies; None for pipes without it.
        expect_reply: called before a frame is sent to which the other end replies.
    """

    def __init__(
        self,
        changed: threading.Condition,
        writer: FrameWriter,
        check: Callable[[], None],
        limits: PipeLimits,
        region: SharedRegion | None = None,
        expect_reply: Callable[[], None] | None = None,
    ) -> None:
        self._changed = changed
        self._writer = writer
        self._region = region
        self._check_link = check
        self._expect_reply = expect_reply
        self._limits = limits
        self._messages: dict[int, Outgoing] = {}
        self._last_number = 0
        self._pulls = 0
        self._ending: LookupBufferError | None = None
        """The error for new sends while the pipe closes."""
        self.used_bytes = 0
        """Bytes of the budget in use: 0 once all that was sent was received or withdrawn."""

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
            copying = self._region is None and header.nbytes > INLINE_BYTES
            out = Outgoing(key, memoryview(b""), cost, charged=True, copying=copying)
            try:
                if not copying:
                    out.memory, out.offset = self._copy(bytes_of)
                    out.inline = out.offset is None and header.nbytes <= INLINE_BYTES
                self._offer(out, header)
            except BaseException:
                self._free(out.offset)
                self._refund(cost)
                raise
            if copying:
                self._copy_offered(out, bytes_of)
        elif deadline <= time.monotonic():  # an offer would be withdrawn at once
            raise self._no_room(header.nbytes)
        else:
            out = Outgoing(key, bytes_of.view(), cost)
            self._offer(out, header)
            self._wait_for_room(out, bytes_of, deadline)

    def _copy_offered(self, out: Outgoing, bytes_of: "Bytes") -> None:
        try:
            out.memory = bytes_of.copy()
        except BaseException:
            with self._changed:
                self._writer.enqueue(["withdraw", out.number, out.key])
                if out.pulled:
                    self._writer.enqueue(["gone", out.number])
            self._writer.write()
            self.finish(out.number)
            raise
        with self._changed:
            out.copying = False
            if out.pulled and not out.finished:
                self._writer.enqueue(["data", out.number], out)
        self._writer.write()

    def _offer(self, out: Outgoing, header: TensorHeader) -> None:
        with self._changed:
            self._check()
            self._last_number += 1
            out.number = self._last_number
            self._messages[out.number] = out
            offer = ["offer", out.number, out.key, header.to_fields()]
            if out.offset is not None:
                offer.append(out.offset)
            elif self._expect_reply is not None and not out.inline:
                self._expect_reply()
            self._writer.enqueue(offer, out if out.inline else None)
        self._writer.write()

    def _wait_for_room(self, out: Outgoing, bytes_of: "Bytes", deadline: float) -> None:
        """Wait until the message can be copied, or was requested and sent from the caller's
        memory."""
        with self._changed:
            try:
                while not (out.finished or out.pulled):
                    self._check()
                    if self._has_room(out.cost):
                        self.used_bytes += out.cost
                        out.charged = True
                        break
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise self._no_room(len(out.memory))
            except LookupBufferError:
                if not (out.finished or out.pulled):
                    self._messages.pop(out.number, None)
                    self._writer.enqueue_for_thread(["withdraw", out.number, out.key])
                    raise
        copied, offset = self._copy(bytes_of) if out.charged else (None, None)
        with self._changed:
            if copied is not None and not (out.pulled or out.finished):
                out.memory, out.offset = copied, offset
                return
            self._free(offset)
            while not out.finished:  # in flight: it finishes, or the link ends
                self._check_link()
                self._changed.wait()

    def _no_room(self, nbytes: int) -> BufferFull:
        return BufferFull(
            f"no room for {nbytes} bytes in time: the other end has not received earlier messages"
        )

    def _copy(self, bytes_of: "Bytes") -> tuple[memoryview, int | None]:
        """Copy the bytes. Returns the copy, and its offset if it is in the shared memory."""
        placed = self._region.put(bytes_of.view()) if self._region else None
        return placed or (bytes_of.copy(), None)

    def _free(self, offset: int | None) -> None:
        if offset is not None and self._region is not None:
            self._region.free(offset)

    def _charge(self, cost: int) -> bool:
        with self._changed:
            self._check()
            has_room = self._has_room(cost)
            self.used_bytes += cost if has_room else 0
            return has_room

    def _has_room(self, cost: int) -> bool:
        return self.used_bytes + cost <= self._limits.buffer_bytes

    def _refund(self, cost: int) -> None:
        with self._changed:
            self.used_bytes = max(0, self.used_bytes - cost)
            self._changed.notify_all()

    def drain(self, ending: LookupBufferError, deadline: float) -> None:
        """Wait until all messages are received, at most until `deadline`. Other waiting callers
        get `ending`."""
        with self._changed:
            self._ending = ending
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._messages,
                max(0.0, deadline - time.monotonic()),
            )

    def finish(self, number: int) -> None:
        """The message was received or sent: release its memory and its part of the budget."""
        with self._changed:
            out = self._messages.pop(number, None)
            if out is None:
                return
            out.finished = True
            self._free(out.offset)
            if out.charged:
                self.used_bytes -= out.cost
            self._changed.notify_all()

    def pull(self, number: int) -> None:
        """Send the bytes of this message, which the other end has requested.

        Raises:
            ProtocolError: it has requested more than was offered.
        """
        with self._changed:
            self._pulls += 1
            if self._pulls > self._last_number:
                raise ProtocolError("more requests for bytes than offers")
            out = self._messages.get(number)
            if out is None or out.inline or out.pulled:
                self._writer.enqueue(["gone", number])
            elif out.offset is not None:
                self._writer.enqueue(["data", number, out.offset])  # copied there since its offer
            else:
                out.pulled = True
                if not out.copying:
                    self._writer.enqueue(["data", number], out)
        self._writer.write()

    def clear(self) -> None:
        """Call with the lock held. Drop all messages, because the connection has ended."""
        self._messages.clear()
        self.used_bytes = 0

    def _check(self) -> None:
        self._check_link()
        if self._ending is not None:
            raise type(self._ending)(str(self._ending))
