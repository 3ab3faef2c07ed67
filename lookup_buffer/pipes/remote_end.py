"""RemoteEnd: this end's connection to the other end of a pipe.

It exchanges frames over a `FramedSocket`, in both directions at once. Two threads live as long as
the connection; callers also write and read frames on their own threads (see `io`):

    ["offer", n, key, header] + bytes      a message; with its bytes only if they are few
    ["pull", n]                            a request for its bytes
    ["data", n] + bytes                    the requested bytes
    ["gone", n]                            the sender withdrew the message before the request came
    ["withdraw", n, key]                   the sender withdraws the message, without a request
    ["received", n, …]                     received: bytes from an offer, or from shared memory
    ["beat"]   ["bye"]

If the two ends share memory (see `SharedRegion`), the bytes may be there instead of in a frame:

    ["offer", n, key, header, at]          the offset of the bytes, until they are "received"
    ["data", n, at]                        likewise, for bytes copied there after the offer

Offers are never held back, and large payload is requested. So neither the order in which a receiver
takes keys nor a full budget can deadlock the two ends. A thread that reads waits only for the bytes
of a frame that has begun. This module handles bytes and headers, not tensors.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from lookup_buffer.errors import (
    LookupBufferError,
    LookupTimeout,
    PipeBroken,
    PipeClosed,
    ProtocolError,
)
from lookup_buffer.key import MAX_KEY_CHARACTERS
from lookup_buffer.pipes.inbox import Arrival, FreshMemory, Inbox, Offer
from lookup_buffer.pipes.io import MINIMUM_BYTES_PER_SECOND, FrameReader, FrameWriter, Outgoing
from lookup_buffer.pipes.outbox import INLINE_BYTES, Outbox
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.pipes.shared_region import SharedRegion
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FrameStream
from lookup_buffer.shm.memory import copy_bytes, pointer_to

BYE_SECONDS: Final = 1.0
LARGE_BYTES: Final = 1 << 20
"""From this size on, "received" is sent at once, because a sender may wait for the room."""


class RemoteEnd:
    """Thread-safe. `outbox` sends; `receive` receives an offer from the inbox.

    Args:
        on_lost: called once, on any thread, with the error that ended the connection.
        on_idle: called when there was nothing to send for a while.
    """

    def __init__(
        self,
        link: FrameStream,
        inbox: Inbox,
        limits: PipeLimits,
        on_lost: Callable[["RemoteEnd", LookupBufferError], None],
        region: SharedRegion | None = None,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self._link = link
        self._region = region
        self._inbox = inbox
        self._limits = limits
        self._on_lost = on_lost
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._writer = FrameWriter(
            link, lock, self._check, self._on_sent, self._fail, limits.silence_seconds, on_idle
        )
        self._reader = FrameReader(
            link, self._on_frame, self._fail, self._send_deferred, limits.silence_seconds
        )
        self.outbox = Outbox(
            self._changed, self._writer, self._check, limits, region, self._reader.resume_thread
        )
        self._arrivals: dict[int, Arrival] = {}
        self._error: LookupBufferError | None = None
        self._bye_sent = False
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._writer.run, "lb-pipe-out"), (self._read, "lb-pipe-in"))
        ]

    def start(self) -> None:
        """Start the two threads.

        Raises:
            PipeBroken: the system grants no thread or descriptor. The connection is then ended.
        """
        try:
            self._reader.open()
            for thread in self._threads:  # the one that reads is last
                thread.start()
        except (OSError, RuntimeError) as error:
            why = f"the system does not allow another connection: {error}"
            self.abort(PipeBroken(why))
            self._reader.close()
            raise PipeBroken(why) from error

    # -- receiving

    def read_until(self, done: Callable[[], bool], deadline: float) -> None:
        """See `FrameReader.read_until`."""
        self._reader.read_until(done, deadline)

    def wake(self) -> None:
        """See `FrameReader.wake`."""
        self._reader.wake()

    def receive(
        self, offer: Offer, memory: memoryview, fresh_memory: FreshMemory | None = None
    ) -> bool:
        """Put the bytes of an offer into `memory`. Returns False if its sender gave up.

        If an earlier caller requested the bytes, they arrive in that caller's memory. With
        `fresh_memory`, nothing is written to `memory` any more once this has returned or raised.

        Raises:
            LookupTimeout: the bytes did not arrive in time.
        """
        if offer.payload is not None:
            return self._copy_out(offer, offer.payload, memory)
        if offer.arrival is None:
            with self._changed:
                self._check()
                offer.arrival = self._arrivals[offer.number] = Arrival(memory)
                self._writer.enqueue(["pull", offer.number])
            self._writer.write()
        arrival = offer.arrival
        # Twice: once until the first byte arrives, and once for the deadline of the reading thread.
        # That deadline must expire first: it means that the remote end is lost, not only late.
        limit = 2 * self._limits.silence_seconds
        limit += offer.header.nbytes / MINIMUM_BYTES_PER_SECOND
        deadline = time.monotonic() + limit
        self._reader.read_until(lambda: arrival.finished, deadline, offer.number)
        with self._changed:
            try:
                self._wait_for_arrival(arrival, deadline)
            except LookupTimeout:
                if fresh_memory is not None:
                    arrival.memory = fresh_memory()
                raise
        if arrival.payload is not None:
            return self._copy_out(offer, arrival.payload, memory)
        return not arrival.abandoned

    def _wait_for_arrival(self, arrival: Arrival, deadline: float) -> None:
        """Wait until the arrival is finished, or until no thread writes to its memory any more."""
        try:
            while not arrival.finished:
                self._check()
                left = deadline - time.monotonic()
                if left <= 0 and not arrival.moving:
                    raise LookupTimeout("the bytes of the message did not arrive in time")
                self._changed.wait(left if left > 0 else None)
        except LookupBufferError:
            # If the link has ended, the thread that reads is about to stop.
            self._changed.wait_for(lambda: not arrival.moving, self._limits.silence_seconds)
            raise

    def discard(self, offer: Offer) -> None:
        """Drop an offer without receiving it, so that its sender can release it."""
        with self._changed:
            self._arrivals.pop(offer.number, None)
        self._send_received(offer)

    def _copy_out(self, offer: Offer, payload: bytearray | memoryview, memory: memoryview) -> bool:
        if payload:
            copy_bytes(pointer_to(memory), pointer_to(memoryview(payload)), len(payload))
        self._send_received(offer)
        return True

    def _send_received(self, offer: Offer) -> None:
        with self._changed:
            if self._error is not None:
                return
            waited_for = offer.header.nbytes >= LARGE_BYTES and self._inbox.is_empty
            if not waited_for and self._reader.schedule_flush():
                self._writer.defer_received(offer.number)
                return
            self._writer.enqueue(["received", offer.number])
        self._writer.write()

    def _send_deferred(self) -> None:
        with self._changed:
            self._writer.enqueue_deferred()
        self._writer.write()

    # -- the end

    def close(self) -> None:
        """Send "bye", and wait until the other end has read it. Bounded, idempotent.

        If the socket were closed at once with unread data in it, the kernel would reset the
        connection. The other end might then read the reset instead of "bye".
        """
        with self._changed:
            self._bye_sent = True
            if self._error is None:
                self._writer.enqueue_for_thread(["bye"])
        deadline = time.monotonic() + BYE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._end(PipeClosed("this end was closed"), reset=False)

    def abort(self, error: LookupBufferError) -> None:
        self._end(error, reset=True)

    def _end(self, error: LookupBufferError, *, reset: bool = True) -> None:
        """End the connection with this error. The first error stays."""
        # A copy without its traceback, which would keep frames and their memory alive.
        error = type(error)(str(error))
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self.outbox.clear()
            self._writer.stop()
            self._changed.notify_all()
        if reset:
            self._link.abort()
        else:
            self._link.close()
        if self._region is not None:
            self._region.close()
        self._inbox.remove_source(self)
        self._on_lost(self, error)

    def _fail(self, error: LookupBufferError) -> None:
        """One of the threads failed. The other one may have failed first, with the actual cause."""
        cause = self._link.failure
        error = cause if isinstance(cause, LookupBufferError) else error
        if isinstance(error, PipeClosed) and not self._bye_sent:
            # A live end sends "bye" first; without it the process was killed.
            error = PipeBroken("the other end of the pipe ended without closing; was it killed?")
        self._end(error)

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _on_sent(self, header: list[Any], out: Outgoing | None) -> None:
        if header[0] == "data" and out is not None:
            self.outbox.finish(out.number)

    # -- frames, on the reader thread or on a waiting caller's

    def _read(self) -> None:
        self._reader.run()
        self._end(PipeClosed("the other end was closed"), reset=False)  # no effect after a failure

    def _on_frame(self, header: Any, nbytes: int) -> None:
        match header:
            case ["offer", _, bytes(key), *_] if len(key) > MAX_KEY_CHARACTERS:
                raise ProtocolError("a key that is longer than allowed")
            case ["offer", int(number), bytes() | None as key, dict(fields)]:
                self._on_offer(number, key, TensorHeader.from_fields(fields), nbytes)
            case ["offer", int(number), bytes() | None as key, dict(fields), int(offset)] if (
                not nbytes
            ):
                header = TensorHeader.from_fields(fields)
                payload = self._shared_bytes(offset, header.nbytes)
                self._inbox.put(Offer(self, number, key, header, payload))
            case ["data", int(number)]:
                self._on_data(number, nbytes)
            case ["data", int(number), int(offset)] if not nbytes:
                self._on_data_offset(number, offset)
            case ["pull", int(number)] if not nbytes:
                self.outbox.pull(number)
            case ["gone", int(number)] if not nbytes:
                self._on_gone(number)
            case ["withdraw", int(number), bytes() | None as key] if not nbytes:
                self._inbox.remove(self, number, key)
            case ["received", *numbers] if not nbytes and all(type(n) is int for n in numbers):
                for number in numbers:
                    self.outbox.finish(number)
            case ["beat"] if not nbytes:
                pass
            case ["bye"] if not nbytes:
                self._reader.end()
            case _:
                raise ProtocolError("not a frame of a pipe")

    def _on_offer(self, number: int, key: bytes | None, header: TensorHeader, nbytes: int) -> None:
        if nbytes not in (0, header.nbytes) or nbytes > INLINE_BYTES:
            raise ProtocolError("an offer with fewer or more bytes than its header announces")
        payload = None
        if nbytes == header.nbytes:
            payload = bytearray(nbytes)
            self._link.recv_into(memoryview(payload), timeout=self._limits.silence_seconds)
        self._inbox.put(Offer(self, number, key, header, payload))

    def _on_data(self, number: int, nbytes: int) -> None:
        with self._changed:
            arrival = self._arrivals.pop(number, None)
            if arrival is None or arrival.memory.nbytes != nbytes:
                raise ProtocolError("bytes that were not requested")
            arrival.moving = True
        try:
            self._link.recv_into(arrival.memory, timeout=self._limits.silence_seconds)
            arrival.finished = True
        finally:
            with self._changed:
                arrival.moving = False
                self._changed.notify_all()

    def _on_data_offset(self, number: int, offset: int) -> None:
        arrival = self._arrivals.pop(number, None)
        if arrival is None:
            raise ProtocolError("an offset that was not requested")
        payload = self._shared_bytes(offset, arrival.memory.nbytes)
        with self._changed:
            arrival.payload = payload
            arrival.finished = True
            self._changed.notify_all()

    def _shared_bytes(self, offset: int, nbytes: int) -> memoryview:
        if self._region is None:
            raise ProtocolError("an offset into shared memory, and none is shared")
        return self._region.get(offset, nbytes)

    def _on_gone(self, number: int) -> None:
        with self._changed:
            arrival = self._arrivals.pop(number, None)
            if arrival is not None:
                arrival.finished = arrival.abandoned = True
                self._changed.notify_all()
