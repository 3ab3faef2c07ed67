"""`gloo://HOST:PORT`: control as in `tcp`, large payload by Gloo, in host memory.

The process group is our own: torch's default group is neither used nor touched. The two ends find
each other over the control link, so there is no store that somebody would have to run, and no port
but those of the pair's connection, which is bound to the addresses of the control link.
"""

import atexit
import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final
from weakref import WeakSet

import torch.distributed as dist

from lookup_buffer.codec import Value, tensor_over, torch_version
from lookup_buffer.errors import ConfigError, PipeBroken, PipeError, PipeTimeout
from lookup_buffer.header import TensorHeader
from lookup_buffer.link import Link
from lookup_buffer.pipes.communicator import Communicator, Exchange
from lookup_buffer.pipes.meeting import Joined, meet
from lookup_buffer.pipes.pair import PairLink, agree
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits

_AT_ONCE: Final = timedelta(milliseconds=1)
_DATA, _OVER, _RECEIVED, _ABORT = range(4)
"""Tags. One byte follows the payload, and one answers it: see `GlooCommunicator`."""


_dist: Any = dist  # its types leave out most of what is used here
Gloo: Any = getattr(_dist, "ProcessGroupGloo", None)


class _ExchangeStore(_dist.Store):  # type: ignore[misc]
    """What Gloo wants of a store, over an exchange."""

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
        return self._exchange.get(key, self._deadline)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


ABORT_SECONDS: Final = 4.0


class GlooCommunicator:
    """See `Communicator`. Its directions are apart: Gloo matches by the sender's rank, on one
    full-duplex connection that a thread of its own serves.

    When a connection ends Gloo tells those operations that have not begun to move, and leaves the
    one in the middle of its bytes to its deadline. So nobody waits for a payload itself: who
    receives waits for the byte that follows it, who sends for the byte that answers. Gloo keeps
    the order of one connection, so the payload is complete when they come.
    """

    def __init__(self, exchange: Exchange, rank: int, host: str, deadline: float) -> None:
        self._other = 1 - rank
        self._answer: Any = None
        """Kept until it has gone out: the sender says nothing more before."""
        self._changed = threading.Condition()
        self._deadlines: list[float] = []
        """Of those who use it now."""
        self._group: Any = None
        # The options have an underscore, and are the only way to bind a group to an address.
        options = Gloo._Options()
        options._timeout = until(deadline)
        options._threads = 1  # of collectives, which are not used
        try:
            options._devices = [Gloo.create_device(hostname=host)]
            self._group = Gloo(_ExchangeStore(exchange, deadline), rank, 2, options)
        except RuntimeError as error:
            raise _failure([deadline]) from error
        _alive.add(self)

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
        del under_way  # kept until here: Gloo drops what nobody keeps

    def _recv(self, group: Any, memory: memoryview, deadline: float) -> None:
        payload = group.recv([_flat(memory)], self._other, _DATA)
        group.recv([_byte()], self._other, _OVER).wait(until(deadline))
        payload.wait(until(deadline))
        self._answer = group.send([_byte()], self._other, _RECEIVED)

    def _use(self, move: Callable[..., None], memory: memoryview, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._changed:
            if self._group is None:
                raise PipeBroken("this end of the pipe was aborted")
            self._deadlines.append(deadline)
        failure = None
        try:
            move(self._group, memory, deadline)
        except RuntimeError:
            # When the time of one passes Gloo ends the connection, and the other one hears of that.
            with self._changed:
                failure = _failure(self._deadlines)
        finally:
            with self._changed:
                self._deadlines.remove(deadline)
                self._changed.notify_all()
        if failure is not None:
            raise failure  # here, so that it keeps no frame, and so no group

    def abort(self) -> None:
        with self._changed:
            if self._group is None:
                return
            # `ProcessGroupGloo.abort` wakes nobody. An operation whose time passes does: Gloo then
            # ends the connection, and tells all who wait on it.
            try:
                self._group.recv([_byte()], self._other, _ABORT).wait(_AT_ONCE)
            except RuntimeError:
                pass  # as it is to be
            self._changed.wait_for(lambda: not self._deadlines, ABORT_SECONDS)
            self._group = self._answer = None


_alive: "WeakSet[GlooCommunicator]" = WeakSet()


@atexit.register
def _abort_all() -> None:
    """A thread that is in torch when the interpreter ends would terminate the process."""
    for communicator in list(_alive):
        communicator.abort()


def _byte() -> Value:
    return _flat(memoryview(bytearray(1)))


def _flat(memory: memoryview) -> Value:
    return tensor_over(memory, TensorHeader.for_tensor("uint8", (memory.nbytes,)))


def until(deadline: float) -> timedelta:
    """Up to that time, and never less: Gloo counts whole milliseconds, and drops the rest."""
    left = math.ceil((deadline - time.monotonic()) * 1000)
    return max(_AT_ONCE, timedelta(milliseconds=left))


def _failure(deadlines: Iterable[float]) -> PipeError:
    if any(time.monotonic() >= deadline for deadline in deadlines):
        return PipeTimeout("the other end did not move its bytes in time")
    return PipeBroken("the connection of the communicator ended")


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    joined = joining(dialect(), listen=listen, make_seconds=limits.silence_seconds)
    return meet(uri, listen=listen, timeout=timeout, token=token, limits=limits, joined=joined)


def dialect() -> str:
    """What the other end has to have as well.

    Raises:
        ConfigError: there is no Gloo here.
    """
    if Gloo is None:
        raise ConfigError(f"torch {torch_version()} was built without Gloo")
    return f"of torch {torch_version()}"


def joining(spoken: str, *, listen: bool, make_seconds: float) -> Joined:
    """Of a link to another end of the dialect `spoken`: that with a communicator beside it."""

    def joined(link: Link, deadline: float) -> PairLink:
        agree(link, "gloo", spoken, deadline)

        host = link.local_host  # now: the link may have ended when it is wanted

        def make(exchange: Exchange, until: float) -> Communicator:
            return GlooCommunicator(exchange, 0 if listen else 1, host, until)

        return PairLink(link, make, make_seconds)

    return joined
