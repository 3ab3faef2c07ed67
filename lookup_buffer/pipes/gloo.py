"""`gloo://HOST:PORT`: control as in `tcp`, large payload by Gloo, in host memory.

It owns a process group of its own; torch's default group is neither used nor touched. The two ends
find each other over the control link. So no store has to be run, and no port is used except those
of the pair's connection, which is bound to the addresses of the control link.

`PairLink` calls the communicator on the peer's threads. An exit handler wakes the threads that are
in Gloo when the process ends (see `_All`). This module knows nothing of keys or messages.
"""

import atexit
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from string import digits
from typing import Any, Final
from weakref import WeakSet

import torch.distributed as dist

from lookup_buffer.codec import Value, tensor_over, torch_version
from lookup_buffer.errors import ConfigError, PipeBroken, PipeClosed, PipeError, PipeTimeout
from lookup_buffer.pipes.connect import Joined, meet
from lookup_buffer.pipes.pair import Communicator, Exchange, PairLink, agree
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket

_AT_ONCE: Final = timedelta(milliseconds=1)
_LENGTH_BYTES, _FAMILY_BYTES = 8, 2
_DATA, _OVER, _RECEIVED, _ABORT = range(4)
"""Tags. One byte follows the payload, and one byte acknowledges it: see `GlooCommunicator`."""


_dist: Any = dist  # its type stubs lack most of what is used here
Gloo: Any = getattr(_dist, "ProcessGroupGloo", None)


class _ExchangeStore(_dist.Store):  # type: ignore[misc]
    """The part of a store that Gloo needs, over an exchange."""

    def __init__(self, exchange: Exchange, deadline: float) -> None:
        super().__init__()
        self._exchange = exchange
        self._deadline = deadline
        self._ours: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._ours[key] = bytes(value)
        self._exchange.put(key, bytes(value))

    def get(self, key: str) -> bytes:
        if key in self._ours:
            return self._ours[key]
        theirs = self._exchange.get(key, self._deadline)
        if not any(_are_alike(theirs, ours) for ours in self._ours_like(key)):
            raise PipeBroken("the other end named something that is not where it can be reached")
        return theirs

    def _ours_like(self, key: str) -> list[bytes]:
        """This end's values whose names differ only in the rank at their end."""
        kind = key.rstrip(digits)
        return [value for name, value in self._ours.items() if name.rstrip(digits) == kind]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


def _are_alike(theirs: bytes, ours: bytes) -> bool:
    """Whether a value of the other end has the form of this end's value.

    Gloo trusts the lengths in such a value, and reads past its end if they are wrong. The form is
    `host bytes | host | address bytes | address | numbers`. An older form is the host name alone,
    with an address as long as this end's.
    """
    return _form(theirs) == _form(ours) or ours == socket.gethostname().encode()


def _form(value: bytes) -> tuple[int, bytes, int]:
    """Length of the address, its family, and length of the rest; or the length of the whole
    value."""
    at = _LENGTH_BYTES + _length_at(value, 0)
    nbytes = _length_at(value, at)
    at += _LENGTH_BYTES
    if at + nbytes > len(value):
        return len(value), b"", 0
    return nbytes, value[at : at + _FAMILY_BYTES], len(value) - at - nbytes


def _length_at(value: bytes, at: int) -> int:
    return int.from_bytes(value[at : at + _LENGTH_BYTES], sys.byteorder)


ABORT_SECONDS: Final = 4.0
STAY_SECONDS: Final = 10.0
"""Longer than an interpreter takes to end. It bounds the wait of other code for such a thread."""


@dataclass(eq=False, slots=True)
class _Use:
    """One use of a communicator by a thread that sends or receives."""

    deadline: float
    ended_late: bool = False

    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline


class GlooCommunicator:
    """See `Communicator`. Its directions are independent: Gloo matches by the sender's rank, on one
    full-duplex connection, served by a thread of its own.

    When a connection ends, Gloo fails the operations whose bytes have not begun to move. An
    operation in the middle of its bytes waits until its deadline. So no thread waits for a payload
    itself: the receiver waits for the byte that follows it, the sender for the byte that
    acknowledges it. Gloo keeps the order of one connection, so the payload is complete when those
    bytes arrive.
    """

    def __init__(self, exchange: Exchange, rank: int, host: str, deadline: float) -> None:
        self._other = 1 - rank
        self._answer: Any = None
        """The acknowledgement, kept until it was sent: the sender sends nothing more before
        that."""
        self._changed = threading.Condition()
        self._uses: list[_Use] = []
        """The uses in progress."""
        self._group: Any = None
        # These options are private (underscore), but the only way to bind a group to an address.
        options = Gloo._Options()
        options._timeout = until(deadline)
        options._threads = 1  # threads for collectives, which are not used
        with _all.being_made(exchange, deadline):
            try:
                options._devices = [Gloo.create_device(hostname=host)]
                self._group = Gloo(_ExchangeStore(exchange, deadline), rank, 2, options)
            except RuntimeError as error:
                raise _failure(late=_Use(deadline).is_over()) from error
            _all.made.add(self)

    def send(self, memory: memoryview, timeout: float) -> None:
        self._use(self._send, memory, timeout)

    def recv(self, memory: memoryview, timeout: float) -> None:
        self._use(self._recv, memory, timeout)

    def _send(self, group: Any, memory: memoryview, deadline: float) -> None:
        received = group.recv([_byte()], self._other, _RECEIVED)
        under_way = [
            group.send([_flat(memory)], self._other, _DATA),
            group.send([_byte()], self._other, _OVER),
        ]
        received.wait(until(deadline))
        del under_way  # kept until here: Gloo drops an operation without a reference

    def _recv(self, group: Any, memory: memoryview, deadline: float) -> None:
        payload = group.recv([_flat(memory)], self._other, _DATA)
        group.recv([_byte()], self._other, _OVER).wait(until(deadline))
        payload.wait(until(deadline))
        self._answer = group.send([_byte()], self._other, _RECEIVED)

    def _use(self, move: Callable[..., None], memory: memoryview, timeout: float) -> None:
        try:
            self._move(move, memory, timeout)
        finally:
            _all.stay_at_the_end()

    def _move(self, move: Callable[..., None], memory: memoryview, timeout: float) -> None:
        use = _Use(time.monotonic() + timeout)
        with self._changed:
            if self._group is None:
                raise PipeBroken("this end of the pipe was aborted")
            self._uses.append(use)
        failure = None
        try:
            move(self._group, memory, use.deadline)
        except RuntimeError:
            with self._changed:
                self._tell_who_was_late()
                failure = _failure(late=use.ended_late)
        finally:
            with self._changed:
                self._uses.remove(use)
                self._changed.notify_all()
        if failure is not None:
            raise failure  # raised here, so that its traceback does not keep the group alive

    def _tell_who_was_late(self) -> None:
        """Mark all uses as late if one of them is.

        At the deadline of one use Gloo ends the connection. The other use then fails too, perhaps
        after the first one has returned.
        """
        if any(use.is_over() for use in self._uses):
            for use in self._uses:
                use.ended_late = True

    def abort(self) -> None:
        with self._changed:
            if self._group is None:
                return
            # `ProcessGroupGloo.abort` wakes no waiting thread. An operation that times out does:
            # Gloo then ends the connection, and fails all operations on it.
            try:
                self._group.recv([_byte()], self._other, _ABORT).wait(_AT_ONCE)
            except RuntimeError:
                pass  # the expected timeout
            self._changed.wait_for(lambda: not self._uses, ABORT_SECONDS)
            self._group = self._answer = None


class _All:
    """The communicators of this process, and their end when the interpreter ends.

    A daemon thread that is in torch when the interpreter ends terminates the process. So the exit
    handler wakes such threads, and waits for them, which is bounded.

    Even freeing a tensor counts: torch releases the interpreter's lock for it. So a thread that
    returns from Gloo then stops (`stay_at_the_end`) with all objects that it holds, and wakes no
    thread that holds such objects.
    """

    def __init__(self) -> None:
        self.made: WeakSet[GlooCommunicator] = WeakSet()
        self._changed = threading.Condition()
        self._making: dict[Exchange, float] = {}
        """The deadline of each exchange, a monotonic time."""
        self._ended = False
        atexit.register(self._end)

    @contextmanager
    def being_made(self, exchange: Exchange, deadline: float) -> Iterator[None]:
        with self._changed:
            if self._ended:
                raise PipeClosed("this process ends")
            self._making[exchange] = deadline
        try:
            yield
        finally:
            with self._changed:
                del self._making[exchange]
                self._changed.notify_all()
            self.stay_at_the_end()

    def stay_at_the_end(self) -> None:
        """If the process is ending, keep this daemon thread here until then (at most
        `STAY_SECONDS`)."""
        if self._ended and threading.current_thread().daemon:
            time.sleep(STAY_SECONDS)

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            for exchange in self._making:
                exchange.end()
            longest = max(self._making.values(), default=0.0) + ABORT_SECONDS
            self._changed.wait_for(lambda: not self._making, longest - time.monotonic())
        for communicator in list(self.made):
            communicator.abort()


_all = _All()


def _byte() -> Value:
    return _flat(memoryview(bytearray(1)))


def _flat(memory: memoryview) -> Value:
    return tensor_over(memory, TensorHeader.for_tensor("uint8", (memory.nbytes,)))


def until(deadline: float) -> timedelta:
    """The time until the deadline, rounded up: Gloo counts whole milliseconds, and drops the
    rest."""
    left = math.ceil((deadline - time.monotonic()) * 1000)
    return max(_AT_ONCE, timedelta(milliseconds=left))


def _failure(*, late: bool) -> PipeError:
    if late:
        return PipeTimeout("the other end did not move its bytes in time")
    return PipeBroken("the connection of the communicator ended")


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    joined = joining(dialect(), listen=listen, make_seconds=limits.silence_seconds)
    return meet(uri, listen=listen, timeout=timeout, token=token, limits=limits, joined=joined)


def dialect() -> str:
    """The version of this end, which the other end must have too.

    Raises:
        ConfigError: torch was built without Gloo.
    """
    if Gloo is None:
        raise ConfigError(f"torch {torch_version()} was built without Gloo")
    return f"of torch {torch_version()}"


def joining(spoken: str, *, listen: bool, make_seconds: float) -> Joined:
    """Returns what turns a link to an end of the same dialect (`spoken`) into one with a
    communicator."""

    def joined(link: FramedSocket, deadline: float) -> PairLink:
        agree(link, "gloo", spoken, deadline)

        host = link.local_host  # read now: the link may have ended when it is needed

        def make(exchange: Exchange, until: float) -> Communicator:
            return GlooCommunicator(exchange, 0 if listen else 1, host, until)

        return PairLink(link, make, make_seconds)

    return joined
