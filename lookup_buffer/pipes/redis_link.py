"""RedisLink: frames between two ends that both reach one database server, but not each other.

A list for each direction holds the frames. They are numbered, so that a lost one is detected. The
bytes of a large frame lie in chunks of one mebibyte under keys of their own, in batches:

    <session>:up               LIST    frames to the listening end; `down`: to the other one
    <session>:up:<frame>:<i>   STRING  a chunk of a frame's bytes
    <session>:up:had           LIST    which batches of them were taken, or missing

Everything that is written expires. A large frame is written a few batches at a time: the writer
waits until the reader has taken them. Its message then counts as received.

The connection that reads a list subscribes to the channel of the same name. When its process ends,
the connection ends, and the other end sees that the channel has no subscriber. Nothing is ever
published there. A process that is only stopped keeps its connection, but is silent.

The peer's two threads call it. It knows nothing of the frames' meaning, except "bye" and "batch".
"""

import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from lookup_buffer.errors import PipeBroken, PipeTimeout, ProtocolError
from lookup_buffer.pipes.outbox import INLINE_BYTES
from lookup_buffer.pipes.resp import Command, Resp3Connection
from lookup_buffer.protocol.framing import (
    MAX_HEADER_BYTES,
    PROLOGUE_BYTES,
    Frame,
    Header,
    decode_header,
    decode_prologue,
    encode_frame,
)

CHUNK_BYTES: Final = 1 << 20
BATCH_CHUNKS: Final = 4
BATCH_BYTES: Final = BATCH_CHUNKS * CHUNK_BYTES

_NUMBER: Final = struct.Struct(">Q")
ABORTED: Final = _NUMBER.pack((1 << 64) - 1)
"""Sent instead of a frame by an end that was aborted."""
_HAD: Final = struct.Struct(">QQ?")
"""The frame's number, the batch's number, and whether the batch was complete."""


@dataclass(frozen=True, slots=True)
class Session:
    """The names of the lists of two connected ends."""

    prefix: str

    def list_to(self, listener: bool) -> bytes:
        return f"{self.prefix}:{'up' if listener else 'down'}".encode()


def had_list(frames: bytes) -> bytes:
    """The list of the batches of `frames` that were taken or missing."""
    return frames + b":had"


def numbered(number: int, frame: bytes) -> bytes:
    """A frame as an element of its list."""
    return _NUMBER.pack(number) + frame


def read_numbered(element: bytes) -> tuple[int, memoryview]:
    """The reverse of `numbered`.

    Raises:
        PipeBroken: the other end was aborted.
        ProtocolError: it has no number.
    """
    if element == ABORTED:
        raise PipeBroken("the other end was aborted")
    if len(element) < _NUMBER.size:
        raise ProtocolError("no frame")
    (number,) = _NUMBER.unpack_from(element)
    return number, memoryview(element)[_NUMBER.size :]


def had(number: int, batch: int, *, all_of_it: bool) -> bytes:
    """An element that says that a batch of a frame was taken, or was incomplete."""
    return _HAD.pack(number, batch, all_of_it)


def read_had(element: bytes) -> tuple[int, int, bool]:
    """The reverse of `had`: frame, batch, and whether the batch was complete.

    Raises:
        ProtocolError: the element has another length.
    """
    if len(element) != _HAD.size:
        raise ProtocolError("no word of a batch")
    number, batch, all_of_it = _HAD.unpack(element)
    return number, batch, all_of_it


def element_of(reply: Any) -> bytes:
    """The element in a reply of BLPOP.

    Raises:
        ProtocolError: the reply is not one of BLPOP.
    """
    match reply:
        case [_, bytes(element)]:
            return element
    raise ProtocolError("no element of a list")


def batches_of(nbytes: int) -> int:
    return -(-nbytes // BATCH_BYTES)


def chunks_of(
    frames: bytes, number: int, batch: int, nbytes: int
) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end (bytes) of each chunk of a batch, for a frame with so many bytes."""
    for index in range(batch * BATCH_CHUNKS, (batch + 1) * BATCH_CHUNKS):
        start = index * CHUNK_BYTES
        if start < nbytes:
            yield b"%b:%d:%d" % (frames, number, index), start, min(start + CHUNK_BYTES, nbytes)


BATCHES_AHEAD: Final = 4
"""Bound on the batches of a frame in the server at a time: 16 MiB."""
TRIES: Final = 3
"""How often a batch is written if the server loses a part of it."""
EXPIRY_SECONDS: Final = 60.0
"""Least expiry of everything that is written; lists are renewed with every beat."""
LOOK_SECONDS: Final = 1.0
"""After so long a wait, an end checks whether the other end is still connected."""
MINIMUM_BYTES_PER_SECOND: Final = 16e6
MAX_PAYLOAD_BYTES: Final = 1 << 40

_BYE: Final[list[Any]] = ["bye"]


class RedisLink:
    """See `FrameStream`; the errors are those of `FramedSocket`.

    Args:
        reader: subscribed to the channel of the list that this end reads; see the module.
        silence_seconds: how long the server may take to reply.
    """

    failure: BaseException | None = None
    """Always None: its two connections fail separately, and each operation raises its own
    reason."""

    def __init__(
        self,
        session: Session,
        reader: Resp3Connection,
        writer: Resp3Connection,
        *,
        listens: bool,
        silence_seconds: float,
    ) -> None:
        self._in, self._out = session.list_to(listens), session.list_to(not listens)
        self._reader, self._writer = reader, writer
        self._patience = silence_seconds
        seconds = max(EXPIRY_SECONDS, 2 * silence_seconds)
        self._expiry = b"%d" % int(seconds * 1000)
        self._sending = threading.Lock()
        self._sent = self._received = 0
        self._said_bye = False
        self._element: bytes | None = None
        """A frame that was read and not processed yet."""
        self._payload: memoryview | None = None
        self._large_nbytes = 0
        self._most_header_bytes, self._most_payload_bytes = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES

    def limit(
        self, header_bytes: int = MAX_HEADER_BYTES, payload_bytes: int = MAX_PAYLOAD_BYTES
    ) -> None:
        """Set the size limits of frames from the other end, from the next frame on."""
        self._most_header_bytes, self._most_payload_bytes = header_bytes, payload_bytes

    def is_awaited(self, deadline: float) -> bool:
        """Whether the other end is connected to the server."""
        return self._reader.listeners(self._out, deadline) > 0

    def close(self) -> None:
        # The writing thread has ended by now. If it is stuck, the lists are left to expire.
        if self._sending.acquire(blocking=False):
            unlink = (b"UNLINK", self._in, had_list(self._in))
            # The other end sees no end of a stream, so it needs this last frame.
            last = [] if self._said_bye else self._push(encode_frame(_BYE))
            self._writer.part([*last, unlink])
            self._sending.release()
        self._writer.close()
        self._reader.close()

    def abort(self) -> None:
        # Only if that is possible at once; otherwise the other end detects it by its checks.
        if self._sending.acquire(blocking=False):
            word = (b"RPUSH", self._out, ABORTED)
            self._writer.part([word, (b"PEXPIRE", self._out, self._expiry)])
            self._sending.release()
        self._writer.close(reset=True)
        self._reader.close(reset=True)

    # -- sending

    def send(
        self,
        header: Header,
        payload: memoryview | None = None,
        *,
        timeout: float,
        before: Header | None = None,
        already_sent: int = 0,
    ) -> None:
        """Send a frame. With a large payload: returns once the other end has received it."""
        nbytes = 0 if payload is None else payload.nbytes
        deadline = time.monotonic() + timeout + nbytes / MINIMUM_BYTES_PER_SECOND
        frame = encode_frame(header, nbytes)
        with self._sending:
            self._said_bye = self._said_bye or header == _BYE
            first = [] if before is None else self._push(encode_frame(before))
            if payload is None or nbytes <= INLINE_BYTES:
                self._writer.say([*first, *self._push(frame + (payload or b""))], deadline)
                self._writer.settle(deadline)
            else:
                self._writer.say([*first, *self._push(frame)], deadline)
                self._send_large(payload, deadline)

    def _push(self, frame: bytes) -> list[Command]:
        self._sent += 1
        element = numbered(self._sent, frame)
        return [(b"RPUSH", self._out, element), (b"PEXPIRE", self._out, self._expiry)]

    def _send_large(self, payload: memoryview, deadline: float) -> None:
        number = self._sent
        batches = range(batches_of(payload.nbytes))
        waiting = iter(batches)
        under_way: set[int] = set()
        tries: Counter[int] = Counter()
        while True:
            while len(under_way) < BATCHES_AHEAD and (batch := next(waiting, None)) is not None:
                self._send_batch(number, batch, payload, deadline)
                under_way.add(batch)
            if not under_way:
                return
            batch, all_of_it = self._next_had(number, deadline)
            tries[batch] += 1
            if all_of_it:
                under_way.discard(batch)
            elif tries[batch] < TRIES:
                self._send_batch(number, batch, payload, deadline)
            else:
                raise PipeBroken("the database does not keep what is written to it")

    def _send_batch(self, number: int, batch: int, payload: memoryview, deadline: float) -> None:
        commands: list[Command] = []
        for name, start, end in chunks_of(self._out, number, batch, payload.nbytes):
            commands.append((b"SET", name, payload[start:end], b"PX", self._expiry))
        announced = self._push(encode_frame(["batch", number, batch]))
        self._writer.say([*commands, *announced], deadline)

    def _next_had(self, number: int, deadline: float) -> tuple[int, bool]:
        """The next batch that the other end has taken or found incomplete, and whether it was
        complete."""
        while True:
            left = max(min(LOOK_SECONDS, deadline - time.monotonic()), 0.001)
            reply_by = time.monotonic() + left + self._patience
            reply = self._writer.ask((b"BLPOP", had_list(self._out), b"%.3f" % left), reply_by)
            if reply is not None:
                of, batch, all_of_it = read_had(element_of(reply))
                if of == number:
                    return batch, all_of_it
            elif time.monotonic() >= deadline:
                raise _too_slow()

    def send_nowait(
        self, header: Header, payload: memoryview | None = None, before: Header | None = None
    ) -> int:
        """Always 0: each frame is a request to the server that waits for its reply."""
        return 0

    # -- receiving

    def wait_readable(self, timeout: float) -> bool:
        if self._element is None:
            self._element = self._next_element(time.monotonic() + timeout)
        return self._element is not None

    def recv_header(self, timeout: float) -> Frame:
        if self._payload is not None or self._large_nbytes:
            raise RuntimeError("the payload of the previous frame was not received")
        if not self.wait_readable(timeout):
            raise _too_slow()
        element, self._element = self._element or b"", None
        frame, payload = self._opened(element)
        if frame.payload_nbytes > INLINE_BYTES:
            self._large_nbytes = frame.payload_nbytes
        elif frame.payload_nbytes:
            self._payload = payload
        if payload.nbytes != (0 if self._large_nbytes else frame.payload_nbytes):
            raise ProtocolError("a frame with other bytes than it says")
        if frame.header == _BYE:  # no end reads or writes any more
            lists = (self._in, had_list(self._in), self._out, had_list(self._out))
            self._reader.ask((b"UNLINK", *lists), time.monotonic() + self._patience)
        return frame

    def recv_into(self, buffer: memoryview, *, timeout: float) -> None:
        """The whole payload of the current frame."""
        large, self._large_nbytes = self._large_nbytes, 0
        payload, self._payload = self._payload, None
        if buffer.nbytes != (large or (payload.nbytes if payload else 0)):
            raise ValueError(f"{buffer.nbytes} bytes wanted of another number")
        if payload is not None:
            buffer[:] = payload
        elif large:
            deadline = time.monotonic() + timeout + large / MINIMUM_BYTES_PER_SECOND
            self._receive_large(self._received, buffer, deadline)

    def _receive_large(self, number: int, buffer: memoryview, deadline: float) -> None:
        missing = set(range(batches_of(buffer.nbytes)))
        while missing:
            element = self._next_element(deadline)
            if element is None:
                raise _too_slow()
            frame, _ = self._opened(element)
            match frame:
                case Frame(["batch", int(of), int(batch)], 0) if of == number and batch in missing:
                    pass
                case _:
                    raise ProtocolError("no batch of the bytes that are to come")
            chunks = list(chunks_of(self._in, number, batch, buffer.nbytes))
            places = [buffer[start:end] for _, start, end in chunks]
            found = all(self._reader.fetch([name for name, *_ in chunks], places, deadline))
            if found:
                missing.discard(batch)
            said, names = had(number, batch, all_of_it=found), had_list(self._in)
            answer = [(b"RPUSH", names, said), (b"PEXPIRE", names, self._expiry)]
            self._reader.say(answer, deadline)
        self._reader.settle(deadline)

    def _opened(self, element: bytes) -> tuple[Frame, memoryview]:
        """The frame in this element, and the bytes that come with it.

        Raises:
            PipeBroken: a frame before it was lost.
            ProtocolError: it is no frame, or too large.
        """
        number, frame = read_numbered(element)
        if frame.nbytes < PROLOGUE_BYTES:
            raise ProtocolError("no frame")
        if number != self._received + 1:
            raise PipeBroken(f"the database lost what came before frame {number}")
        header_nbytes, payload_nbytes = decode_prologue(
            frame[:PROLOGUE_BYTES],
            max_header_bytes=self._most_header_bytes,
            max_payload_bytes=self._most_payload_bytes,
        )
        end = PROLOGUE_BYTES + header_nbytes
        header = decode_header(frame[PROLOGUE_BYTES:end])
        self._received = number
        return Frame(header, payload_nbytes), frame[end:]

    def _next_element(self, deadline: float) -> bytes | None:
        """The next element of this end's list; None if there is none by the deadline.

        Raises:
            PipeBroken: the other end is not connected any more, and left no element.
        """
        while True:
            left = max(min(LOOK_SECONDS, deadline - time.monotonic()), 0.001)
            reply_by = time.monotonic() + left + self._patience
            reply = self._reader.ask((b"BLPOP", self._in, b"%.3f" % left), reply_by)
            if reply is not None:
                return element_of(reply)
            # Before its first frame the other end may not have subscribed yet.
            if self._received and not self.is_awaited(reply_by):
                last = self._reader.ask((b"LPOP", self._in), reply_by)
                if last is None:
                    raise PipeBroken("the other end of the pipe ended without a word")
                return element_of([self._in, last])
            if time.monotonic() >= deadline:
                return None


def _too_slow() -> PipeTimeout:
    return PipeTimeout("the other end did not move its bytes in time")
