"""Stand-ins for the two neighbours of the connector's scheduler side: the buffer's client and vLLM.

`LedgerBuffer` has the client's prefetch surface and keeps a ledger of every pin, so that a test can
ask whether bytes were still held when a worker read them. `Request` and `Feature` have the
attributes of vLLM's classes that the connector reads.

`Bench` is the scheduler side with all that surrounds it, for tests of its rules.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from connectors.ec.metadata import StepMetadata
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.settings import ConnectorSettings
from lookup_buffer.client.handles import ClaimHandle, LoadOrder, PrefetchState
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import ClaimOutcome

EMBED_BYTES = 8
EMBEDS = 4


@dataclass(slots=True, eq=False)
class LedgerHandle:
    """Looks like `PrefetchHandle`."""

    key: TensorKey
    state: PrefetchState
    reason: str = ""
    source: str = "local"
    order: LoadOrder | None = None
    is_released: bool = False

    def wait(self, timeout: float) -> PrefetchState:
        return self.state


@dataclass(slots=True, eq=False)
class Stored:
    """What the fleet knows of one item."""

    outcome: PrefetchState = PrefetchState.RESIDENT
    needs_fetch: bool = False
    rows: int = EMBEDS
    width: int = EMBED_BYTES // 4
    dtype: str = "float32"


@dataclass(slots=True)
class Fleet:
    """What the node answers to claims, and what it was told of them."""

    answers: ClaimOutcome = ClaimOutcome.GRANTED
    """Of a set that is asked for now."""
    sets: list[ClaimHandle] = field(default_factory=list)
    waits_seconds: list[float] = field(default_factory=list)
    encoding: list[tuple[list[str], float]] = field(default_factory=list)
    given_back: list[str] = field(default_factory=list)
    cancelled: list[ClaimHandle] = field(default_factory=list)

    def settle(self, state: ClaimOutcome, index: int = -1) -> None:
        """An answer arrives; a set that is PENDING again waits for another engine."""
        one = self.sets[index]
        one.key, one.holder = one.keys[0].text, "" if state is ClaimOutcome.GRANTED else "other:1"
        one.state = state


class LedgerBuffer:
    """Looks like `LookupBuffer`, as far as the scheduler side uses it."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.stored: dict[str, Stored] = {}
        self.pinned: dict[int, LedgerHandle] = {}
        self.pending: list[LedgerHandle] = []
        self.awaited: list[LedgerHandle] = []
        """What nobody has, and is waited for until `published` or `end_waits`."""
        self.calls: list[tuple[str, list[str], float]] = []
        self.is_closed = False
        self.boot = "b" * 16
        self.namespace = "0" * 64
        self._ticket = 0

    def prefetch(
        self, keys: Sequence[TensorKey], *, timeout: float = 0.0, wait_seconds: float = 0.0
    ) -> list[LedgerHandle]:
        self.calls.append(("prefetch", [key.mm_hash for key in keys], timeout))
        handles = []
        for key in keys:
            stored = self.stored.get(key.mm_hash)
            handle = LedgerHandle(key, PrefetchState.MISSING, "absent")
            if stored is None and wait_seconds:
                handle.state = PrefetchState.PENDING
                self.awaited.append(handle)
            elif stored is not None and stored.needs_fetch:
                handle.state, handle.reason = PrefetchState.PENDING, "fetching"
                self.pending.append(handle)
            elif stored is not None:
                self._settle(handle, stored.outcome, stored)
            handles.append(handle)
        return handles

    def prefetch_and_claim(
        self,
        keys: Sequence[TensorKey],
        *,
        wait_seconds: float,
        timeout: float = 0.0,
        keeps: bool = True,
    ) -> tuple[list[LedgerHandle], ClaimHandle]:
        ordered = sorted(keys, key=lambda key: key.text)
        claims = self.claim_all(ordered, wait_seconds=wait_seconds, keeps=keeps)
        return self.prefetch(keys, timeout=timeout), claims

    def _settle(
        self, handle: LedgerHandle, state: PrefetchState, stored: Stored | None = None
    ) -> None:
        if state is PrefetchState.RESIDENT:
            self._ticket += 1
            what = stored or Stored()
            header = TensorHeader.for_tensor(what.dtype, (what.rows, what.width))
            handle.order = LoadOrder(self.boot, self._ticket, 0, header.nbytes, 1, header)
            self.pinned[self._ticket] = handle
        handle.state = state
        handle.reason = "" if state is PrefetchState.RESIDENT else "node_down"

    def settle(self, index: int, state: PrefetchState) -> None:
        """An answer arrives for one pending handle."""
        handle = self.pending.pop(index)
        if not handle.is_released:
            self._settle(handle, state)

    def published(self, identifier: str) -> None:
        """Those who wait for the item have it, or it is on its way to them."""
        stored = self.stored[identifier]
        for handle in [one for one in self.awaited if one.key.mm_hash == identifier]:
            self.awaited.remove(handle)
            if stored.needs_fetch:
                self.pending.append(handle)
            elif not handle.is_released:
                self._settle(handle, stored.outcome, stored)

    def end_waits(self) -> None:
        """The node has waited for long enough."""
        for handle in self.awaited:
            handle.state = PrefetchState.MISSING
        self.awaited.clear()

    def lose_session(self, boot: str = "c" * 16) -> None:
        """Nothing that was pinned is so any more. `boot`: of the node that is there now."""
        self.boot = boot
        for handle in self.pinned.values():
            handle.state, handle.reason = PrefetchState.FAILED, "node_down"

    def release(self, *handles: LedgerHandle) -> None:
        for handle in handles:
            handle.is_released = True
            if handle.order is not None:
                self.pinned.pop(handle.order.ticket, None)

    def done(self, orders: Iterable[LoadOrder]) -> None:
        for order in orders:
            self.pinned.pop(order.ticket, None)

    def has_caches(self, keys: Sequence[TensorKey], *, timeout: float = 0.05) -> list[bool]:
        self.calls.append(("has_caches", [key.mm_hash for key in keys], timeout))
        found = [self.stored.get(key.mm_hash) for key in keys]
        return [item is not None and (timeout > 0 or not item.needs_fetch) for item in found]

    def claim_all(
        self,
        keys: Sequence[TensorKey],
        *,
        wait_seconds: float,
        timeout: float = 0.0,
        keeps: bool = True,
    ) -> ClaimHandle:
        one = ClaimHandle(list(keys), threading.Condition(), self.fleet.answers, keeps=keeps)
        self.fleet.sets.append(one)
        self.fleet.waits_seconds.append(wait_seconds)
        return one

    def encoding(self, keys: Sequence[TensorKey], *, lease_seconds: float) -> None:
        self.fleet.encoding.append(([key.mm_hash for key in keys], lease_seconds))

    def unclaim(self, keys: Sequence[TensorKey], waiter: ClaimHandle | None = None) -> None:
        self.fleet.given_back += [key.mm_hash for key in keys]
        if waiter is not None and waiter.state is ClaimOutcome.PENDING:
            self.fleet.cancelled.append(waiter)

    def enter(self, fingerprint: str, parts: Mapping[str, str] | None = None) -> None:
        self.namespace = fingerprint

    def close(self) -> None:
        self.is_closed = True


@dataclass(frozen=True, slots=True)
class Position:
    offset: int
    length: int

    def get_num_embeds(self) -> int:
        return self.length


@dataclass(slots=True)
class Feature:
    identifier: str
    mm_position: Position
    modality: str = "image"
    data: dict[str, Any] | None = None


class Fields(dict[str, Any]):
    """Looks like `MultiModalKwargsItem`."""

    def get_data(self) -> dict[str, Any]:
        return {name: element.data for name, element in self.items()}


def pixels(nbytes: int = 4096) -> Fields:
    """Fields of an item that carries its media."""
    return Fields(pixel_values=SimpleNamespace(data=SimpleNamespace(nbytes=nbytes)))


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    mm_features: list[Feature]
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    lora_request: Any = None
    ec_transfer_params: Any = None

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.mm_features[index].mm_position.length


def make_request(
    request_id: str, *identifiers: str, gap: int = 2, metadata_only: bool = False
) -> Request:
    """A prompt of `gap` tokens, an item of `EMBEDS`, `gap` tokens, an item, ... and a tail."""
    features: list[Feature] = []
    offset = gap
    for identifier in identifiers:
        data = None if metadata_only else pixels()
        features.append(Feature(identifier, Position(offset, EMBEDS), data=data))
        offset += EMBEDS + gap
    return Request(request_id, features, num_tokens=offset)


class _Everything(dict[str, list[int]]):
    """Whatever was allocated is encoded."""

    def get(self, *_: Any) -> Any:
        return range(1000)


def step_output(
    tokens: int = 1,
    *,
    freed: Sequence[str] = (),
    finished: Iterable[str] = (),
    new: Sequence[Request] = (),
    encoded: Mapping[str, list[int]] | None = None,
    scheduled: Iterable[str] = (),
) -> Any:
    """The part of vLLM's SchedulerOutput that the connector reads."""
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens=dict.fromkeys(scheduled, 1),
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=request.request_id,
                mm_features=request.mm_features,
                lora_request=request.lora_request,
            )
            for request in new
        ],
        scheduled_encoder_inputs=_Everything() if encoded is None else dict(encoded),
        free_encoder_mm_hashes=list(freed),
        finished_req_ids=set(finished),
    )


WAIT_SECONDS = 5.0
METADATA_WAIT_SECONDS = 20.0
BOUND_SECONDS = 30.0
LEASE_SECONDS = 12.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """One scheduler side with its surroundings."""

    def __init__(
        self,
        *,
        producer: bool = True,
        consumer: bool = True,
        steps_in_flight: int = 2,
        encode_rows: int = 1 << 13,
        **raw: Any,
    ) -> None:
        self.buffer = LedgerBuffer()
        self.clock = Clock()
        settings = ConnectorSettings(
            **{
                "fetch_wait_seconds": WAIT_SECONDS,
                "metadata_wait_seconds": METADATA_WAIT_SECONDS,
                "idle_wait_seconds": 0,
                "capacity_bytes": "64MiB",
                **raw,
            }
        )
        shape = EngineShape(
            producer, consumer, steps_in_flight, EMBED_BYTES, encode_rows=encode_rows
        )
        client: Any = self.buffer
        self.scheduler = EcScheduler(
            client, settings, shape, metadata_fields=lambda _: set(), clock=self.clock
        )

    def ensure(self, request: Any, computed: int = 0) -> bool:
        return self.scheduler.gate.ensure_cache_available(request, computed)

    def allocate(self, request: Any, index: int = 0) -> bool:
        """What vLLM does when it makes room: ask, allocate, tell."""
        hit = self.scheduler.has_cache_item(request.mm_features[index].identifier)
        self.scheduler.item_allocated(request, index, is_hit=hit)
        return hit

    def build(self, *args: Any, **kwargs: Any) -> StepMetadata:
        return self.scheduler.build_metadata(step_output(*args, **kwargs))

    def store(self, identifier: str, **kwargs: Any) -> None:
        self.buffer.stored[identifier] = Stored(**kwargs)
        self.buffer.published(identifier)

    def prefetched(self) -> list[list[str]]:
        return [keys for name, keys, _ in self.buffer.calls if name == "prefetch"]


def make_bench(answers: ClaimOutcome = ClaimOutcome.PENDING, **raw: object) -> Bench:
    """The node answers a set of claims when the test says so."""
    raw = {"claim_wait_seconds": BOUND_SECONDS, "claim_lease_seconds": LEASE_SECONDS, **raw}
    bench = Bench(**raw)  # type: ignore[arg-type]
    bench.buffer.fleet.answers = answers
    return bench


def counted(bench: Bench) -> dict[str, int]:
    totals = bench.scheduler.counters.totals()
    return {name: n for name, n in totals.items() if name.startswith(("claim:", "encode:"))}


def claimed(bench: Bench) -> list[list[str]]:
    return [[key.mm_hash for key in one.keys] for one in bench.buffer.fleet.sets]
