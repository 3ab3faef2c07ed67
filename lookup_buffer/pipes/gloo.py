"""`gloo://HOST:PORT`: control as in `tcp`, large payload by Gloo, in host memory.

It owns a process group of its own; torch's default group is neither used nor touched. The two ends
exchange their addresses over the control link. So no store has to run, and no port is used except
those of the pair's connection, which is bound to the addresses of the control link.

`PairLink` calls the communicator on the remote end's threads. At the end of the process, an exit
handler wakes the threads that are in Gloo (see `_Communicators`).
"""

import atexit
import ctypes
import hmac
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from string import digits
from typing import Any, Final
from weakref import WeakSet

import torch.distributed as dist

from lookup_buffer.codec import Value, tensor_over, torch_version
from lookup_buffer.errors import ConfigError, PipeBroken, PipeClosed, PipeError, PipeTimeout
from lookup_buffer.pipes.connect import Upgrade, open_tcp_end
from lookup_buffer.pipes.pair import ABORT_SECONDS, Communicator, Exchange, PairLink, agree
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket

WAKE_SECONDS: Final = ABORT_SECONDS - 1.0
"""How long an abort waits for the threads in Gloo. An orderly close waits longer than that."""
BLOCK_SECONDS: Final = 10.0
"""Longer than an interpreter takes to end. Bounds how long other code waits for such a thread."""

_SHORTEST: Final = timedelta(milliseconds=1)
_LENGTH_BYTES, _FAMILY_BYTES = 8, 2
_DATA, _END, _RECEIVED, _ABORT, _PROOF = range(5)
"""Tags. One byte follows the payload, and one byte acknowledges it: see `GlooCommunicator`."""
_PROOF_BYTES: Final = 32
_SO_ATTACH_FILTER: Final = 26
"""Linux' number; Python's `socket` has no name for it."""
_RETURN_0: Final = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
_DROP_ALL: Final = struct.pack("@HP", 1, ctypes.addressof(_RETURN_0))
"""A `sock_fprog`: a packet filter of this one instruction."""
_DESCRIPTORS: Final = "/proc/self/fd"


_dist: Any = dist  # its type stubs lack most names that are used here
Gloo: Any = getattr(_dist, "ProcessGroupGloo", None)


@dataclass(eq=False, slots=True)
class _Use:
    """One use of a communicator by a thread that sends or receives."""

    deadline: float
    ended_late: bool = False

    def is_expired(self) -> bool:
        return time.monotonic() >= self.deadline


class GlooCommunicator:
    """See `Communicator`. Its directions are independent: Gloo matches by the sender's rank, on one
    full-duplex connection, served by a thread of its own.

    When a connection ends, Gloo fails the operations whose bytes have not begun to move. An
    operation in the middle of its bytes waits until its deadline. So no thread waits for a payload
    itself. The receiver waits for the byte that follows it, the sender for the byte that
    acknowledges it. Gloo keeps the order of one connection, so the payload is complete when those
    bytes arrive.

    Gloo takes whoever connects to its port first for the other end. So before anything else each
    end sends a random number over both connections, and compares those of the other one. It keeps
    the connections of all who come later; so then its port is closed for them.
    """

    def __init__(self, exchange: Exchange, rank: int, host: str, deadline: float) -> None:
        self._other = 1 - rank
        self._acknowledgement: Any = None
        """The acknowledgement, kept until it is sent: the sender sends nothing more before it."""
        self._changed = threading.Condition()
        self._uses: list[_Use] = []
        """The uses in progress."""
        self._group: Any = None
        # These options are private (underscore), but the only way to bind a group to an address.
        options = Gloo._Options()
        options._timeout = time_until(deadline)
        options._threads = 1  # threads for collectives, which are not used
        with _communicators.making(exchange, deadline):
            try:
                options._devices = [Gloo.create_device(hostname=host)]
                store = _ExchangeStore(exchange, deadline)
                group = Gloo(store, rank, 2, options)
                self._check_other_end(group, exchange, deadline)
                _close_listeners(store.addresses)
            except RuntimeError as error:
                raise _failure(late=_Use(deadline).is_expired()) from error
            self._group = group
            _communicators.made.add(self)

    def _check_other_end(self, group: Any, exchange: Exchange, deadline: float) -> None:
        """Raises PipeBroken: Gloo is connected to somebody else than the control link."""
        ours, theirs = os.urandom(_PROOF_BYTES), bytearray(_PROOF_BYTES)
        exchange.put("proof", ours)
        sending = group.send([_flat(memoryview(bytearray(ours)))], self._other, _PROOF)
        group.recv([_flat(memoryview(theirs))], self._other, _PROOF).wait(time_until(deadline))
        if not hmac.compare_digest(theirs, exchange.get("proof", deadline)):
            raise PipeBroken("somebody else than the other end has connected to Gloo's port")
        sending.wait(time_until(deadline))

    def send(self, memory: memoryview, timeout: float) -> None:
        self._use(self._send, memory, timeout)

    def recv(self, memory: memoryview, timeout: float) -> None:
        self._use(self._recv, memory, timeout)

    def _send(self, group: Any, memory: memoryview, deadline: float) -> None:
        received = group.recv([_byte()], self._other, _RECEIVED)
        in_flight = [
            group.send([_flat(memory)], self._other, _DATA),
            group.send([_byte()], self._other, _END),
        ]
        received.wait(time_until(deadline))
        del in_flight  # kept until here: Gloo drops an operation that has no reference

    def _recv(self, group: Any, memory: memoryview, deadline: float) -> None:
        payload = group.recv([_flat(memory)], self._other, _DATA)
        group.recv([_byte()], self._other, _END).wait(time_until(deadline))
        payload.wait(time_until(deadline))
        self._acknowledgement = group.send([_byte()], self._other, _RECEIVED)

    def _use(self, move: Callable[..., None], memory: memoryview, timeout: float) -> None:
        try:
            self._move(move, memory, timeout)
        finally:
            _communicators.block_at_exit()

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
                self._mark_late()
                failure = _failure(late=use.ended_late)
        finally:
            with self._changed:
                self._uses.remove(use)
                self._changed.notify_all()
        if failure is not None:
            raise failure  # raised here, so that its traceback does not keep the group alive

    def _mark_late(self) -> None:
        """Mark all uses as late if one of them is.

        At the deadline of one use Gloo ends the connection. The other use then fails too, perhaps
        later than the first one has returned.
        """
        if any(use.is_expired() for use in self._uses):
            for use in self._uses:
                use.ended_late = True

    def abort(self) -> None:
        with self._changed:
            if self._group is None:
                return
            # `ProcessGroupGloo.abort` wakes no waiting thread. An operation that times out does:
            # Gloo then ends the connection, and fails all operations on it.
            try:
                self._group.recv([_byte()], self._other, _ABORT).wait(_SHORTEST)
            except RuntimeError:
                pass  # the expected timeout
            self._changed.wait_for(lambda: not self._uses, WAKE_SECONDS)
            self._group = self._acknowledgement = None


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    upgrade = make_upgrade(version(), listen=listen, make_seconds=limits.silence_seconds)
    return open_tcp_end(
        uri, listen=listen, timeout=timeout, token=token, limits=limits, upgrade=upgrade
    )


def version() -> str:
    """The version of this end's torch, and that it proves itself: both must be so at the other end
    too.

    Raises:
        ConfigError: torch was built without Gloo.
    """
    if Gloo is None:
        raise ConfigError(f"torch {torch_version()} was built without Gloo")
    return f"of torch {torch_version()}, with proofs"


def make_upgrade(version: str, *, listen: bool, make_seconds: float) -> Upgrade:
    """The upgrade of a link to an end of the same `version` into one with a communicator."""

    def upgrade(link: FramedSocket, deadline: float) -> PairLink:
        agree(link, "gloo", version, deadline)

        host = link.local_host  # read now: the link may have ended by the time of `make`

        def make(exchange: Exchange, make_deadline: float) -> Communicator:
            return GlooCommunicator(exchange, 0 if listen else 1, host, make_deadline)

        return PairLink(link, make, make_seconds)

    return upgrade


class _Communicators:
    """The communicators of this process; aborts them when the interpreter ends.

    A daemon thread that is in torch when the interpreter ends terminates the process. So the exit
    handler wakes such threads and waits for them, for a bounded time.

    Even freeing a tensor counts: torch releases the interpreter's lock for it. So a thread that
    returns from Gloo then stops (`block_at_exit`) with all objects that it holds, and wakes no
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
    def making(self, exchange: Exchange, deadline: float) -> Iterator[None]:
        with self._changed:
            if self._ended:
                raise PipeClosed("this process is ending")
            self._making[exchange] = deadline
        try:
            yield
        finally:
            with self._changed:
                del self._making[exchange]
                self._changed.notify_all()
            self.block_at_exit()

    def block_at_exit(self) -> None:
        """If the process is ending, block this daemon thread until then (at most
        `BLOCK_SECONDS`)."""
        if self._ended and threading.current_thread().daemon:
            time.sleep(BLOCK_SECONDS)

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            for exchange in self._making:
                exchange.end()
            longest = max(self._making.values(), default=0.0) + WAKE_SECONDS
            self._changed.wait_for(lambda: not self._making, longest - time.monotonic())
        for communicator in list(self.made):
            communicator.abort()


_communicators = _Communicators()


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
        if not any(_have_same_form(theirs, ours) for ours in self._ours_like(key)):
            raise PipeBroken("the other end sent something else than its address for Gloo")
        return theirs

    def _ours_like(self, key: str) -> list[bytes]:
        """This end's values whose names differ from `key` only in the rank, their last digits."""
        kind = key.rstrip(digits)
        return [value for name, value in self._ours.items() if name.rstrip(digits) == kind]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    @property
    def addresses(self) -> list[bytes]:
        """At which Gloo listens here: of a socket, as the kernel has it."""
        return [_address_in(value) for value in self._ours.values()]


def _have_same_form(theirs: bytes, ours: bytes) -> bool:
    """Whether a value of the other end has the form of this end's value.

    Gloo trusts the lengths in such a value, and reads past its end if they are wrong. The form is
    `host bytes | host | address bytes | address | numbers`. An older form is the host name alone,
    with an address as long as this end's.
    """
    return _form(theirs) == _form(ours) or ours == socket.gethostname().encode()


def _form(value: bytes) -> tuple[int, bytes, int]:
    """Length of the address, its family, and length of the rest; or the length of the whole
    value."""
    start, stop = _address_bounds(value)
    if stop > len(value):
        return len(value), b"", 0
    return stop - start, value[start : start + _FAMILY_BYTES], len(value) - stop


def _address_in(value: bytes) -> bytes:
    start, stop = _address_bounds(value)
    return value[start:stop]


def _address_bounds(value: bytes) -> tuple[int, int]:
    """Where the address begins and ends, which may be past the end of the value."""
    at = _LENGTH_BYTES + _length_at(value, 0)
    start = at + _LENGTH_BYTES
    return start, start + _length_at(value, at)


def _close_listeners(addresses: Sequence[bytes]) -> None:
    """Have the kernel drop what comes to these listening sockets, which only Gloo could close.

    Other descriptors are not touched: to close the copy of one for a file would release the locks
    (`fcntl`) that this process has on that file.
    """
    names: list[str] = []
    with suppress(FileNotFoundError):  # /proc is not mounted
        names = os.listdir(_DESCRIPTORS)
    for name in names:
        with suppress(OSError):
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                _close_listener(int(name), addresses)


def _close_listener(descriptor: int, addresses: Sequence[bytes]) -> None:
    """Raises OSError: it was closed meanwhile."""
    with _socket_at(descriptor) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            return
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and any(_is_at(found, address) for address in addresses):
            found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _DROP_ALL)


def _is_at(listener: socket.socket, address: bytes) -> bool:
    """Not the port alone: at another address of this host it may be one of the program's own."""
    host, port = listener.getsockname()[:2]
    packed = ip_address(host.partition("%")[0]).packed
    at = 4 if listener.family == socket.AF_INET else 8
    return address[2:4] == port.to_bytes(2, "big") and address[at : at + len(packed)] == packed


def _socket_at(descriptor: int) -> socket.socket:
    """Raises OSError: it is no socket, or was closed meanwhile."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _length_at(value: bytes, at: int) -> int:
    return int.from_bytes(value[at : at + _LENGTH_BYTES], sys.byteorder)


def _byte() -> Value:
    return _flat(memoryview(bytearray(1)))


def _flat(memory: memoryview) -> Value:
    return tensor_over(memory, TensorHeader.for_tensor("uint8", (memory.nbytes,)))


def time_until(deadline: float) -> timedelta:
    """The time until the deadline, rounded up: Gloo counts whole milliseconds, and drops the
    rest."""
    left = math.ceil((deadline - time.monotonic()) * 1000)
    return max(_SHORTEST, timedelta(milliseconds=left))


def _failure(*, late: bool) -> PipeError:
    if late:
        return PipeTimeout("the other end did not move its bytes in time")
    return PipeBroken("the Gloo connection to the other end broke")
