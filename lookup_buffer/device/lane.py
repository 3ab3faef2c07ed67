"""DeviceLane: a process's device pool, connected to its node and to the pools of other processes.

    prepare,     called by the producer: keep an inserted tensor in the pool, and offer it
    settle
    on_event     called for messages of the node: receive a tensor into the pool and pin it for a
                 ticket; release tickets; or start pairs with pools that the node has discovered
    tensor       called by the reader: the tensor of a ticket

Each failure is reported to the node, which then fetches the bytes over the hosts. Failures are
counted by reason, and logged once for each reason. Receiving runs on the lane's own threads, all
else on the caller's. A pool works without a node or its client, but then nothing requests its
tensors.
"""

import secrets
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from lookup_buffer.client.session import next_request_id
from lookup_buffer.codec import header_of
from lookup_buffer.config import ARGUMENT_ADVICE, check_token_of, guard_listener
from lookup_buffer.device import protocol
from lookup_buffer.device.memory import PoolMemory, memory_for
from lookup_buffer.device.pairs import Pairs, PoolReceiver
from lookup_buffer.device.pool import DevicePool, Entry, PoolGauges
from lookup_buffer.device.protocol import ProtocolVersion, version_of
from lookup_buffer.device.server import PoolServer
from lookup_buffer.device.stats import DaemonThreads, LaneStats
from lookup_buffer.errors import (
    BufferFull,
    CodecError,
    LookupBufferError,
    NodeUnavailable,
    TensorTooLarge,
)
from lookup_buffer.key import QualifiedKey
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.protocol.fields import Fallback, MaybeFallback, split
from lookup_buffer.protocol.messages import (
    Offer,
    OpenPool,
    Prepare,
    Received,
    Request,
    Retract,
    SeenPool,
)
from lookup_buffer.times import ORPHANED_SECONDS

if TYPE_CHECKING:
    import torch

RECEIVERS: Final = 4
"""The number of tensors that are received at a time."""
SILENCE_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 10.0


class ToNode(Protocol):
    """Sends a request of the pool to its node. Never raises; without a node it does nothing."""

    def __call__(self, request: Request) -> None: ...


class DeviceLane:
    """Thread-safe. A fault of another process, of the node or of the device raises only where a
    method documents it.

    Args:
        lane: gloo or nccl.
        device: as torch names it.
        pool_bytes: capacity of the pool.
        receives: whether this process ever reads; if not, it starts no pair.
        offers: whether it ever keeps tensors for others; if not, the node does not announce the
            pool.
        host: address to listen at; other hosts must reach it as they reach the node.
        token: the fleet's secret; at least 16 characters.
        silence_seconds: another process that sends nothing for so long is lost.
        version: the library version to announce; None means the version of this process.
        memory: the memory of the tensors; None means that of `device`.

    Raises:
        ConfigError: this process cannot use that kind of lane, or cannot listen at `host` (beyond
            loopback only with a token), or the token is easy to guess.
    """

    def __init__(
        self,
        lane: str,
        *,
        device: str = "cpu",
        pool_bytes: int,
        receives: bool = True,
        offers: bool = True,
        host: str = "127.0.0.1",
        token: str | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        version: ProtocolVersion | None = None,
        memory: PoolMemory | None = None,
    ) -> None:
        check_token_of("a device lane", token)
        guard_listener("a device lane", host, ARGUMENT_ADVICE, token)
        self._memory: PoolMemory = memory or memory_for(device)
        self.version = version or version_of(lane, self._memory)
        self.id = secrets.token_hex(6)
        self._pool_options = (pool_bytes, receives, offers)
        limits = PipeLimits(
            buffer_bytes=pool_bytes,
            inbox_bytes=protocol.INBOX_BYTES,
            silence_seconds=silence_seconds,
        )
        self.pool = DevicePool(pool_bytes, self._evicted)
        self._to_node: ToNode = lambda _request: None
        self._lock = threading.Lock()
        self._closed = False
        self._stats = LaneStats(self.version.lane)
        self._pending: set[int] = set()
        """Tickets that are not released and have no entry yet."""
        self._orphans: list[tuple[float, list[int]]] = []
        self._server = PoolServer(
            self.pool, self._memory, self.version, self.id,
            host=host, token=token, limits=limits, stats=self._stats,
        )  # fmt: skip
        self._threads = DaemonThreads(self._stats, "lb-lane", RECEIVERS)
        self._pairs = Pairs(
            self._memory, self.version, token=token, limits=limits, stats=self._stats
        )
        self._receiver = PoolReceiver(self.pool, self._memory, self._pairs, self._stats)

    @property
    def port(self) -> int:
        """The port at which other pools reach this one."""
        return self._server.port

    # -- the node

    def attached(self, to_node: ToNode) -> None:
        """A node is connected (again): send it this pool and the entries that it offers."""
        self._to_node = to_node
        opened = OpenPool(
            next_request_id(), self.version.lane, self.version.library, self.port, self.id,
            *self._pool_options,
        )  # fmt: skip
        to_node(opened)
        for entry in self.pool.own_entries():
            self._offer(entry)

    def lost(self) -> None:
        """The connection to the node is lost. Tickets that it issued can still be loaded for
        `ORPHANED_SECONDS`."""
        with self._lock:
            self._pending.clear()  # no node would release a ticket from now on
            self._orphans.append((time.monotonic(), self.pool.tickets()))
        self._end_orphans()

    def _end_orphans(self) -> None:
        due = time.monotonic() - ORPHANED_SECONDS
        with self._lock:
            old = [tickets for lost_at, tickets in self._orphans if lost_at < due]
            del self._orphans[: len(old)]
        for tickets in old:
            self.pool.release(tickets)

    def on_event(self, message: dict[str, Any]) -> None:
        """Handle a message of the node; see `protocol.messages`. Runs on the listening thread, so
        it never waits."""
        if message["event"] == "pools":
            self._pairs.forget(message["gone"])
            for fields in message["there"]:
                self._pairs.warm(SeenPool(*fields))
            return
        if message["event"] == "let_go":
            self._release(message["tickets"])
            self.pool.forget((namespace, key) for namespace, key in message["keys"])
            return
        if self._orphans:
            self._end_orphans()
        ticket, deadline = message["id"], time.monotonic() + message["seconds"]
        with self._lock:
            self._pending.add(ticket)
        if not self._threads.submit(partial(self._receive, message, deadline)):
            self._send_received(ticket, Fallback.BUSY, 0)

    def _release(self, tickets: list[int]) -> None:
        with self._lock:
            self._pending.difference_update(tickets)
            self.pool.release(tickets)

    def _send_received(self, ticket: int, reason: MaybeFallback, source: int) -> None:
        with self._lock:
            self._pending.discard(ticket)
        if reason:
            self._stats.count(f"fallback:{reason}")
        self._to_node(Received(next_request_id(), ticket, reason, source))

    # -- producers

    def prepare(
        self, namespace: str, key: str, tensor: "torch.Tensor", *, immutable: bool
    ) -> Entry | None:
        """Keep in the pool the tensor that is about to be inserted under this key.

        `immutable`: nothing will write to the tensor, so it may be kept without a copy.

        Returns the entry, which the caller passes to `settle`; None if the tensor is not kept.
        """
        qualified_key = (namespace, key)
        if self.pool.has(qualified_key):
            return None
        try:
            nbytes = header_of(tensor).nbytes
            self.pool.reserve(nbytes)
        except (BufferFull, TensorTooLarge, CodecError):
            self._stats.count("kept_not")
            return None
        try:
            value = self._memory.keep(tensor, immutable=immutable)
        except (LookupBufferError, RuntimeError) as error:  # a device raises RuntimeError
            self.pool.cancel(nbytes)
            self._stats.count("kept_not")
            self._stats.warn(Fallback.DEVICE, error)
            return None
        entry = self.pool.put(qualified_key, value, nbytes)
        self._to_node(Prepare(next_request_id(), namespace, key, entry.mark))
        return entry

    def settle(self, entry: Entry | None, checksum: int | None) -> None:
        """The insert of this entry is over.

        If the tensor was stored, `checksum` is its checksum, and the entry is offered. None means
        that the buffer has other bytes or none; then the entry is dropped.
        """
        if entry is None:
            return
        namespace, key = entry.key
        # The entry is still pinned, so the pool can evict and retract it only after this offer.
        if checksum is not None and not entry.removed:
            entry.checksum = checksum
            self._offer(entry)
            self._stats.count("kept")
        else:
            self.pool.forget([entry.key])
            self._to_node(Retract(next_request_id(), namespace, [key]))
        self.pool.unpin(entry)

    def _offer(self, entry: Entry) -> None:
        if entry.checksum is not None:  # without one, `settle` offers it after its insert
            of = (next_request_id(), *entry.key)
            self._to_node(Offer(*of, entry.mark, entry.checksum))

    def _evicted(self, evicted: list[QualifiedKey]) -> None:
        by_namespace: dict[str, list[str]] = {}
        for namespace, key in evicted:
            by_namespace.setdefault(namespace, []).append(key)
        for namespace, keys in by_namespace.items():
            for part in split(keys):
                self._to_node(Retract(next_request_id(), namespace, list(part)))

    # -- readers

    def tensor(self, ticket: int) -> "torch.Tensor":
        """The tensor of the ticket, ready for any later work on the caller's stream.

        The caller must not write to it. It stays valid as long as the caller keeps it, in the pool
        or not.

        Raises:
            NodeUnavailable: the ticket has no entry here.
        """
        entry = self.pool.entry_of(ticket)
        if entry is None:
            raise NodeUnavailable("the pool of this process has no entry for the ticket")
        tensor, ready = entry.value
        return self._memory.on_caller_stream(tensor, ready)

    def onto_device(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A copy on this lane's device of a tensor that came over the hosts."""
        return tensor.to(self._memory.device)

    # -- the threads

    def _receive(self, message: dict[str, Any], deadline: float) -> None:
        ticket, source = message["id"], 0
        reason: MaybeFallback = ""
        key = (message["namespace"], message["key"])
        entry = self.pool.pin(key, checksums=message["checksums"])
        if entry is None:
            entry, reason, source = self._receiver.receive(
                message, key, deadline, lambda: ticket in self._pending
            )
        if entry is not None and not self._assign(ticket, entry):
            return
        self._send_received(ticket, reason, source)

    def _assign(self, ticket: int, entry: Entry) -> bool:
        """Pin the entry for the ticket, if that is not released. Returns whether it is pinned."""
        with self._lock:
            is_pending = ticket in self._pending
            if is_pending:
                self._pending.discard(ticket)
                self.pool.assign(ticket, entry)
        if not is_pending:  # the ticket was released meanwhile
            self.pool.unpin(entry)
        return is_pending

    # -- figures

    def stats(self) -> dict[str, int]:
        """Counts of tensors kept and served, and of tensors that did not arrive, by reason."""
        return {**self._stats.counts(), "served": self._server.served}

    def gauges(self) -> PoolGauges:
        return self.pool.gauges()

    def pairs(self) -> int:
        """The number of open communicators, started by this process or by others."""
        return self._pairs.open_pairs() + self._server.pairs()

    def close(self) -> None:
        """Idempotent and bounded. Other processes can no longer use the pool; tensors that callers
        have stay valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._to_node = lambda _request: None
        self._server.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        self._pairs.close(CLOSE_SECONDS)
        self._threads.close(deadline - time.monotonic())
