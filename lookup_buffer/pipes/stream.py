"""StreamPipe: one end of a pipe over connected streams.

It owns the peers and the inbox, and turns tensors into bytes and back by its `Memory`. Callers send
and receive on their own threads; each peer has two threads. The schemes' modules make connections
and pass them to `meet`. This module does not know how an end was connected or what carries its
bytes.
"""

import threading
import time
from typing import Protocol

from lookup_buffer.codec import (
    Tensor,
    Value,
    check_place,
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
from lookup_buffer.pipes.carrier import Carrier
from lookup_buffer.pipes.copies import Copies
from lookup_buffer.pipes.inbox import Inbox, Offer
from lookup_buffer.pipes.outbox import Bytes
from lookup_buffer.pipes.peer import Peer
from lookup_buffer.pipes.pipe import TIMEOUT_SECONDS, Any, KVPipe, PipeLimits, key_bytes
from lookup_buffer.protocol.stream import FrameStream
from lookup_buffer.shm.memory import bytes_at


class StreamPipe(KVPipe):
    """See `KVPipe`. Its maker adds each connected peer by `meet`."""

    def __init__(self, uri: str, limits: PipeLimits, memory: "Memory | None" = None) -> None:
        self.uri = uri
        self._limits = limits
        self._memory = memory or HostMemory()
        self._inbox = Inbox(limits.inbox_most_bytes)
        self._changed = threading.Condition()
        self._peers: list[Peer] = []
        self._lost: LookupBufferError | None = None
        """The error with which the last peer ended, if there is none left."""
        self._end: LookupBufferError | None = None
        """The error for callers once this end was ended here."""

    def meet(self, link: FrameStream, carrier: Carrier | None = None) -> None:
        """Add the other end of a new connection as a peer."""
        rest = self._memory.rest
        peer = Peer(link, self._inbox, self._limits, self._forget, carrier, rest)
        with self._changed:
            peer.start()
            end = self._end
            if end is None:
                self._peers.append(peer)
                self._lost = None
                self._inbox.end(None)
                self._changed.notify_all()
        self._call()  # with two peers no caller can read from one alone
        if isinstance(end, Closed):
            peer.close()  # so that the peer receives the reason
        elif end is not None:
            peer.abort(end)

    def send_tensor(
        self, tensor: Value, key: str | TensorKey | None = None, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        deadline = time.monotonic() + timeout
        wanted, header = key_bytes(key), header_of(tensor)
        if header.nbytes > self._limits.buffer_bytes:
            most = self._limits.buffer_bytes
            raise TensorTooLarge(f"{header.nbytes} bytes; the pipe holds {most}")
        self._only_peer(deadline).outbox.send(
            wanted, header, self._memory.outward(tensor), deadline
        )

    def recv_tensor(
        self,
        key: str | TensorKey | Any | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        out: Tensor | None = None,
    ) -> Value:
        deadline = time.monotonic() + timeout
        wanted = key if isinstance(key, Any) else key_bytes(key)

        def fits(offer: Offer) -> None:
            if out is not None and offer.header.kind != "none":
                self._memory.check(out, offer)

        while True:
            self._check()
            self._read_until(wanted, deadline)
            offer = self._inbox.take(wanted, deadline, fits)
            if offer.header.kind == "none":
                offer.source.receive(offer, memoryview(b""))
                return None
            try:
                self._limits.check_received(offer.header.nbytes)
                received = self._receive(offer, out)
            except LookupTimeout:
                self._inbox.put_back(offer)
                self._call()
                raise
            except (CodecError, TensorTooLarge):  # it cannot be received: drop it
                offer.source.discard(offer)
                raise
            if received is not None:
                return received

    def _read_until(self, wanted: bytes | Any | None, deadline: float) -> None:
        """Read frames on this thread, if there is one peer and no other thread reads from it."""
        peers, settled = self._peers, self._inbox.settled
        if len(peers) == 1 and not settled(wanted):
            peers[0].read_until(lambda: len(peers) != 1 or settled(wanted), deadline)

    def _call(self) -> None:
        """Wake the callers that read from a peer: a condition changed that no frame announces."""
        for peer in list(self._peers):
            peer.call()

    def _receive(self, offer: Offer, out: Tensor | None) -> Value:
        """The value of this offer; None if its sender gave up before the bytes were requested."""

        def spare() -> memoryview:
            offer.value = self._memory.place(offer, None)
            return self._memory.writable(offer.value)

        if offer.value is None:
            value = self._memory.place(offer, out)
            offer.value = None if value is out else value
        else:
            value = offer.value  # an earlier caller requested it
        memory = self._memory.writable(value)
        received = offer.source.receive(offer, memory, spare if value is out else None)
        return self._memory.done(value, out) if received else None

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return sum(peer.outbox.used_bytes for peer in self._peers)

    @property
    def is_lost(self) -> bool:
        """Whether the other end is gone, so that no call will succeed any more."""
        return self._lost is not None

    def close(self) -> None:
        ending = Closed("this end of the pipe was closed")
        if not self._end_here(ending):
            return
        deadline = time.monotonic() + self._limits.linger_seconds
        for peer in list(self._peers):
            peer.outbox.drain(ending, deadline)
        for peer in list(self._peers):
            peer.close()

    def abort(self) -> None:
        error = PipeBroken("this end of the pipe was aborted")
        self._end_here(error)
        for peer in list(self._peers):
            peer.abort(error)

    def _end_here(self, error: LookupBufferError) -> bool:
        with self._changed:
            if self._end is not None:
                return False
            self._end = error
            self._changed.notify_all()
        self._inbox.end(error, clear=True)
        self._call()
        self._memory.end()
        return True

    def _only_peer(self, deadline: float) -> Peer:
        with self._changed:
            while not self._peers:
                self._check()
                if self._lost is not None:
                    raise type(self._lost)(str(self._lost))
                if not self._changed.wait(deadline - time.monotonic()):
                    raise LookupTimeout("nobody connected to the pipe in the time given")
            self._check()
            if len(self._peers) > 1:
                raise ConfigError(f"{len(self._peers)} ends are connected: this one only receives")
            return self._peers[0]

    def _forget(self, peer: Peer, why: LookupBufferError) -> None:
        with self._changed:
            if peer in self._peers:
                self._peers.remove(peer)
            if self._peers or self._end is not None:
                return
            self._lost = why
            self._inbox.end(why)
            self._changed.notify_all()

    def _check(self) -> None:
        if self._end is not None:
            raise type(self._end)(str(self._end))


class Memory(Protocol):
    """The memory in which sent and received bytes lie."""

    def outward(self, value: Value) -> Bytes: ...

    def check(self, out: Tensor, offer: Offer) -> None:
        """Raises CodecError: this offer cannot be received into the caller's `out`."""
        ...

    def place(self, offer: Offer, out: Tensor | None) -> Tensor:
        """The tensor to receive into: `out` if the bytes can go there directly, else a new one."""
        ...

    def writable(self, value: Tensor) -> memoryview: ...

    def done(self, value: Tensor, out: Tensor | None) -> Value:
        """The value to return after the bytes arrived in `value`: `out`, if the caller gave one."""
        ...

    def rest(self) -> None:
        """Called when there were no messages for a while: keep little memory for later ones."""
        ...

    def end(self) -> None:
        """Keep no memory for later messages."""
        ...


class HostMemory:
    """See `Memory`."""

    def __init__(self) -> None:
        self._copies = Copies()

    def outward(self, value: Value) -> Bytes:
        return HostBytes(value, self._copies)

    def check(self, out: Tensor, offer: Offer) -> None:
        check_place(out, offer.header, "cpu")

    def place(self, offer: Offer, out: Tensor | None) -> Tensor:
        return empty_tensor(offer.header) if out is None else out

    def writable(self, value: Tensor) -> memoryview:
        return writable_bytes(value)

    def done(self, value: Tensor, out: Tensor | None) -> Value:
        return value if out is None or out is value else copy_of(value, out)

    def rest(self) -> None:
        self._copies.rest()

    def end(self) -> None:
        self._copies.end()


class HostBytes:
    """The bytes of a value to send."""

    def __init__(self, value: Value, copies: Copies) -> None:
        self._value = value
        self._copies = copies

    def lent(self) -> memoryview:
        if self._value is None:
            return memoryview(b"")
        owner, address, nbytes = contiguous_bytes(self._value)
        return bytes_at(address, nbytes, keep=owner)

    def copied(self) -> memoryview:
        return self._copies.copy(self.lent())
