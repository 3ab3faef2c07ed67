"""DeviceLane: a process's pool on its device, joined to its node and to other processes' pools.

    prepare,     the producer: what it inserts into the buffer stays here as well, and is offered
    settle
    on_event     the node: bring this into the pool, and hold it under a ticket; or let go of it;
                 or, there are pools, to begin a pair with
    tensor       the reader: what a ticket holds

Whatever fails here is told to the node, which then has the bytes brought over the hosts; it is
counted by reason, and said in the log once for each reason. The node and its client come first:
without them there is a pool that nobody asks for anything.
"""

import secrets
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from lookup_buffer.client.session import next_request_id
from lookup_buffer.codec import header_of
from lookup_buffer.config import check_token_of, guard_listener
from lookup_buffer.device import protocol
from lookup_buffer.device.memory import Place, place_of
from lookup_buffer.device.pairs import Pairs, Receiving
from lookup_buffer.device.pool import DevicePool, Entry, PoolGauges
from lookup_buffer.device.protocol import Dialect, dialect_of
from lookup_buffer.device.serving import Serving
from lookup_buffer.device.stats import Crew, Notes
from lookup_buffer.errors import (
    BufferFull,
    CodecError,
    LookupBufferError,
    NodeUnavailable,
    TensorTooLarge,
)
from lookup_buffer.key import QualifiedKey
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.protocol.messages import (
    Fallback,
    MaybeFallback,
    Offer,
    OpenPool,
    Prepare,
    Received,
    Request,
    Retract,
    SeenPool,
    split,
)
from lookup_buffer.times import ORPHANED_SECONDS

if TYPE_CHECKING:
    import torch

RECEIVERS: Final = 4
"""How many are received at a time."""
SILENCE_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 10.0


class ToNode(Protocol):
    """What the pool says to its node. Never raises; without a node nothing is said."""

    def __call__(self, request: Request) -> None: ...


class DeviceLane:
    """Thread-safe. Nothing here raises for a fault of a peer, of the node or of the device, but
    what says so.

    Args:
        device: as torch names it.
        receives: whether this process ever reads; one that does not begins no pair.
        offers: whether it ever keeps what others may want; one that does not is named to nobody.
        host: address to listen at, which other hosts reach as they reach the node.
        token: of the fleet; at least 16 characters.
        dialect: to announce another version than this process has; none means what it has.
        place: where the tensors lie; none means `device`.

    Raises:
        ConfigError: this process cannot speak that lane, or not listen at `host`: beyond loopback
            only with a token. Or anybody could guess that token.
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
        dialect: Dialect | None = None,
        place: Place | None = None,
    ) -> None:
        check_token_of("a device lane", token)
        guard_listener("a device lane", host, "token", token)
        self._place: Place = place or place_of(device)
        self.dialect = dialect or dialect_of(lane, self._place)
        self.id = secrets.token_hex(6)
        self._opening = (pool_bytes, receives, offers)
        limits = PipeLimits(
            buffer_bytes=pool_bytes,
            inbox_bytes=protocol.INBOX_BYTES,
            silence_seconds=silence_seconds,
        )
        self.pool = DevicePool(pool_bytes, self._evicted)
        self._to_node: ToNode = lambda _request: None
        self._lock = threading.Lock()
        self._closed = False
        self._notes = Notes(self.dialect.lane)
        self._under_way: set[int] = set()
        """Tickets that are still wanted, and not held yet."""
        self._orphans: list[tuple[float, list[int]]] = []
        self._serving = Serving(
            self.pool, self._place, self.dialect, self.id,
            host=host, token=token, limits=limits, notes=self._notes,
        )  # fmt: skip
        self._crew = Crew(self._notes, "lb-lane", RECEIVERS)
        self._pairs = Pairs(
            self._place, self.dialect, token=token, limits=limits, notes=self._notes
        )
        self._receiving = Receiving(self.pool, self._place, self._pairs, self._notes)

    @property
    def port(self) -> int:
        """At which other pools reach this one."""
        return self._serving.port

    # -- the node

    def attached(self, to_node: ToNode) -> None:
        """There is a node (again): tell it of the pool, and of what it offers."""
        self._to_node = to_node
        opened = OpenPool(
            next_request_id(), self.dialect.lane, self.dialect.library, self.port, self.id,
            *self._opening,
        )  # fmt: skip
        to_node(opened)
        for entry in self.pool.own():
            self._offer(entry)

    def lost(self) -> None:
        """The node is gone. What it promised from this pool is still to be loaded, for a while."""
        with self._lock:
            self._under_way.clear()  # nobody would let go of what is still to come
            self._orphans.append((time.monotonic(), self.pool.tickets()))
        self._end_orphans()

    def _end_orphans(self) -> None:
        due = time.monotonic() - ORPHANED_SECONDS
        with self._lock:
            old = [tickets for lost_at, tickets in self._orphans if lost_at < due]
            del self._orphans[: len(old)]
        for tickets in old:
            self.pool.end(tickets)

    def on_event(self, message: dict[str, Any]) -> None:
        """What the node says; see `pool_messages`. On the listening thread, so it never waits."""
        if message["event"] == "pools":
            self._pairs.forget(message["gone"])
            for fields in message["there"]:
                self._pairs.warm(SeenPool(*fields))
            return
        if message["event"] == "let_go":
            self._let_go(message["tickets"])
            self.pool.forget((namespace, key) for namespace, key in message["keys"])
            return
        if self._orphans:
            self._end_orphans()
        ticket, deadline = message["id"], time.monotonic() + message["seconds"]
        with self._lock:
            self._under_way.add(ticket)
        if not self._crew.soon(partial(self._receive, message, deadline)):
            self._say_received(ticket, Fallback.BUSY, 0)

    def _let_go(self, tickets: list[int]) -> None:
        with self._lock:
            self._under_way.difference_update(tickets)
            self.pool.end(tickets)

    def _say_received(self, ticket: int, reason: MaybeFallback, source: int) -> None:
        with self._lock:
            self._under_way.discard(ticket)
        if reason:
            self._notes.count(f"fallback:{reason}")
        self._to_node(Received(next_request_id(), ticket, reason, source))

    # -- producers

    def prepare(
        self, namespace: str, key: str, tensor: "torch.Tensor", *, immutable: bool
    ) -> Entry | None:
        """Keep what is about to be inserted under this key; None where it is not kept. To be given
        to `settle`.

        `immutable`: nobody will write to it, so it may be kept as it is.
        """
        address = (namespace, key)
        if self.pool.has(address):
            return None
        try:
            nbytes = header_of(tensor).nbytes
            self.pool.reserve(nbytes)
        except (BufferFull, TensorTooLarge, CodecError):
            self._notes.count("kept_not")
            return None
        try:
            value = self._place.keep(tensor, immutable=immutable)
        except (LookupBufferError, RuntimeError) as error:  # the latter is a device's
            self.pool.cancel(nbytes)
            self._notes.count("kept_not")
            self._notes.warn(Fallback.DEVICE, error)
            return None
        entry = self.pool.put(address, value, nbytes)
        self._to_node(Prepare(next_request_id(), namespace, key, entry.mark))
        return entry

    def settle(self, entry: Entry | None, checksum: int | None) -> None:
        """Its insert is over: offer it, if it was stored, with this checksum; or, for None, forget
        it, for the buffer has other bytes, or none."""
        if entry is None:
            return
        namespace, key = entry.address
        # While it is held: what the pool loses, it loses, and retracts, after this.
        if checksum is not None and not entry.gone:
            entry.checksum = checksum
            self._offer(entry)
            self._notes.count("kept")
        else:
            self.pool.forget([entry.address])
            self._to_node(Retract(next_request_id(), namespace, [key]))
        self.pool.let_go(entry)

    def _offer(self, entry: Entry) -> None:
        if entry.checksum is not None:  # else it is when its insert is over
            of = (next_request_id(), *entry.address)
            self._to_node(Offer(*of, entry.mark, entry.checksum))

    def _evicted(self, addresses: list[QualifiedKey]) -> None:
        by_namespace: dict[str, list[str]] = {}
        for namespace, key in addresses:
            by_namespace.setdefault(namespace, []).append(key)
        for namespace, keys in by_namespace.items():
            for part in split(keys):
                self._to_node(Retract(next_request_id(), namespace, list(part)))

    # -- readers

    def tensor(self, ticket: int) -> "torch.Tensor":
        """What the ticket holds, for whatever the caller's stream does from now on. Not to be
        written to. It stays as long as it is kept, in the pool or not.

        Raises:
            NodeUnavailable: the ticket holds nothing here.
        """
        entry = self.pool.of(ticket)
        if entry is None:
            raise NodeUnavailable("the pool of this process does not hold what was promised")
        tensor, ready = entry.value
        return self._place.hand_out(tensor, ready)

    def onto_device(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The same on this lane's device, where it came over the hosts."""
        return tensor.to(self._place.device)

    # -- the threads

    def _receive(self, message: dict[str, Any], deadline: float) -> None:
        ticket, source = message["id"], 0
        reason: MaybeFallback = ""
        address = (message["namespace"], message["key"])
        entry = self.pool.hold(address, checksums=message["checksums"])
        if entry is None:
            entry, reason, source = self._receiving.bring(
                message, address, deadline, lambda: ticket in self._under_way
            )
        if entry is not None and not self._give(ticket, entry):
            return
        self._say_received(ticket, reason, source)

    def _give(self, ticket: int, entry: Entry) -> bool:
        """Whether it still is wanted: then the ticket holds it, from the same moment on."""
        with self._lock:
            wanted = ticket in self._under_way
            if wanted:
                self._under_way.discard(ticket)
                self.pool.give(ticket, entry)
        if not wanted:  # it came too late
            self.pool.let_go(entry)
        return wanted

    # -- what it did

    def stats(self) -> dict[str, int]:
        """Tensors kept, served, and those that did not come, by reason."""
        return {**self._notes.counts(), "served": self._serving.served}

    def gauges(self) -> PoolGauges:
        return self.pool.gauges()

    def pairs(self) -> int:
        """Communicators that are open, to others and from others."""
        return self._pairs.open_pairs() + self._serving.pairs()

    def close(self) -> None:
        """Idempotent and bounded. The pool is gone for others; what was handed out stays."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._to_node = lambda _request: None
        self._serving.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        self._pairs.close(CLOSE_SECONDS)
        self._crew.close(deadline - time.monotonic())
