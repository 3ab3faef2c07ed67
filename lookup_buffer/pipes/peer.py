"""Peer: the other end of a stream, as one end of a pipe sees it.

It exchanges frames over a `FramedSocket`, in both directions at once. Two threads live as long as
the peer; callers also write and read frames on their own threads (see `io`):

    ["offer", n, key, header] + bytes      a message; with its bytes only if they are few
    ["pull", n]                            a request for its bytes
    ["data", n] + bytes                    the requested bytes
    ["gone", n]                            the sender had given up before the request came
    ["withdraw", n, key]                   the sender gives up now, without a request
    ["received", n, …]                     received: bytes from an offer, or from shared memory
    ["beat"]   ["bye"]

If the two ends share memory (see `Carrier`), the bytes may lie there instead of in a frame:

    ["offer", n, key, header, at]          the offset of the bytes, until they are "received"
    ["data", n, at]                        likewise, for bytes copied there after the offer

Offers always pass, and large payload is requested. So neither the order in which a receiver wants
keys nor a full budget can deadlock the two ends. A thread that reads never waits for anything but
the bytes of a frame that has begun. This module knows no tensors, only bytes and headers.
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
from lookup_buffer.pipes.carrier import Carrier
from lookup_buffer.pipes.inbox import Arrival, Inbox, Offer, Spare
from lookup_buffer.pipes.io import FrameWriter, Outgoing, Reading
from lookup_buffer.pipes.outbox import INLINE_BYTES, Outbox
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FrameStream
from lookup_buffer.shm.memory import copy_bytes, pointer_to

BYE_SECONDS: Final = 1.0
MINIMUM_BYTES_PER_SECOND: Final = 16e6
LARGE_BYTES: Final = 1 << 20
"""From so many bytes on, "received" is sent at once, because a sender may wait for the room."""


class Peer:
    """Thread-safe. `outbox` sends; `receive` receives an offer from the inbox.

    `lost` is called once, on any thread, with the reason why the peer cannot be used any more.
    `rest` is called when there was nothing to send for a while.
    """

    def __init__(
        self,
        link: FrameStream,
        inbox: Inbox,
        limits: PipeLimits,
        lost: Callable[["Peer", LookupBufferError], None],
        carrier: Carrier | None = None,
        rest: Callable[[], None] | None = None,
    ) -> None:
        self._link = link
        self._carrier = carrier
        self._inbox = inbox
        self._limits = limits
        self._tell_lost = lost
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._speaker = FrameWriter(
            link, lock, self._check, self._sent, self._fail, limits.silence_seconds, rest
        )
        self._reading = Reading(
            link, self._heard, self._fail, self._say_put_off, limits.silence_seconds
        )
        self.outbox = Outbox(
            self._changed, self._speaker, self._check, limits, carrier, self._reading.attend
        )
        self._arrivals: dict[int, Arrival] = {}
        self._error: LookupBufferError | None = None
        self._said_bye = False
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._speaker.run, "lb-pipe-out"), (self._read, "lb-pipe-in"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    # -- receiving

    def read_until(self, done: Callable[[], bool], deadline: float) -> None:
        """See `Reading.until`."""
        self._reading.until(done, deadline)

    def call(self) -> None:
        """See `Reading.call`."""
        self._reading.call()

    def receive(self, offer: Offer, memory: memoryview, spare: Spare | None = None) -> bool:
        """Put the bytes of an offer into `memory`. Returns False if its sender gave up.

        If an earlier caller requested the bytes, they arrive in that caller's memory. Once this has
        returned or raised, nothing is written to `memory` any more, if there is `spare` memory
        instead.

        Raises:
            LookupTimeout: the bytes did not come in time.
        """
        if offer.payload is not None:
            return self._take(offer, offer.payload, memory)
        if offer.arrival is None:
            with self._changed:
                self._check()
                offer.arrival = self._arrivals[offer.number] = Arrival(memory)
                self._speaker.put(["pull", offer.number])
            self._speaker.write()
        arrival = offer.arrival
        # Twice: once until the bytes begin to come, and once for the deadline of the thread that
        # reads them. That one must pass first: it means that the peer is lost, not only late.
        limit = 2 * self._limits.silence_seconds
        limit += offer.header.nbytes / MINIMUM_BYTES_PER_SECOND
        deadline = time.monotonic() + limit
        self._reading.until(lambda: arrival.over, deadline, offer.number)
        with self._changed:
            try:
                self._wait_for(arrival, deadline)
            except LookupTimeout:
                if spare is not None:
                    arrival.memory = spare()
                raise
        if arrival.payload is not None:
            return self._take(offer, arrival.payload, memory)
        return not arrival.gone

    def _wait_for(self, arrival: Arrival, deadline: float) -> None:
        """Wait until the arrival is over, or no thread writes, or will write, to its memory."""
        try:
            while not arrival.over:
                self._check()
                left = deadline - time.monotonic()
                if left <= 0 and not arrival.moving:
                    raise LookupTimeout("the bytes did not come in time")
                self._changed.wait(left if left > 0 else None)
        except LookupBufferError:
            # If the link has ended, the thread that reads is about to stop.
            self._changed.wait_for(lambda: not arrival.moving, self._limits.silence_seconds)
            raise

    def discard(self, offer: Offer) -> None:
        """Drop an offer that is not received, so that its sender can release it."""
        with self._changed:
            self._arrivals.pop(offer.number, None)
        self._say_received(offer)

    def _take(self, offer: Offer, payload: bytearray | memoryview, memory: memoryview) -> bool:
        if payload:
            copy_bytes(pointer_to(memory), pointer_to(memoryview(payload)), len(payload))
        self._say_received(offer)
        return True

    def _say_received(self, offer: Offer) -> None:
        with self._changed:
            if self._error is not None:
                return
            waited_for = offer.header.nbytes >= LARGE_BYTES and self._inbox.empty
            if not waited_for and self._reading.soon():
                self._speaker.put_off(offer.number)
                return
            self._speaker.put(["received", offer.number])
        self._speaker.write()

    def _say_put_off(self) -> None:
        with self._changed:
            self._speaker.put_put_off()
        self._speaker.write()

    # -- the end

    def close(self) -> None:
        """Send "bye", and wait until the other end has read it. Bounded, idempotent.

        If the socket were closed at once with unread data in it, the kernel would reset the
        connection. The other end might then read the reset instead of "bye".
        """
        with self._changed:
            self._said_bye = True
            if self._error is None:
                self._speaker.say(["bye"])
        deadline = time.monotonic() + BYE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.lose(PipeClosed("this end was closed"), reset=False)

    def abort(self, error: LookupBufferError) -> None:
        self.lose(error, reset=True)

    def lose(self, error: LookupBufferError, *, reset: bool = True) -> None:
        """End the peer with this error. The first reason stays."""
        # A copy without its traceback, which would keep frames and their memory alive.
        error = type(error)(str(error))
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self.outbox.clear()
            self._speaker.stop()
            self._changed.notify_all()
        if reset:
            self._link.abort()
        else:
            self._link.close()
        if self._carrier is not None:
            self._carrier.close()
        self._inbox.lose(self)
        self._tell_lost(self, error)

    def _fail(self, error: LookupBufferError) -> None:
        """One of the threads failed; the other one may have failed before it."""
        cause = self._link.failure
        error = cause if isinstance(cause, LookupBufferError) else error
        if isinstance(error, PipeClosed) and not self._said_bye:
            # A living end sends "bye" first; one that does not was killed.
            error = PipeBroken("the other end of the pipe ended without a word")
        self.lose(error)

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _sent(self, header: list[Any], out: Outgoing | None) -> None:
        if header[0] == "data" and out is not None:
            self.outbox.settle(out.number)

    # -- reading: on the thread, or on a waiting caller's

    def _read(self) -> None:
        self._reading.run()
        self.lose(PipeClosed("the other end was closed"), reset=False)  # no effect after a failure

    def _heard(self, header: Any, nbytes: int) -> None:
        match header:
            case ["offer", _, bytes(key), *_] if len(key) > MAX_KEY_CHARACTERS:
                raise ProtocolError("a key that is longer than any")
            case ["offer", int(number), bytes() | None as key, dict(fields)]:
                self._offered(number, key, TensorHeader.from_fields(fields), nbytes)
            case ["offer", int(number), bytes() | None as key, dict(fields), int(at)] if not nbytes:
                header = TensorHeader.from_fields(fields)
                payload = self._lying(at, header.nbytes)
                self._inbox.put(Offer(self, number, key, header, payload))
            case ["data", int(number)]:
                self._arrived(number, nbytes)
            case ["data", int(number), int(at)] if not nbytes:
                self._placed(number, at)
            case ["pull", int(number)] if not nbytes:
                self.outbox.pull(number)
            case ["gone", int(number)] if not nbytes:
                self._gone(number)
            case ["withdraw", int(number), bytes() | None as key] if not nbytes:
                self._inbox.remove(self, number, key)
            case ["received", *numbers] if not nbytes and all(type(n) is int for n in numbers):
                for number in numbers:
                    self.outbox.settle(number)
            case ["beat"] if not nbytes:
                pass
            case ["bye"] if not nbytes:
                self._reading.end()
            case _:
                raise ProtocolError("not a frame of a pipe")

    def _offered(self, number: int, key: bytes | None, header: TensorHeader, nbytes: int) -> None:
        if nbytes not in (0, header.nbytes) or nbytes > INLINE_BYTES:
            raise ProtocolError("an offer with other bytes than it says")
        payload = None
        if nbytes == header.nbytes:
            payload = bytearray(nbytes)
            self._link.recv_into(memoryview(payload), timeout=self._limits.silence_seconds)
        self._inbox.put(Offer(self, number, key, header, payload))

    def _arrived(self, number: int, nbytes: int) -> None:
        with self._changed:
            arrival = self._arrivals.pop(number, None)
            if arrival is None or arrival.memory.nbytes != nbytes:
                raise ProtocolError("bytes that were not asked for")
            arrival.moving = True
        try:
            self._link.recv_into(arrival.memory, timeout=self._limits.silence_seconds)
            arrival.over = True
        finally:
            with self._changed:
                arrival.moving = False
                self._changed.notify_all()

    def _placed(self, number: int, at: int) -> None:
        arrival = self._arrivals.pop(number, None)
        if arrival is None:
            raise ProtocolError("a place that was not asked for")
        payload = self._lying(at, arrival.memory.nbytes)
        with self._changed:
            arrival.payload = payload
            arrival.over = True
            self._changed.notify_all()

    def _lying(self, at: int, nbytes: int) -> memoryview:
        if self._carrier is None:
            raise ProtocolError("a place in memory, and none is shared")
        return self._carrier.get(at, nbytes)

    def _gone(self, number: int) -> None:
        with self._changed:
            arrival = self._arrivals.pop(number, None)
            if arrival is not None:
                arrival.over = arrival.gone = True
                self._changed.notify_all()
