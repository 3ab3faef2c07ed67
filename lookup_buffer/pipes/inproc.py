"""`inproc://NAME`: a pipe between threads of a process; also the reference for the other pipes.

It owns two ends and one queue structure (`_Direction`) for each direction, all under one lock. It
has no thread of its own: each call runs on the caller's thread.
"""

import itertools
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

from lookup_buffer.codec import Tensor, Value, check_receivable, copy_of, header_of
from lookup_buffer.errors import (
    BufferFull,
    Closed,
    ConfigError,
    LookupBufferError,
    LookupTimeout,
    PipeBroken,
    PipeClosed,
    PipeTimeout,
    TensorTooLarge,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.pipes.pipe import TIMEOUT_SECONDS, Any, KVPipe, PipeLimits, key_bytes


@dataclass(slots=True, eq=False)
class _Message:
    value: Value
    cost: int
    number: int = field(default_factory=itertools.count().__next__)
    """Numbers increase in the order of sending."""
    copied: bool = False
    """Whether `value` is the pipe's own copy; if not, it is the waiting sender's tensor."""
    received: bool = False


@dataclass(slots=True)
class _Direction:
    """The messages of one direction."""

    queues: defaultdict[bytes | None, deque[_Message]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    used: int = 0
    end: LookupBufferError | None = None
    """The error for receivers once it is empty: the sending end has ended."""

    def queue_of(self, encoded_key: bytes | Any | None) -> "deque[_Message] | None":
        """The queue whose first message is the next one for that key; None if there is none."""
        for name in [name for name, queue in self.queues.items() if not queue]:
            del self.queues[name]
        if not isinstance(encoded_key, Any):
            return self.queues.get(encoded_key)
        keyed = [queue for name, queue in self.queues.items() if name is not None]
        return min(keyed, key=lambda queue: queue[0].number, default=None)

    def clear(self) -> None:
        self.queues.clear()
        self.used = 0


class InprocPipe(KVPipe):
    """See `KVPipe`. `silence_seconds` and `linger_seconds` have no effect here."""

    def __init__(
        self,
        uri: str,
        limits: PipeLimits,
        changed: threading.Condition,
        directions: list[_Direction],
    ) -> None:
        self.uri = uri
        self._limits = limits
        self._changed = changed
        self._out, self._in = directions
        self._end: LookupBufferError | None = None
        """The error for callers of this end, once it was ended here."""

    def send_tensor(
        self, tensor: Value, key: str | TensorKey | None = None, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        deadline = time.monotonic() + timeout
        encoded_key, nbytes = key_bytes(key), header_of(tensor).nbytes
        cost, most = self._limits.cost(nbytes), self._limits.buffer_bytes
        if cost > most:
            raise TensorTooLarge(f"{nbytes} bytes; the pipe holds at most {most} (buffer_bytes)")
        message = _Message(tensor, cost)
        with self._changed:
            self._check(self._in.end)
            self._out.queues[encoded_key].append(message)
            self._changed.notify_all()
            try:
                while not message.received and self._out.used + cost > most:
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise BufferFull(f"no room for {nbytes} bytes in the pipe in time")
                    self._check(self._in.end)
            except LookupBufferError:
                if not message.received:
                    self._withdraw(encoded_key, message)
                    raise
            if not message.received:
                self._out.used += cost
                message.value, message.copied = copy_of(tensor), True

    def recv_tensor(
        self,
        key: str | TensorKey | Any | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        out: Tensor | None = None,
    ) -> Value:
        deadline = time.monotonic() + timeout
        encoded_key = key if isinstance(key, Any) else key_bytes(key)
        with self._changed:
            self._check(None)
            while (queue := self._in.queue_of(encoded_key)) is None:
                self._check(self._in.end)
                if not self._changed.wait(deadline - time.monotonic()):
                    self._check(None)
                    raise LookupTimeout(f"no message arrived within {timeout:g} s")
                self._check(None)
            value = queue[0].value
            if out is not None and value is not None:
                check_receivable(out, header_of(value), "cpu")
            message = queue.popleft()
            message.received = True
            self._in.used -= message.cost if message.copied else 0
            self._changed.notify_all()
            self._limits.check_received(0 if value is None else header_of(value).nbytes)
            if not message.copied:  # the sender's tensor: it waits for this lock
                return copy_of(value, out)
        return value if out is None else copy_of(value, out)

    @property
    def used_bytes(self) -> int:
        return self._out.used

    def close(self) -> None:
        self._end_here(Closed("this end was closed"), PipeClosed("the other end was closed"))

    def abort(self) -> None:
        broken = PipeBroken("the other end was aborted")
        self._end_here(PipeBroken("this end was aborted"), broken)

    def _end_here(self, here: LookupBufferError, there: LookupBufferError) -> None:
        with self._changed:
            if self._end is not None:
                return
            self._end, self._out.end = here, there
            if _listening.get(self.uri) is self:
                del _listening[self.uri]
            self._in.clear()
            if isinstance(there, PipeBroken):
                self._out.clear()
            self._changed.notify_all()

    def other_end(self, limits: PipeLimits) -> "InprocPipe":
        return InprocPipe(self.uri, limits, self._changed, [self._in, self._out])

    def _check(self, other: LookupBufferError | None) -> None:
        """Raises the error of this end, or else `other`, if there is one."""
        error = self._end or other
        if error is not None:
            raise type(error)(str(error))

    def _withdraw(self, encoded_key: bytes | None, message: _Message) -> None:
        queue = self._out.queues.get(encoded_key)
        if queue and message in queue:
            queue.remove(message)


_listening: dict[str, InprocPipe] = {}
_appeared = threading.Condition()


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`. A name is free again once its second end has connected."""
    if token is not None:
        raise ConfigError("an inproc pipe takes no token: leave it out")
    with _appeared:
        if listen:
            if uri in _listening:
                raise ConfigError(f"another end already listens at {uri}")
            directions = [_Direction(), _Direction()]
            pipe = _listening[uri] = InprocPipe(uri, limits, threading.Condition(), directions)
            _appeared.notify_all()
            return pipe
        if not _appeared.wait_for(lambda: uri in _listening, timeout):
            raise PipeTimeout(f"no end listens at {uri}")
        return _listening.pop(uri).other_end(limits)
