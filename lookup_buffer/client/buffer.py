"""`LookupBuffer`: the public API. Stores tensors under keys on this host, reads them from any host.

A call moves bytes between the caller's tensors and shared memory; the node does the rest:

    insert: tensor → staging area → (node copies, hashes) → arena → indexed, published
    select: local index → arena → the caller's tensor → local index again: unchanged
       else node locates, fetches, pins → arena → the caller's tensor → unpinned
    drop_select: node takes, pins → arena → the caller's tensor → acknowledged, unpinned

Calls run on the caller's thread; any thread may call. Each insert and each take has a connection to
itself. A take that fails before its acknowledgement gives the hand-off back. `local` reads through
the local index, `load` copies pinned bytes, `pending` keeps prefetches and sets of claims, and
`session` holds the connections and the mapped memory.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from lookup_buffer import codec
from lookup_buffer.client.handles import ClaimAnswer, ClaimHandle, LoadOrder, PrefetchHandle
from lookup_buffer.client.inserts import Inserts
from lookup_buffer.client.load import Loads, PoolMembership, SessionPool
from lookup_buffer.client.local import LocalReads, NotListed
from lookup_buffer.client.pending import PendingClaims, PendingPrefetches
from lookup_buffer.client.session import ClientSession, NodeConnection, next_request_id
from lookup_buffer.codec import Tensor, Value
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import (
    BufferFull,
    Closed,
    CodecError,
    InvalidKey,
    LookupBufferError,
    LookupTimeout,
    MissingTensor,
    MissReason,
    NodeUnavailable,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.fields import checked_seconds, clamped_seconds, split
from lookup_buffer.protocol.messages import (
    Acknowledge,
    Claim,
    Contains,
    Describe,
    GiveBack,
    InsertOutcome,
    ReleaseClaim,
    Select,
    Stats,
    Take,
)
from lookup_buffer.times import CALL_SECONDS, LEASE_ANSWER_SECONDS, NODE_SHARE
from store import ClaimState

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EngineRank:
    """The engine of a client and its rank there. `rank` is None for the scheduler's side, whose
    tickets end when all `world_size` ranks have sent `Done`."""

    engine_id: str
    rank: int | None
    world_size: int
    encodes: bool = False
    """Whether each tensor read here saves the engine an encode, as outputs of its encoder do."""
    device: str = ""
    """The device that computes this client's tensors: up to 12 printable ASCII characters."""

    def to_wire(self) -> list[Any]:
        return list(astuple(self))


class LookupBuffer:
    """A client of this host's node, for one namespace. Thread-safe; do not use it after a fork.

    An engine's client may be opened without a namespace and `enter` one later. Until then it can
    only load orders.

    Keys match exactly. A timeout is in seconds: more than a day, also `math.inf`, is a day, and NaN
    raises `ConfigError`. Faults of Redis or of other nodes are misses. A fault of this host's node
    raises `NodeUnavailable` within the call's time, and the client reconnects by itself.

    A call for one key does not wait for another key while at most CONNECTIONS_MAX (16) calls are in
    progress. Of more, each waits for one of these to end, as long as it may take itself; then it
    fails as if the node did not answer. A `select` of what this host's index lists, `prefetch` and
    `claim_all` do not count.

    Raises:
        NodeUnavailable: no node runs and none could be started; not raised with `required=False`.
        NodeRefused: the node that runs has another configuration.
    """

    def __init__(
        self,
        config: BufferConfig | None = None,
        namespace: Namespace | None = None,
        *,
        engine: EngineRank | None = None,
        required: bool = True,
    ) -> None:
        if namespace is None and engine is None:
            namespace = Namespace.named("default")
        self._parts: dict[str, str] | None = None
        self._rank = engine.rank or 0 if engine else 0
        session = self._session = ClientSession(
            config or BufferConfig.from_environment(),
            engine.to_wire() if engine else None,
            on_event=self._on_event,
            on_connected=self._on_connected,
            on_lost=self._on_lost,
            on_tick=lambda: self._local_reads.report(),
        )
        if namespace is not None:
            session.namespace, self._parts = namespace.fingerprint, dict(namespace.parts)
        self._local_reads = LocalReads(session)
        self._pool = PoolMembership(session)
        self._loads = Loads(session, self._pool)
        self._prefetches = PendingPrefetches(session, self._loads)
        self._claims = PendingClaims(session)
        self._session.open(required=required)

    @property
    def namespace(self) -> str:
        """The fingerprint of the namespace; empty until one is set."""
        return self._session.namespace

    def enter(self, fingerprint: str, parts: Mapping[str, str] | None = None) -> None:
        """Use this namespace for all keys from now on. `parts` is its clear text, which the node
        publishes; one client of each engine passes it. Never raises."""
        self._session.namespace = fingerprint
        if parts is not None:
            self._parts = dict(parts)
            self._describe()

    # -- write

    def insert(
        self,
        key: TensorKey,
        tensor: "torch.Tensor | None",
        *,
        ttl_seconds: float | None = None,
        timeout: float = 10.0,
        on_stored: Callable[[int], None] | None = None,
    ) -> InsertOutcome:
        """Store `tensor`, or `None` as a value, under `key`.

        After the return the caller may change the tensor, and this host's readers see the key.
        Other hosts see it once its record is in Redis. The insert of a hand-off waits for that
        record, unless Redis does not answer.

        An existing shared key stays as it is. A hand-off replaces the value under its key on this
        host. While another host holds a hand-off under the key, the outcome is EXISTS, and nothing
        is stored. A hand-off is never evicted, and expires after `ttl_seconds` (default 300). Once
        hand-offs fill half of the arena, an insert waits up to `timeout` seconds for one to be
        taken. `on_stored` is called with the checksum of the bytes if the outcome is STORED.

        Raises:
            TensorTooLarge: larger than the arena; for a hand-off, larger than half of it.
            BufferFull: no room; every remaining item is pinned, being written, or a hand-off.
            NodeUnavailable: the node did not answer in time, or another node that may hold this
                hand-off did not answer within `timeout`.
            ReadOnly: the node only reads.
            ConfigError: `ttl_seconds` is not a valid time.
        """
        inserted = Inserts(self._session, ttl_seconds, timeout).insert_one(key, tensor)
        if on_stored is not None and inserted.checksum is not None:
            on_stored(inserted.checksum)
        return inserted.outcome

    def insert_many(
        self,
        items: Iterable[tuple[TensorKey, "torch.Tensor | None"]],
        *,
        ttl_seconds: float | None = None,
        timeout: float = 10.0,
    ) -> list[InsertOutcome | LookupBufferError]:
        """`insert` many values, in few round trips; for each its outcome, or the error that
        `insert` would raise.

        `timeout` bounds each round trip. A fault of the node is an error for each value that was
        not stored by then; the others stay.
        """
        results = Inserts(self._session, ttl_seconds, timeout).insert(list(items))
        return [
            result if isinstance(result, LookupBufferError) else result.outcome
            for result in results
        ]

    # -- read

    def select_many(
        self,
        keys: Sequence[TensorKey],
        *,
        timeout: float = 0.0,
        out: "Sequence[torch.Tensor] | None" = None,
    ) -> "list[torch.Tensor | MissReason | None]":
        """`select` many keys, in few round trips; for each its tensor, or why it is a miss.

        What other hosts hold is fetched in batches, while what has come is copied. `timeout` bounds
        the wait for shared keys that no node holds yet, and as in `select` that for the turn of a
        transfer; `out` has a tensor for each key. A fault of the node, of Redis or of another node
        is a miss.

        Raises:
            CodecError: a tensor of `out` does not fit.
        """
        if out is not None and len(out) != len(keys):
            raise CodecError(f"out has {len(out)} tensors for {len(keys)} keys")
        timeout = clamped_seconds(timeout)
        outs: Sequence[Tensor | None] = [None] * len(keys) if out is None else out
        found: list[Value | MissReason] = [MissReason.NODE_DOWN] * len(keys)
        absent, crowded = [], []
        try:
            for index, key in enumerate(keys):
                try:
                    found[index] = self._local_reads.select(key, outs[index])
                except NotListed:
                    absent.append(index)
            wanted = [keys[index] for index in absent]
            with closing(self._prefetches.in_turn(wanted, timeout)) as brought:
                for index, handle in zip(absent, brought, strict=True):
                    if handle.order is not None:
                        found[index] = self._loads.load_copy(handle.order, outs[index])
                        continue
                    found[index] = handle.reason or MissReason.ABSENT
                    crowded += [index] if handle.reason == MissReason.NO_ROOM else []
            for index in crowded:  # alone it has more room
                with suppress(MissingTensor, BufferFull):
                    found[index] = self.select(keys[index], out=outs[index])
        except NodeUnavailable:
            pass  # all that was not read by then
        return found

    def select(
        self, key: TensorKey, *, timeout: float = 0.0, out: "torch.Tensor | None" = None
    ) -> "torch.Tensor | None":
        """A copy of the tensor under `key`, in `out` if given (much faster if the memory of `out`
        was used before).

        A tensor that this host holds is copied without a request to the node. `timeout` bounds the
        wait for the key to appear, and for its turn if much is transferred from the node that has
        it (without `timeout` a minute). A transfer in progress ends if nothing moves for 5 s. After
        an error the content of `out` is undefined.

        Raises:
            MissingTensor: no live node holds it.
            LookupTimeout: it did not appear within `timeout` seconds.
            BufferFull: what is pinned or being written leaves no room to pin it, or this client
                waits for too many keys.
            CodecError: `out` does not fit.
            NodeUnavailable: the node did not answer in time.
        """
        timeout = clamped_seconds(timeout)
        try:
            return self._local_reads.select(key, out)
        except NotListed:
            pass
        with self._pinned(key, timeout) as order:
            return self._loads.load(order, out)

    def drop_select(
        self, key: TensorKey, *, timeout: float = 0.0, out: "torch.Tensor | None" = None
    ) -> "torch.Tensor | None":
        """Take the hand-off under `key`: return its tensor and remove it. Exactly one taker wins.

        The call returns after the owner, the node on which it was inserted, has confirmed the take.
        If this process dies or is stopped before that, the hand-off becomes available again.
        `timeout` bounds the wait for it to appear and the wait in the queue of takers; for the rest
        see `select`.

        Raises:
            MissingTensor: no live node holds it; the death of its owner also ends the wait.
            LookupTimeout: it was not available within `timeout` seconds; also if it was inserted
                while Redis was down and lost with its node, because no record of it exists.
            InvalidKey: the key is shared; a key with many readers cannot be taken.
            BufferFull: it is on another host, and this host has no room for a copy.
            CodecError: `out` does not fit; the hand-off stays where it was.
            NodeUnavailable: the node did not answer; the hand-off may be lost with it.
            ReadOnly: the node only reads.
        """
        if key.is_shared:
            raise InvalidKey(
                f"{key} is shared, for many readers, and cannot be taken. Use select, or give the "
                "key a request_id, which makes it a hand-off"
            )
        timeout = clamped_seconds(timeout)
        deadline = time.monotonic() + timeout
        while True:
            # One connection for the whole exchange: while its lease runs, a taker must not wait
            # for a free connection behind callers that only wait for a key.
            bound = clamped_seconds(deadline - time.monotonic()) + CALL_SECONDS
            with self._session.connection(bound) as connection:
                wait = clamped_seconds(deadline - time.monotonic())
                request = Take(next_request_id(), self.namespace, key.text, wait)
                reply = connection.call(request, wait + CALL_SECONDS)
                if reply["state"] != "resident":
                    raise _take_error(key, timeout, reply["reason"])
                order, token = LoadOrder.of(reply), reply["token"]
                try:
                    tensor = self._load_or_give_back(order, token, out)
                    if self._acknowledge(connection, token, reply["lease_seconds"]):
                        return tensor
                finally:
                    self._loads.release(order)
            # The lease expired before the acknowledgement: another taker has the hand-off, or it
            # is available again.

    @contextmanager
    def view(self, key: TensorKey, *, timeout: float = 0.0) -> "Iterator[torch.Tensor | None]":
        """The tensor itself, not a copy: read-only shared memory, pinned inside the `with`.

        Raises:
            As `select`.
        """
        with self._pinned(key, timeout) as order:
            if order.header.kind == "none":
                yield None
            else:
                end = order.offset + order.nbytes
                window = self._loads.arena(order.boot)[order.offset : end]
                yield codec.tensor_over(window, order.header)

    def has_caches(self, keys: Sequence[TensorKey], *, timeout: float | None = None) -> list[bool]:
        """For each key, whether a live node holds a complete copy; False if unknown, also because
        the node does not answer or has too many requests.

        The indexes of this host are read first, without a request to the node. For 4,096 others it
        is one round trip to the store. `timeout` (seconds) bounds the call; with 0 the answer
        covers this host only. Without one, the node waits for the store as its measured round trip
        requires: 50 to 800 ms for 4,096 keys. A node that hangs costs a second then.
        """
        timeout = None if timeout is None else clamped_seconds(timeout)
        looks_further = timeout is None or timeout > 0
        deadline = None if timeout is None else time.monotonic() + timeout
        present = self._local_reads.listed(keys, remote=looks_further)
        unknown = [index for index, known in enumerate(present) if not known and looks_further]
        left, namespace = iter(unknown), self.namespace
        for part in split([keys[index].text for index in unknown]):
            bound, budget = CALL_SECONDS, None
            if deadline is not None:
                bound = clamped_seconds(deadline - time.monotonic())
                budget = NODE_SHARE * bound
            request = Contains(next_request_id(), namespace, list(part), budget)
            try:
                answers = self._session.call(request, bound)["present"]
            except Closed:
                raise
            except LookupBufferError:
                break
            for answer in answers:
                present[next(left)] = answer
        return present

    def prefetch(
        self, keys: Sequence[TensorKey], *, timeout: float = 0.0, wait_seconds: float = 0.0
    ) -> list[PrefetchHandle]:
        """Bring `keys` to this host and pin them; one handle each, in order.

        Returns when all have settled or `timeout` seconds have passed; a PENDING handle settles
        later. A key that no node holds is MISSING at once. With `wait_seconds` it is PENDING until
        it is published and fetched, for at most that time; a missing hand-off is MISSING at once.
        A transfer waits for its turn as long, without `wait_seconds` a minute.
        The caller passes each handle to `release`, settled or not. Never raises for a fault of the
        node, of Redis or of another node: such handles are MISSING or FAILED with a reason.
        """
        timeout, wait = clamped_seconds(timeout), clamped_seconds(wait_seconds)
        return self._prefetches.start(keys, timeout, wait_seconds=wait)

    def prefetch_and_claim(
        self,
        keys: Sequence[TensorKey],
        *,
        wait_seconds: float,
        timeout: float = 0.0,
        keeps: bool = True,
    ) -> tuple[list[PrefetchHandle], ClaimHandle]:
        """`prefetch` and `claim_all` of the same keys in one message, which saves a round trip for
        the claims of absent keys. Returns when `prefetch` does; the set may settle later."""
        timeout, wait = clamped_seconds(timeout), clamped_seconds(wait_seconds)
        claims = self._claims.register(keys, keeps)
        claimer = claims.request_id
        # If there is nothing to claim, or too much, nothing waits for claims or bytes.
        handles = self._prefetches.start(keys, timeout, claimer, wait if claimer else 0.0)
        if any(handle.reason == MissReason.NODE_DOWN for handle in handles):
            self._claims.fail([claims.request_id])
        return handles, claims

    def release(self, *held: PrefetchHandle | LoadOrder) -> None:
        """Release pins, and no longer wait for what no node holds yet. One-way; idempotent; never
        raises."""
        orders = self._prefetches.end([one for one in held if isinstance(one, PrefetchHandle)])
        self._loads.release(*orders, *(one for one in held if isinstance(one, LoadOrder)))

    def load(self, order: LoadOrder, *, out: "torch.Tensor | None" = None) -> "torch.Tensor | None":
        """Copy pinned bytes out of the arena, without a system call on a socket; works also after
        the node's death.

        Raises:
            NodeUnavailable: the arena of that boot is not mapped in this process, or a lane
                received the bytes and this process's device pool does not hold them.
            CodecError: `out` does not fit.
        """
        return self._loads.load(order, out)

    def arena(self, boot: str) -> memoryview:
        """The whole arena of `boot`, read-only, mapped until the view and its slices are released.
        The bytes at an order's offset are the order's while it is pinned. Raises as `load`."""
        return self._loads.arena(boot)

    def done(self, orders: Sequence[LoadOrder]) -> None:
        """Report that this rank of the engine has copied `orders`. One-way; never raises."""
        self._loads.done(orders, self._rank)

    # -- devices

    def join_lane(self, lane: SessionPool) -> None:
        """Receive tensors from the device pools of other processes into this one, from now on. The
        order of such a tensor names its lane, and `load` reads it from the pool. Call once; the
        caller closes the pool."""
        self._pool.join(lane)

    # -- claims and inspection

    def claim(
        self,
        key: TensorKey,
        *,
        lease_seconds: float,
        state: ClaimState = ClaimState.ENCODING,
        timeout: float = 0.0,
    ) -> ClaimAnswer:
        """Claim the right to produce `key`. A repeated call, as ENCODING, renews the claim; an
        INTENT lasts a second at most.

        While another client holds the claim, wait up to `timeout` seconds for the key to appear or
        for the claim to be free. Inserting the key, or closing this client, gives the claim back.
        If the store is down, the claim is granted: a fault costs at most a second production.

        Raises:
            NodeUnavailable: the node did not answer in time.
            ReadOnly: the node only reads. `claim_all` then settles as FAILED.
            BufferFull: this engine has too many claims.
            ConfigError: `lease_seconds` is not a valid time.
        """
        lease = checked_seconds("lease_seconds", lease_seconds)
        timeout = clamped_seconds(timeout)
        deadline = time.monotonic() + timeout
        with self._session.connection(timeout + CALL_SECONDS) as connection:
            wait = clamped_seconds(deadline - time.monotonic())
            request = Claim(next_request_id(), self.namespace, key.text, lease, state.value, wait)
            return ClaimAnswer.of(connection.call(request, wait + CALL_SECONDS))

    def release_claim(self, key: TensorKey) -> bool:
        """Give the claim back. Returns whether this client still held it."""
        request = ReleaseClaim(next_request_id(), self.namespace, key.text)
        return bool(self._session.call(request, CALL_SECONDS)["released"])

    def claim_all(
        self,
        keys: Sequence[TensorKey],
        *,
        wait_seconds: float,
        timeout: float = 0.0,
        keeps: bool = True,
    ) -> ClaimHandle:
        """Claim the right to produce all of `keys`, as intents, or none of them.

        Returns when the set has settled, when another client is known to hold one of the keys, or
        after `timeout` seconds. The node waits up to `wait_seconds` for claims that others hold,
        and holds none of the set during that wait; the set then settles later. The caller passes
        the set to `unclaim` unless all keys are produced. Never raises for a fault.

        Without `keeps` the client gives the claims back as soon as it hears that they are granted:
        a caller that produces nothing only waits for those who do.
        """
        return self._claims.claim_all(keys, wait_seconds, timeout, keeps)

    def encoding(self, keys: Sequence[TensorKey], *, lease_seconds: float) -> None:
        """Claim `keys`, which are being produced, or renew the claims. One-way; never raises for a
        fault.

        Raises:
            ConfigError: `lease_seconds` is not a valid time.
        """
        self._claims.encoding(keys, lease_seconds)

    def unclaim(self, keys: Sequence[TensorKey], waiter: ClaimHandle | None = None) -> None:
        """Give the claims for `keys` back, and end the wait of `waiter`. One-way; idempotent;
        never raises."""
        self._claims.unclaim(keys, waiter)

    def stats(self) -> dict[str, int]:
        """The node's gauges (items, bytes, pins, …) and counters (hits, misses by reason, …)."""
        return dict(self._session.call(Stats(next_request_id()), CALL_SECONDS)["stats"])

    @property
    def attached(self) -> bool:
        """Whether a node is connected now."""
        return self._session.is_connected

    @property
    def boot(self) -> str:
        """The boot id of the connected node, "" without one. Orders of an earlier boot can be
        loaded for a while longer, but their pins no longer exist."""
        return self._session.boot

    def close(self) -> None:
        """Close the session. Idempotent and bounded; the pins of this client are released."""
        self._session.close()

    def __enter__(self) -> "LookupBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- events of the session

    def _on_event(self, message: dict[str, Any]) -> None:
        handlers = {"settled": self._prefetches.on_event, "claimed": self._claims.on_event}
        handlers.get(message["event"], self._pool.on_event)(message)

    def _on_lost(self) -> None:
        self._prefetches.on_lost()
        self._claims.on_lost()
        self._pool.on_lost()

    def _on_connected(self) -> None:
        self._describe()
        self._pool.on_connected()

    def _describe(self) -> None:
        if self._parts is not None:
            request = Describe(next_request_id(), self.namespace, self._parts)
            try:
                self._session.post(request)
            except LookupBufferError:
                pass  # the session is lost again; the next one sends the parts

    # -- steps of insert, select and drop_select

    @contextmanager
    def _pinned(self, key: TensorKey, timeout: float) -> Iterator[LoadOrder]:
        """The order for the bytes of `key` on this host, pinned inside the `with`."""
        timeout = clamped_seconds(timeout)
        deadline = time.monotonic() + timeout
        with self._session.connection(timeout + CALL_SECONDS) as connection:
            wait = clamped_seconds(deadline - time.monotonic())
            request = Select(next_request_id(), self.namespace, key.text, wait)
            reply = connection.call(request, wait + CALL_SECONDS)
        if reply["state"] != "resident":
            if timeout:
                raise LookupTimeout(f"{key} did not appear within {timeout} s ({reply['reason']})")
            raise MissingTensor(f"{key}: {reply['reason']}")
        order = LoadOrder.of(reply)
        try:
            yield order
        finally:
            self._loads.release(order)

    def _load_or_give_back(self, order: LoadOrder, token: int, out: Tensor | None) -> Value:
        try:
            return self._loads.load(order, out)
        except BaseException:
            try:
                self._session.post(GiveBack(next_request_id(), token))
            except LookupBufferError:
                pass  # the session is over, and the lease with it
            raise

    def _acknowledge(self, connection: NodeConnection, token: int, lease_seconds: float) -> bool:
        """Whether the acknowledgement arrived within the lease."""
        request = Acknowledge(next_request_id(), token)
        try:
            bound = lease_seconds + LEASE_ANSWER_SECONDS + CALL_SECONDS
            return bool(connection.call(request, bound)["won"])
        except NodeUnavailable:
            # The connection broke, perhaps not the session. A repeated acknowledgement gets the
            # same answer.
            return bool(self._session.call(request, CALL_SECONDS)["won"])


def _take_error(key: TensorKey, timeout: float, reason: str) -> LookupBufferError:
    if reason == MissReason.NO_ROOM:
        return BufferFull(f"{key} is on another host, and the arena here has no room for a copy")
    if timeout and reason != MissReason.OWNER_DEAD:
        return LookupTimeout(f"{key} was not available within {timeout} s ({reason})")
    return MissingTensor(f"{key}: {reason}")
