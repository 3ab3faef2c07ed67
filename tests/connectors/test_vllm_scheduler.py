"""The pin protocol under vLLM's own scheduler, with too little of everything, on a ledger of pins.

What must hold in every step, `DrivenEngine` asserts; here it is given requests, and comes to rest.
On real nodes: test_vllm_scheduler_nodes.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from connector_standins import EMBED_BYTES, EMBEDS, LedgerBuffer, LedgerHandle, Stored
from connectors.ec import seat as ec_seat
from lookup_buffer.client.handles import LoadOrder, PrefetchState
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import InsertOutcome
from patience import scaled
from scheduler_drive import DrivenEngine, Room, content, output_of

WIDTH = EMBED_BYTES // 4


class LedgerFleet(LedgerBuffer):
    """Has bytes to load as well.

    As with a real node, the arena of one that is lost stays mapped: what was pinned there loads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._orphans: dict[int, LedgerHandle] = {}
        self._boots = 0

    def keep(
        self,
        name: str,
        outcome: PrefetchState = PrefetchState.RESIDENT,
        *,
        needs_fetch: bool = False,
    ) -> None:
        self.stored[content(name)] = Stored(outcome, needs_fetch)
        self.published(content(name))

    def lose_node(self) -> None:
        self.boot = ""
        self._orphans |= self.pinned
        lost = [*self.pending, *self.awaited, *self.pinned.values()]
        self.pinned.clear()
        for handle in lost:
            if not handle.is_released:
                handle.reason, handle.state = "node_down", PrefetchState.FAILED
        self.pending.clear()
        self.awaited.clear()

    def find_node(self) -> None:
        if not self.boot:
            self._boots += 1
            self.boot = f"{self._boots:016}"

    def is_held(self, load: Any) -> bool:
        """Whether the bytes may be read now."""
        order = load.order
        return order.ticket in (self.pinned if order.boot == self.boot else self._orphans)

    def prefetch(
        self, keys: Sequence[TensorKey], *, timeout: float = 0.0, wait_seconds: float = 0.0
    ) -> list[LedgerHandle]:
        if self.boot:
            return super().prefetch(keys, timeout=timeout, wait_seconds=wait_seconds)
        return [LedgerHandle(key, PrefetchState.FAILED, "node_down") for key in keys]

    def load(self, order: LoadOrder) -> Any:
        return output_of((self.pinned | self._orphans)[order.ticket].key.mm_hash, WIDTH)

    def insert(self, key: TensorKey, tensor: Any, **_: Any) -> InsertOutcome:
        self.stored.setdefault(key.mm_hash, Stored())
        return InsertOutcome.STORED


NAMES = "ABCDEFGH"
TURNS = 1000
REST_SECONDS = scaled(10.0)
FETCH_WAIT_SECONDS = 0.005
STATES = [PrefetchState.RESIDENT] * 3 + [PrefetchState.MISSING, PrefetchState.FAILED]
ROOMS = {
    "plenty": Room(blocks=100, step_tokens=100, cache_items=4, step_items=10),
    "tight": Room(),
    "one item": Room(cache_items=1, step_items=1),
    "one block less": Room(blocks=9, whole_prompts=False, step_tokens=6),
    "prefix": Room(prefix_caching=True, blocks=14),
    "priority": Room(policy="priority", blocks=10, whole_prompts=False, cache_items=3),
    "async": Room(is_async=True),
    "async, one item": Room(is_async=True, cache_items=1, step_items=1, blocks=10),
    "async, prefix": Room(is_async=True, prefix_caching=True, blocks=14, whole_prompts=False),
    "async, priority": Room(is_async=True, policy="priority", blocks=10, whole_prompts=False),
}
MakeEngine = Callable[..., DrivenEngine]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> LedgerFleet:
    """What engines that are made in the test are connected to."""
    fleet = LedgerFleet()

    def open_buffer(config: Any, settings: Any, rank: int | None) -> Any:
        ec_seat.identity(config, settings)
        return fleet

    monkeypatch.setattr(ec_seat, "open_buffer", open_buffer)
    return fleet


@pytest.fixture
def make_engine(fleet: LedgerFleet) -> Iterator[MakeEngine]:
    engines: list[DrivenEngine] = []

    def make(room: Room, **values: Any) -> DrivenEngine:
        settings = {
            "fetch_wait_seconds": FETCH_WAIT_SECONDS,
            "metadata_wait_seconds": FETCH_WAIT_SECONDS,
            "prefetch_bytes": 4 * EMBEDS * EMBED_BYTES,
        }
        engine = DrivenEngine(room, is_held=fleet.is_held, **{**settings, **values})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def finish(engine: DrivenEngine, fleet: LedgerFleet) -> None:
    """Every request comes to an end, and then nothing is held."""
    deadline = time.monotonic() + REST_SECONDS
    while engine.unfinished:
        assert time.monotonic() < deadline, f"stuck: {engine.unfinished}"
        if fleet.pending:
            fleet.settle(0, PrefetchState.MISSING)
        engine.step()
    while fleet.pending:
        fleet.settle(0, PrefetchState.RESIDENT)
    engine.come_to_rest()
    assert fleet.pinned == {}


class Traffic:
    """Random requests, aborts, answers of the fleet, and a node that comes and goes."""

    def __init__(self, fleet: LedgerFleet, seed: int, misnamed: float = 0.0) -> None:
        self._fleet = fleet
        self._misnamed = misnamed
        self._random = random.Random(seed)
        self.count = 0
        self.bare: set[str] = set()
        self.misnaming: set[str] = set()
        """Requests that call longer content by the names of what the others mean."""

    def turn(self, engine: DrivenEngine) -> None:
        roll = self._random.random()
        if roll < 0.25 and len(engine.unfinished) < 8:
            self._request(engine)
        elif roll < 0.28 and engine.unfinished:
            engine.abort(self._random.choice(engine.unfinished))
        elif roll < 0.50:
            state = self._random.choice(STATES)
            needs_fetch = self._random.random() < 0.5
            self._fleet.keep(self._random.choice(NAMES), state, needs_fetch=needs_fetch)
        elif roll < 0.55:
            self._fleet.stored.pop(content(self._random.choice(NAMES)), None)
        elif roll < 0.75 and self._fleet.pending:
            index = self._random.randrange(len(self._fleet.pending))
            self._fleet.settle(index, self._random.choice(STATES))
        engine.step()

    def _request(self, engine: DrivenEngine) -> None:
        self.count += 1
        name = f"r{self.count}"
        is_bare = self._random.random() < 0.3
        if is_bare:
            self.bare.add(name)
        misnames = self._misnamed > self._random.random()
        if misnames:
            self.misnaming.add(name)
        engine.add(
            name,
            *self._random.choices(NAMES, k=self._random.randint(1, 3)),
            metadata_only=is_bare,
            embeds=EMBEDS + misnames,
            max_tokens=self._random.randint(1, 8),
            priority=self._random.randint(0, 3),
        )

    def node_comes_or_goes(self) -> None:
        roll = self._random.random()
        if roll < 0.02:
            self._fleet.lose_node()
        elif roll < 0.10:
            self._fleet.find_node()


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("node", ["lasts", "comes and goes"])
def test_random_traffic(
    node: str,
    room: str,
    fleet: LedgerFleet,
    make_engine: MakeEngine,
) -> None:
    traffic = Traffic(fleet, seed=sum(room.encode()))

    def before_hook(_: str) -> None:
        if node != "lasts":
            traffic.node_comes_or_goes()

    engine = make_engine(ROOMS[room], before_hook=before_hook)
    for _ in range(TURNS):
        traffic.turn(engine)
    finish(engine, fleet)
    failed = {name for name, reason in engine.reasons.items() if reason == "error"}
    assert failed <= traffic.bare, "who carries media is never failed"
    assert len(engine.reasons) == traffic.count
    # Else nothing of all this was put to the test.
    assert min(len(engine.loaded), len(engine.encoded), len(failed)) > 10
    if "priority" in room or "less" in room:
        assert engine.preemptions > 10


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
@pytest.mark.parametrize("is_bare", [False, True], ids=["media", "metadata alone"])
def test_node_lost_before_any_call_of_the_scheduler(
    is_bare: bool,
    is_async: bool,
    fleet: LedgerFleet,
    make_engine: MakeEngine,
) -> None:
    """The node does not come back: only a request that needs it fails."""
    ends: set[str] = set()
    for fatal in range(1000):
        fleet.find_node()
        for name in "AB":
            fleet.keep(name)
        calls = 0

        def before_hook(_: str, fatal: int = fatal) -> None:
            nonlocal calls
            calls += 1
            if calls == fatal + 1:
                fleet.lose_node()

        engine = make_engine(Room(is_async=is_async), before_hook=before_hook)
        engine.add("one", "A", "B", "A", metadata_only=is_bare, max_tokens=2)
        engine.step()
        engine.add("other", "C", max_tokens=2)
        finish(engine, fleet)
        assert engine.reasons["other"] == "length"
        ends.add(engine.reasons["one"])
        if calls <= fatal:
            break
    assert ends == ({"length", "error"} if is_bare else {"length"})


@pytest.mark.parametrize("room", ["plenty", "tight", "async"])
def test_random_traffic_with_some_wrong_identifiers(
    room: str, fleet: LedgerFleet, make_engine: MakeEngine
) -> None:
    """vLLM may fail a request with other rows in vLLM's cache; no request loads an item that does
    not fit."""
    traffic = Traffic(fleet, seed=sum(room.encode()), misnamed=0.3)
    engine = make_engine(ROOMS[room])
    for _ in range(TURNS):
        traffic.turn(engine)
    finish(engine, fleet)
    assert len(engine.reasons) == traffic.count
    answered = {name for name, reason in engine.reasons.items() if reason == "length"}
    assert min(len(engine.loaded), len(answered & traffic.misnaming)) > 10


@pytest.mark.parametrize("bare", [0, 1], ids=["first", "second"])
def test_an_image_with_media_and_without_fails_its_request_alone(
    bare: int, fleet: LedgerFleet, make_engine: MakeEngine
) -> None:
    """One uuid in two parts of a prompt, as of two modalities: vLLM would encode what has no
    media."""
    engine = make_engine(Room())
    engine.add("both", "A", "A", bare=[bare], max_tokens=2)
    engine.add("other", "C", max_tokens=2)
    finish(engine, fleet)
    assert engine.reasons == {"both": "error", "other": "length"}


def test_an_evicted_image_that_a_prompt_repeats_is_loaded_again(
    fleet: LedgerFleet,
    make_engine: MakeEngine,
) -> None:
    """An encoder cache of one item; what carries no media has no other way."""
    for is_bare in (False, True):
        for name in "AB":
            fleet.keep(name)
        engine = make_engine(Room(cache_items=1, step_items=1))
        engine.add("one", "A", "B", "A", metadata_only=is_bare)
        finish(engine, fleet)
        assert engine.loaded == [content(name) for name in "ABA"]
        assert engine.encoded == []
