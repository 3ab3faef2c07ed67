"""A channel: one blocking connection of a client to its node.

Requests and replies take turns, one caller at a time; the attachment keeps a pool of channels for
many. A channel that missed a deadline is closed: its late reply can never be taken for another's.
"""

import array
import itertools
import select
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lookup_buffer import errors
from lookup_buffer.errors import LookupBufferError, NodeUnavailable, ProtocolError
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.protocol.messages import Stage
from lookup_buffer.request import Request
from lookup_buffer.shm.memory import Staging

READ_BYTES = 256 << 10
DESCRIPTORS_MAX = 4
HEADER_MAX_BYTES = 4 << 20
STAGING_BYTES_MIN = 1 << 20
FULL_SECONDS = 0.05
"""So long, and once, a full socket may hold up who only says something: its session then ends."""
TRANSFER_SECONDS = 5.0
TRANSFER_BYTES_PER_SECOND_MIN = 20e6
"""A transfer that the node announces may take so long on top, and so much for its size."""

_request_ids = itertools.count(1)


def next_request_id() -> int:
    return next(_request_ids)


class Channel:
    """Not thread-safe, but `close` may come from any thread and wakes who waits."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._decoder = FrameDecoder(max_header_bytes=HEADER_MAX_BYTES, max_payload_bytes=0)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self._staging: Staging | None = None
        self.open = True
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise NodeUnavailable(f"no node answers at {path}: {error}") from error

    def call(self, request: Request, timeout: float) -> dict[str, Any]:
        """The reply to `request`.

        Raises:
            NodeUnavailable: no reply within `timeout` seconds, or the node is gone.
            LookupBufferError: the node's answer is an error.
        """
        deadline = time.monotonic() + timeout
        self.send(request, deadline=deadline)
        while True:
            for message in self.receive(deadline):
                if message.get("id") != request.id:
                    continue
                if "fetching" in message:
                    transfer = message["fetching"] / TRANSFER_BYTES_PER_SECOND_MIN
                    deadline = max(deadline, time.monotonic() + TRANSFER_SECONDS + transfer)
                    continue
                if "error" in message:
                    raise _error_of(message)
                return message

    def send(self, request: Request, *, deadline: float, descriptors: Iterable[int] = ()) -> None:
        frame = encode_frame(request.to_wire())
        ancillary = [
            (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            for descriptor in descriptors
        ]
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-6))
            sent = self._socket.sendmsg([frame], ancillary)
            if sent < len(frame):
                self._socket.sendall(frame[sent:])
        except OSError as error:
            raise self._failed(error) from error

    def send_now(self, request: Request) -> None:
        """Send without waiting for an answer. A node whose socket stays full counts as gone."""
        frame = memoryview(encode_frame(request.to_wire()))
        deadline = time.monotonic() + FULL_SECONDS
        while frame:
            try:
                # Not settimeout: another thread receives on this socket.
                frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
            except BlockingIOError as error:
                if not self._ready(select.POLLOUT, max(0.0, deadline - time.monotonic())):
                    raise self._failed(OSError("its socket is full")) from error
            except OSError as error:
                raise self._failed(error) from error

    def readable_within(self, seconds: float) -> bool:
        """Whether `receive` has something to say (be it the end) within so long."""
        return self._ready(select.POLLIN, seconds)

    def has_room(self) -> bool:
        """Whether `send_now` takes some 100 KB without waiting."""
        return self._ready(select.POLLOUT, 0.0)

    def receive(self, deadline: float | None) -> list[dict[str, Any]]:
        """The next messages; at least a wait for bytes that may not complete one."""
        try:
            wait = None if deadline is None else max(deadline - time.monotonic(), 1e-6)
            self._socket.settimeout(wait)
            data = self._socket.recv(READ_BYTES)
        except OSError as error:
            raise self._failed(error) from error
        if not data:
            raise self._failed(OSError("it closed the connection"))
        return self._decode(data)

    def receive_with_descriptors(self, deadline: float) -> tuple[dict[str, Any], list[int]]:
        """The first message and the descriptors beside it; the caller owns them."""
        descriptors: list[int] = []
        while True:
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-6))
                data, found, _, _ = socket.recv_fds(self._socket, READ_BYTES, DESCRIPTORS_MAX)
            except OSError as error:
                raise self._failed(error) from error
            if not data:
                raise self._failed(OSError("it closed the connection"))
            descriptors += found
            for message in self._decode(data):
                if "error" in message:
                    raise _error_of(message)
                return message, descriptors

    def stage(self, nbytes: int, timeout: float) -> Staging:
        """This channel's staging area, grown to hold `nbytes`."""
        if self._staging is None or self._staging.nbytes < nbytes:
            staging = Staging(max(STAGING_BYTES_MIN, 1 << (nbytes - 1).bit_length()))
            request = Stage(next_request_id())
            deadline = time.monotonic() + timeout
            try:
                self.send(request, deadline=deadline, descriptors=[staging.fd])
                while not any(m.get("id") == request.id for m in self.receive(deadline)):
                    pass
            except BaseException:
                staging.close()
                raise
            if self._staging is not None:
                self._staging.close()
            self._staging = staging
        return self._staging

    def close(self) -> None:
        """Idempotent."""
        if not self.open:
            return
        self.open = False
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the node closed first
        self._socket.close()
        if self._staging is not None:
            self._staging.close()

    def _decode(self, data: bytes) -> list[dict[str, Any]]:
        try:
            return [frame.header for frame in self._decoder.feed(data)]
        except ProtocolError:
            self.close()
            raise

    def _ready(self, event: int, seconds: float) -> bool:
        poller = select.poll()
        try:
            poller.register(self._socket, event)
        except ValueError as error:  # closed meanwhile, by another thread or a failed send
            raise self._failed(OSError("the connection is closed")) from error
        return bool(poller.poll(seconds * 1000))

    def _failed(self, error: OSError) -> NodeUnavailable:
        self.close()
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        return NodeUnavailable(f"the node at {self._path} is not available: {reason}")


def _error_of(message: dict[str, Any]) -> LookupBufferError:
    kind = getattr(errors, str(message["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, LookupBufferError)):
        kind = LookupBufferError
    error: LookupBufferError = kind(str(message.get("message", "")))
    return error
