"""RedisLink: frames between two ends that both reach one database server, but not each other.

A list for each direction holds the frames. They are numbered, so that a lost one is detected. The
bytes of a large frame are chunks of one mebibyte under keys of their own, in batches:

    <session>:up               LIST    frames to the listening end; `down`: to the other one
    <session>:up:<frame>:<i>   STRING  a chunk of a frame's bytes
    <session>:up:had           LIST    reports: which batches were received, or incomplete

Everything that is written expires. A large frame is written a few batches at a time: the writer
waits until the reader has received them. Its message then counts as received.

The connection that reads a list subscribes to the channel of the same name. When its process ends,
the connection ends, and the other end finds that the channel has no subscriber. Nothing is ever
published there. A process that is only stopped keeps its connection, but is silent.

The remote end's two threads call it. It interprets no frames except "bye" and "batch".
"""

import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from lookup_buffer.errors import PipeBroken, PipeTimeout, ProtocolError
from lookup_buffer.pipes.io import MINIMUM_BYTES_PER_SECOND
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
BATCHES_AHEAD: Final = 4
"""Bound on a frame's batches in the server at a time: 16 MiB."""
TRIES: Final = 3
"""How often a batch is written if the server loses a part of it."""
EXPIRY_SECONDS: Final = 60.0
"""Least expiry of everything that is written; lists are renewed with every beat."""
CHECK_SECONDS: Final = 1.0
"""During a wait, an end checks so often whether the other end is still connected."""
MAX_PAYLOAD_BYTES: Final = 1 << 40

_NUMBER: Final = struct.Struct(">Q")
ABORTED: Final = _NUMBER.pack((1 << 64) - 1)
"""Sent instead of a frame by an end that was aborted."""
_REPORT: Final = struct.Struct(">QQ?")
"""The frame's number, the batch's number, and whether the batch was complete."""

_BYE: Final[list[Any]] = ["bye"]


@dataclass(frozen=True, slots=True)
class Session:
    """The names of the lists of two connected ends."""

    prefix: str

    def list_to(self, listener: bool) -> bytes:
        return f"{self.prefix}:{'up' if listener else 'down'}".encode()


class RedisLink:
    """See `FrameStream`; the errors are those of `FramedSocket`.

    Args:
        reader: the connection subscribed to the channel of the list that this end reads.
        silence_seconds: how long the server may take to reply.
    """

    failure: BaseException | None = None
    """Always None: its two connections fail separately, and each operation raises its own error."""

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
        self._reply_seconds = silence_seconds
        seconds = max(EXPIRY_SECONDS, 2 * silence_seconds)
        self._expiry = b"%d" % int(seconds * 1000)
        self._sending = threading.Lock()
        self._sent = self._received = 0
        self._bye_sent = False
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

    def is_other_end_connected(self, deadline: float) -> bool:
        """Whether the other end is connected to the server."""
        return self._reader.subscribers(self._out, deadline) > 0

    def close(self) -> None:
        # The writer thread has ended by now. If it is stuck, the lists are left to expire.
        if self._sending.acquire(blocking=False):
            unlink = (b"UNLINK", self._in, report_list(self._in))
            # No stream ends at the other end, so it needs this last frame.
            last = [] if self._bye_sent else self._push(encode_frame(_BYE))
            self._writer.send_and_close([*last, unlink])
            self._sending.release()
        self._writer.close()
        self._reader.close()

    def abort(self) -> None:
        # Only if that is possible at once; otherwise the other end detects it by its checks.
        if self._sending.acquire(blocking=False):
            aborted = (b"RPUSH", self._out, ABORTED)
            self._writer.send_and_close([aborted, (b"PEXPIRE", self._out, self._expiry)])
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
            self._bye_sent = self._bye_sent or header == _BYE
            first = [] if before is None else self._push(encode_frame(before))
            if payload is None or nbytes <= INLINE_BYTES:
                self._writer.send([*first, *self._push(frame + (payload or b""))], deadline)
                self._writer.read_replies(deadline)
            else:
                self._writer.send([*first, *self._push(frame)], deadline)
                self._send_large(payload, deadline)

    def _push(self, frame: bytes) -> list[Command]:
        self._sent += 1
        element = numbered(self._sent, frame)
        return [(b"RPUSH", self._out, element), (b"PEXPIRE", self._out, self._expiry)]

    def _send_large(self, payload: memoryview, deadline: float) -> None:
        number = self._sent
        batches = range(batches_of(payload.nbytes))
        waiting = iter(batches)
        in_flight: set[int] = set()
        tries: Counter[int] = Counter()
        while True:
            while len(in_flight) < BATCHES_AHEAD and (batch := next(waiting, None)) is not None:
                self._send_batch(number, batch, payload, deadline)
                in_flight.add(batch)
            if not in_flight:
                return
            batch, complete = self._next_report(number, deadline)
            tries[batch] += 1
            if complete:
                in_flight.discard(batch)
            elif tries[batch] < TRIES:
                self._send_batch(number, batch, payload, deadline)
            else:
                raise PipeBroken(
                    "the database does not keep what is written: check its memory and eviction"
                )

    def _send_batch(self, number: int, batch: int, payload: memoryview, deadline: float) -> None:
        commands: list[Command] = []
        for name, start, end in chunks_of(self._out, number, batch, payload.nbytes):
            commands.append((b"SET", name, payload[start:end], b"PX", self._expiry))
        announced = self._push(encode_frame(["batch", number, batch]))
        self._writer.send([*commands, *announced], deadline)

    def _next_report(self, number: int, deadline: float) -> tuple[int, bool]:
        """The batch of the other end's next report, and whether it was received in full."""
        while True:
            left = max(min(CHECK_SECONDS, deadline - time.monotonic()), 0.001)
            reply_by = time.monotonic() + left + self._reply_seconds
            reply = self._writer.request(
                (b"BLPOP", report_list(self._out), b"%.3f" % left), reply_by
            )
            if reply is not None:
                of, batch, complete = read_report(element_of(reply))
                if of == number:
                    return batch, complete
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
        frame, payload = self._decoded(element)
        if frame.payload_nbytes > INLINE_BYTES:
            self._large_nbytes = frame.payload_nbytes
        elif frame.payload_nbytes:
            self._payload = payload
        if payload.nbytes != (0 if self._large_nbytes else frame.payload_nbytes):
            raise ProtocolError("a frame with fewer or more bytes than its header announces")
        if frame.header == _BYE:  # no end reads or writes any more
            lists = (self._in, report_list(self._in), self._out, report_list(self._out))
            self._reader.request((b"UNLINK", *lists), time.monotonic() + self._reply_seconds)
        return frame

    def recv_into(self, buffer: memoryview, *, timeout: float) -> None:
        """The whole payload of the current frame."""
        large, self._large_nbytes = self._large_nbytes, 0
        payload, self._payload = self._payload, None
        if buffer.nbytes != (large or (payload.nbytes if payload else 0)):
            raise ValueError(f"a buffer of {buffer.nbytes} bytes for a payload of another size")
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
            frame, _ = self._decoded(element)
            match frame:
                case Frame(["batch", int(of), int(batch)], 0) if of == number and batch in missing:
                    pass
                case _:
                    raise ProtocolError("not a batch of the expected bytes")
            chunks = list(chunks_of(self._in, number, batch, buffer.nbytes))
            buffers = [buffer[start:end] for _, start, end in chunks]
            found = all(self._reader.fetch([name for name, *_ in chunks], buffers, deadline))
            if found:
                missing.discard(batch)
            report, reports = batch_report(number, batch, complete=found), report_list(self._in)
            commands = [(b"RPUSH", reports, report), (b"PEXPIRE", reports, self._expiry)]
            self._reader.send(commands, deadline)
        self._reader.read_replies(deadline)

    def _decoded(self, element: bytes) -> tuple[Frame, memoryview]:
        """The frame in this element, and the bytes that come with it.

        Raises:
            PipeBroken: an earlier frame was lost.
            ProtocolError: the element is no frame, or too large.
        """
        number, frame = read_numbered(element)
        if frame.nbytes < PROLOGUE_BYTES:
            raise ProtocolError("not a frame")
        if number != self._received + 1:
            raise PipeBroken(f"the database lost frame {self._received + 1} of the pipe")
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
            left = max(min(CHECK_SECONDS, deadline - time.monotonic()), 0.001)
            reply_by = time.monotonic() + left + self._reply_seconds
            reply = self._reader.request((b"BLPOP", self._in, b"%.3f" % left), reply_by)
            if reply is not None:
                return element_of(reply)
            # Before its first frame the other end may not have subscribed yet.
            if self._received and not self.is_other_end_connected(reply_by):
                last = self._reader.request((b"LPOP", self._in), reply_by)
                if last is None:
                    raise PipeBroken(
                        "the other end of the pipe ended without closing; was it killed?"
                    )
                return element_of([self._in, last])
            if time.monotonic() >= deadline:
                return None


def report_list(frames: bytes) -> bytes:
    """The list of the reports on the batches of `frames`."""
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
        raise ProtocolError("not a frame")
    (number,) = _NUMBER.unpack_from(element)
    return number, memoryview(element)[_NUMBER.size :]


def batch_report(number: int, batch: int, *, complete: bool) -> bytes:
    """An element of that list: a batch of a frame was received, or was incomplete."""
    return _REPORT.pack(number, batch, complete)


def read_report(element: bytes) -> tuple[int, int, bool]:
    """The reverse of `batch_report`: frame, batch, and whether the batch was complete.

    Raises:
        ProtocolError: the element has another length.
    """
    if len(element) != _REPORT.size:
        raise ProtocolError("not a report on a batch")
    number, batch, complete = _REPORT.unpack(element)
    return number, batch, complete


def element_of(reply: Any) -> bytes:
    """The element in a reply of BLPOP.

    Raises:
        ProtocolError: the reply is not one of BLPOP.
    """
    match reply:
        case [_, bytes(element)]:
            return element
    raise ProtocolError("not an element of a list")


def batches_of(nbytes: int) -> int:
    return -(-nbytes // BATCH_BYTES)


def chunks_of(
    frames: bytes, number: int, batch: int, nbytes: int
) -> Iterator[tuple[bytes, int, int]]:
    """Key, start and end (bytes) of each chunk of a batch, for a frame with `nbytes` of payload."""
    for index in range(batch * BATCH_CHUNKS, (batch + 1) * BATCH_CHUNKS):
        start = index * CHUNK_BYTES
        if start < nbytes:
            yield b"%b:%d:%d" % (frames, number, index), start, min(start + CHUNK_BYTES, nbytes)


def _too_slow() -> PipeTimeout:
    return PipeTimeout("the other end did not move its bytes in time")
