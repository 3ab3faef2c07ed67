"""StreamPipe: one end of a pipe over connected streams.

It owns the remote ends and the inbox, and turns tensors into bytes and back by its `Memory`.
Callers use their own threads; each remote end has two more. The schemes' modules make connections,
over any transport, and pass them to `add_remote_end`.
"""

import threading
import time
from typing import Protocol

from lookup_buffer.codec import (
    Tensor,
    Value,
    check_receivable,
    contiguous_bytes,
    copy_of,
    empty_tensor,
    header_of,
    writable_bytes,
)
from lookup_buffer.errors import (
    Closed,
    CodecError,
    ConfigError,
    LookupBufferError,
    LookupTimeout,
    PipeBroken,
    TensorTooLarge,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.pipes.copies import Copies
from lookup_buffer.pipes.inbox import Inbox, Offer
from lookup_buffer.pipes.outbox import Bytes
from lookup_buffer.pipes.pipe import TIMEOUT_SECONDS, Any, KVPipe, PipeLimits, key_bytes
from lookup_buffer.pipes.remote_end import RemoteEnd
from lookup_buffer.pipes.shared_region import SharedRegion
from lookup_buffer.protocol.stream import FrameStream
from lookup_buffer.shm.memory import bytes_at


class StreamPipe(KVPipe):
    """See `KVPipe`. Its maker adds each connected remote end by `add_remote_end`."""

    def __init__(self, uri: str, limits: PipeLimits, memory: "Memory | None" = None) -> None:
        self.uri = uri
        self._limits = limits
        self._memory = memory or HostMemory()
        self._inbox = Inbox(limits.inbox_most_bytes)
        self._changed = threading.Condition()
        self._remote_ends: list[RemoteEnd] = []
        self._lost: LookupBufferError | None = None
        """The error with which the last remote end ended, if none is left."""
        self._end: LookupBufferError | None = None
        """The error for callers once this end was closed or aborted here."""

    def add_remote_end(self, link: FrameStream, region: SharedRegion | None = None) -> None:
        """Add the remote end of a new connection.

        Raises:
            PipeBroken: the system grants no thread or descriptor for it. The connection is then
                ended, and this end of the pipe is as before.
        """
        on_idle = self._memory.trim
        remote_end = RemoteEnd(link, self._inbox, self._limits, self._remove, region, on_idle)
        with self._changed:
            remote_end.start()
            end = self._end
            if end is None:
                self._remote_ends.append(remote_end)
                self._lost = None
                self._inbox.end(None)
                self._changed.notify_all()
        self._wake_readers()  # with two remote ends no caller can read from one alone
        if isinstance(end, Closed):
            remote_end.close()  # so that the remote end receives the reason
        elif end is not None:
            remote_end.abort(end)

    def send_tensor(
        self, tensor: Value, key: str | TensorKey | None = None, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        deadline = time.monotonic() + timeout
        encoded_key, header = key_bytes(key), header_of(tensor)
        if header.nbytes > self._limits.buffer_bytes:
            most = self._limits.buffer_bytes
            raise TensorTooLarge(
                f"{header.nbytes} bytes; the pipe holds at most {most} (buffer_bytes)"
            )
        self._only_remote_end(deadline).outbox.send(
            encoded_key, header, self._memory.outgoing(tensor), deadline
        )

    def recv_tensor(
        self,
        key: str | TensorKey | Any | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        out: Tensor | None = None,
    ) -> Value:
        deadline = time.monotonic() + timeout
        encoded_key = key if isinstance(key, Any) else key_bytes(key)

        def fits(offer: Offer) -> None:
            if out is not None and offer.header.kind != "none":
                self._memory.check_out(out, offer)

        while True:
            self._check()
            self._read_until(encoded_key, deadline)
            offer = self._inbox.take(encoded_key, deadline, fits)
            if offer.header.kind == "none":
                offer.source.receive(offer, memoryview(b""))
                return None
            try:
                self._limits.check_received(offer.header.nbytes)
                received = self._receive(offer, out)
            except LookupTimeout:
                self._inbox.put_back(offer)
                self._wake_readers()
                raise
            except (CodecError, TensorTooLarge):  # it cannot be received: drop it
                offer.source.discard(offer)
                raise
            if received is not None:
                return received

    def _read_until(self, encoded_key: bytes | Any | None, deadline: float) -> None:
        """Read frames on this thread, if there is one remote end and no other thread reads."""
        remote_ends, is_ready = self._remote_ends, self._inbox.is_ready
        if len(remote_ends) == 1 and not is_ready(encoded_key):
            remote_ends[0].read_until(
                lambda: len(remote_ends) != 1 or is_ready(encoded_key), deadline
            )

    def _wake_readers(self) -> None:
        """Wake the callers that read: a condition has changed that no frame announces."""
        for remote_end in list(self._remote_ends):
            remote_end.wake()

    def _receive(self, offer: Offer, out: Tensor | None) -> Value:
        """The value of this offer; None if its sender gave up before the bytes were requested."""

        def fresh_memory() -> memoryview:
            offer.value = self._memory.allocate(offer, None)
            return self._memory.writable(offer.value)

        if offer.value is None:
            value = self._memory.allocate(offer, out)
            offer.value = None if value is out else value
        else:
            value = offer.value  # an earlier caller requested the bytes
        memory = self._memory.writable(value)
        received = offer.source.receive(offer, memory, fresh_memory if value is out else None)
        return self._memory.result(value, out) if received else None

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return sum(remote_end.outbox.used_bytes for remote_end in self._remote_ends)

    @property
    def is_lost(self) -> bool:
        """Whether the last remote end has ended, so that no call can succeed."""
        return self._lost is not None

    def close(self) -> None:
        ending = Closed("this end of the pipe was closed")
        if not self._end_here(ending):
            return
        deadline = time.monotonic() + self._limits.linger_seconds
        for remote_end in list(self._remote_ends):
            remote_end.outbox.drain(ending, deadline)
        for remote_end in list(self._remote_ends):
            remote_end.close()

    def abort(self) -> None:
        error = PipeBroken("this end of the pipe was aborted")
        self._end_here(error)
        for remote_end in list(self._remote_ends):
            remote_end.abort(error)

    def _end_here(self, error: LookupBufferError) -> bool:
        with self._changed:
            if self._end is not None:
                return False
            self._end = error
            self._changed.notify_all()
        self._inbox.end(error, clear=True)
        self._wake_readers()
        self._memory.close()
        return True

    def _only_remote_end(self, deadline: float) -> RemoteEnd:
        with self._changed:
            while not self._remote_ends:
                self._check()
                if self._lost is not None:
                    raise type(self._lost)(str(self._lost))
                if not self._changed.wait(deadline - time.monotonic()):
                    raise LookupTimeout("no other end connected to the pipe in time")
            self._check()
            if len(self._remote_ends) > 1:
                raise ConfigError(
                    f"{len(self._remote_ends)} ends are connected; this one can only receive"
                )
            return self._remote_ends[0]

    def _remove(self, remote_end: RemoteEnd, why: LookupBufferError) -> None:
        with self._changed:
            if remote_end not in self._remote_ends:
                return  # it was not added
            self._remote_ends.remove(remote_end)
            if self._remote_ends or self._end is not None:
                return
            self._lost = why
            self._inbox.end(why)
            self._changed.notify_all()

    def _check(self) -> None:
        if self._end is not None:
            raise type(self._end)(str(self._end))


class Memory(Protocol):
    """The memory of sent and received bytes."""

    def outgoing(self, value: Value) -> Bytes: ...

    def check_out(self, out: Tensor, offer: Offer) -> None:
        """Raises CodecError: this offer cannot be received into the caller's `out`."""
        ...

    def allocate(self, offer: Offer, out: Tensor | None) -> Tensor:
        """The tensor to receive into: `out` if the bytes can go there directly, else a new one."""
        ...

    def writable(self, value: Tensor) -> memoryview: ...

    def result(self, value: Tensor, out: Tensor | None) -> Value:
        """The value to return once the bytes are in `value`: `out`, if the caller passed one."""
        ...

    def trim(self) -> None:
        """Called after a while without messages: keep little memory for later ones."""
        ...

    def close(self) -> None:
        """Keep no memory for later messages."""
        ...


class HostMemory:
    """See `Memory`."""

    def __init__(self) -> None:
        self._copies = Copies()

    def outgoing(self, value: Value) -> Bytes:
        return HostBytes(value, self._copies)

    def check_out(self, out: Tensor, offer: Offer) -> None:
        check_receivable(out, offer.header, "cpu")

    def allocate(self, offer: Offer, out: Tensor | None) -> Tensor:
        return empty_tensor(offer.header) if out is None else out

    def writable(self, value: Tensor) -> memoryview:
        return writable_bytes(value)

    def result(self, value: Tensor, out: Tensor | None) -> Value:
        return value if out is None or out is value else copy_of(value, out)

    def trim(self) -> None:
        self._copies.trim()

    def close(self) -> None:
        self._copies.close()


class HostBytes:
    """The bytes of a value to send."""

    def __init__(self, value: Value, copies: Copies) -> None:
        self._value = value
        self._copies = copies

    def view(self) -> memoryview:
        if self._value is None:
            return memoryview(b"")
        owner, address, nbytes = contiguous_bytes(self._value)
        return bytes_at(address, nbytes, keep=owner)

    def copy(self) -> memoryview:
        return self._copies.copy(self.view())
