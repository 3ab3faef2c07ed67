"""What the arena holds against a model: bytes are charged once and released once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hypothesis_profiles import examples
from lookup_buffer.errors import BufferFull, TensorTooLarge
from lookup_buffer.node import arena as arena_module
from lookup_buffer.node.arena import Arena, Evicting
from lookup_buffer.node.items import Item
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.shm.index import IS_ORDERED, LocalIndexReader, digest_of

CAPACITY = 10_000
NAMES = [f"k{number}" for number in range(8)]
OWNERS = [1, 2]


def header_of(nbytes: int) -> TensorHeader:
    return TensorHeader("uint8", (nbytes,), nbytes)


def address_of(name: str) -> tuple[str, str]:
    return ("n" * 64, name)


@dataclass(eq=False)
class ModelItem:
    item: Item
    ready: bool = False
    gone: bool = False
    pins: dict[int, tuple[int, set[int] | None]] = field(default_factory=dict)

    @property
    def charged_bytes(self) -> int:
        return max(1, -(-self.item.nbytes // 64)) * 64


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.changes: list[tuple[str, str]] = []
        """What `on_change` was called with, since it was last checked: key and reason."""
        self.arena = Arena(
            CAPACITY, lambda address, why: self.changes.append((address[1], why)), lambda: self.now
        )
        self.reader = LocalIndexReader(self.arena.local_index.fd)
        self.found: dict[str, ModelItem] = {}
        self.lingering: list[ModelItem] = []  # gone, but pinned
        self.generation = 0
        self.tickets_given: set[int] = set()

    def everything(self) -> list[ModelItem]:
        return [*self.found.values(), *self.lingering]

    def held_bytes(self) -> int:
        return sum(m.item.nbytes for m in self.everything() if m.pins or not m.ready)

    def note_removed(self) -> dict[str, str]:
        removed = {}
        changes, self.changes = self.changes, []
        for name, reason in changes:
            model = self.found.pop(name)
            assert model.item.gone
            assert model.ready, "a reservation was taken away from its writer"
            assert reason, "nothing appeared"
            if reason == "evicted":
                assert not model.pins, "a pinned item was evicted"
            if reason == "expired":
                assert model.item.expires_at is not None
                assert model.item.expires_at <= self.now
            model.gone = True
            if model.pins:
                self.lingering.append(model)
            removed[name] = reason
        return removed

    @rule(
        name=st.sampled_from(NAMES),
        nbytes=st.one_of(st.integers(0, 400), st.integers(1000, CAPACITY + 100)),
        ttl=st.sampled_from([None, None, 3.0, 20.0]),
    )
    def reserve(self, name: str, nbytes: int, ttl: float | None) -> None:
        held = self.held_bytes()
        try:
            item = self.arena.reserve(
                address_of(name), header_of(nbytes), origin="local", ttl_seconds=ttl
            )
        except TensorTooLarge:
            assert nbytes > CAPACITY - CAPACITY % 64
            self.note_removed()
            assert name not in self.found
            return
        except BufferFull:
            busy = any(model.pins or not model.ready for model in self.everything())
            assert busy, "an arena without pins and writers takes whatever fits into it"
            self.note_removed()
            assert name not in self.found
            return
        self.note_removed()
        if item is None:
            expires_at = self.found[name].item.expires_at
            assert not self.found[name].ready or expires_at is None or expires_at > self.now
            return
        assert name not in self.found, "its address is in use"
        assert nbytes == 0 or held == 0 or held + nbytes <= CAPACITY / 3
        assert item.generation > self.generation
        self.generation = item.generation
        self.found[name] = ModelItem(item)

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def commit(self, name: str, pinned: bool) -> None:
        model = self.found.get(name)
        if model is None or model.ready:
            return
        address = address_of(name)
        assert self.arena.touch(address) is self.arena.peek(address) is None, "it is not complete"
        pin = self.arena.commit(model.item, 7, 1)  # the writer's own pin is never refused
        model.ready = True
        assert pin.item is model.item
        assert pin.ticket not in self.tickets_given
        self.tickets_given.add(pin.ticket)
        model.pins[pin.ticket] = (1, None)
        assert self.changes == [(name, "")]
        self.changes.clear()
        if not pinned:
            self.arena.release([pin.ticket], 1)
            self.drop(pin.ticket, 1)

    @rule(name=st.sampled_from(NAMES))
    def abandon(self, name: str) -> None:
        model = self.found.get(name)
        if model is not None and not model.ready:
            self.arena.abandon(model.item)
            del self.found[name]

    @rule(name=st.sampled_from(NAMES), reason=st.sampled_from(["checksum", "dropped"]))
    def remove(self, name: str, reason: str) -> None:
        model = self.found.get(name)
        if model is not None and model.ready:
            self.arena.remove(model.item, reason)
            self.arena.remove(model.item, reason)  # idempotent
            assert self.note_removed() == {name: reason}

    @rule(
        name=st.sampled_from(NAMES),
        owner=st.sampled_from(OWNERS),
        ranks=st.sampled_from([None, {0}, {0, 1, 2}]),
    )
    def pin(self, name: str, owner: int, ranks: set[int] | None) -> None:
        model = self.found.get(name)
        item = self.arena.touch(address_of(name))
        expired = self.note_removed()
        if model is None or not model.ready or name in expired:
            assert item is None
            return
        assert item is model.item
        held = self.held_bytes()
        try:
            pin = self.arena.pin(item, owner, ranks)
        except BufferFull:
            assert not model.pins
            assert held
            assert held + item.nbytes > CAPACITY / 3
            return
        assert pin.ticket not in self.tickets_given
        self.tickets_given.add(pin.ticket)
        model.pins[pin.ticket] = (owner, None if ranks is None else set(ranks))

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def release(self, data: st.DataObject, owner: int) -> None:
        ticket = data.draw(st.sampled_from([*sorted(self.tickets_given), 999_999]))
        self.arena.release([ticket], owner)
        self.drop(ticket, owner)

    @rule(data=st.data(), rank=st.integers(0, 3))
    def done(self, data: st.DataObject, rank: int) -> None:
        ticket = data.draw(st.sampled_from([*sorted(self.tickets_given), 999_999]))
        self.arena.done([ticket], rank)
        for model in self.everything():
            owner, ranks = model.pins.get(ticket, (0, None))
            if ranks is not None:
                ranks.discard(rank)
                if not ranks:
                    self.drop(ticket, owner)

    def drop(self, ticket: int, owner: int) -> None:
        for model in self.everything():
            if ticket in model.pins and model.pins[ticket][0] == owner:
                del model.pins[ticket]
        self.lingering = [model for model in self.lingering if model.pins]

    @rule(owner=st.sampled_from(OWNERS))
    def end_of_session(self, owner: int) -> None:
        pins = [(t, o) for m in self.everything() for t, (o, _) in m.pins.items() if o == owner]
        assert self.arena.holds_pins(owner) == bool(pins)
        self.arena.release_all(owner)
        for ticket, _ in pins:
            self.drop(ticket, owner)
        assert not self.arena.holds_pins(owner)

    @rule(seconds=st.floats(0.1, 10.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.arena.remove_expired()
        self.note_removed()
        for model in self.found.values():
            expires_at = model.item.expires_at
            assert not model.ready or expires_at is None or expires_at > self.now

    @precondition(lambda self: self.found or self.lingering)
    @rule()
    def everybody_leaves(self) -> None:
        for owner in OWNERS:
            self.end_of_session(owner)
        for name in list(self.found):
            self.abandon(name)
            self.remove(name, "dropped")
        gauges = self.arena.gauges()
        left = (gauges.items, gauges.used_bytes, gauges.pinned_bytes, gauges.reserved_bytes)
        assert (*left, gauges.pins) == (0, 0, 0, 0, 0)

    @invariant()
    def gauges_are_what_the_model_says(self) -> None:
        models = self.everything()
        gauges = self.arena.gauges()
        assert gauges.items == len(self.found)
        assert gauges.used_bytes == sum(m.charged_bytes for m in models)
        assert self.arena._entries_bytes == sum(m.item.entry_bytes for m in models)
        assert gauges.reserved_bytes == sum(m.item.nbytes for m in models if not m.ready)
        assert gauges.pinned_bytes == sum(m.item.nbytes for m in models if m.pins)
        assert gauges.pins == sum(len(m.pins) for m in models)

    @invariant()
    def items_do_not_overlap(self) -> None:
        blocks = sorted((m.item.offset, m.charged_bytes) for m in self.everything())
        end = 0
        for offset, nbytes in blocks:
            assert offset >= end
            end = offset + nbytes
        assert end <= CAPACITY

    @invariant()
    def the_local_index_lists_what_is_found(self) -> None:
        for name in NAMES if IS_ORDERED else ():
            entry, model = self.reader.find(digest_of(*address_of(name))), self.found.get(name)
            if model is not None and model.ready and model.item.expires_at is None:
                assert entry is not None
                assert entry.offset == model.item.offset
            else:
                assert entry is None

    def teardown(self) -> None:
        self.reader.close()
        self.arena.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=examples(120), stateful_step_count=40)


class Bench:
    """A arena, its clock and what it reported: keys and reasons of what was removed."""

    def __init__(self, capacity_bytes: int) -> None:
        self.now = 0.0
        self.removed: list[tuple[str, str]] = []
        self.arena = Arena(capacity_bytes, self.on_change, lambda: self.now)

    def on_change(self, address: tuple[str, str], reason: str) -> None:
        if reason:
            self.removed.append((address[1], reason))

    def reserve(self, name: str, nbytes: int, *, loan: bool = False) -> Item:
        item = self.arena.reserve(
            address_of(name), header_of(nbytes), origin="x", ttl_seconds=None, loan=loan
        )
        assert item is not None
        return item

    def settle(self, item: Item) -> Item:
        """Commit it, without a pin."""
        self.arena.release([self.arena.commit(item, 0, 1).ticket], 1)
        return item

    def fill(self, name: str, nbytes: int) -> Item:
        return self.settle(self.reserve(name, nbytes))

    def hand_off(self, name: str, nbytes: int, *, wanted: bool = False) -> Item:
        return self.settle(
            self.arena.reserve_handoff(
                address_of(name), header_of(nbytes), ttl_seconds=300.0, wanted=wanted
            )
        )


@contextmanager
def bench_of(capacity_bytes: int = CAPACITY) -> Iterator[Bench]:
    bench = Bench(capacity_bytes)
    yield bench
    bench.arena.close()


@pytest.mark.parametrize(("touches", "evicted"), [(True, "1"), (False, "0")])
def test_the_least_recently_used_goes_first(touches: bool, evicted: str) -> None:
    """A look-up without a touch does not keep an item."""
    with bench_of(4 * 64) as bench:
        for number in range(4):
            bench.now = float(number)
            bench.fill(str(number), 64)
        bench.now = 10.0
        look_up = bench.arena.touch if touches else bench.arena.peek
        assert look_up(address_of("0")) is not None
        bench.fill("new", 64)
        assert bench.removed == [(evicted, "evicted")]


def test_larger_than_the_arena_never_fits_even_by_rounding() -> None:
    with bench_of(1000) as bench:
        with pytest.raises(TensorTooLarge):
            bench.fill("a", 1001)
        with pytest.raises(TensorTooLarge):
            bench.fill("a", 1000)  # 1024 bytes of blocks in an arena of 960
        bench.fill("a", 960)


def test_a_none_passes_beside_a_large_write() -> None:
    with bench_of() as bench:
        none = bench.reserve("a", 0)
        bench.reserve("b", CAPACITY // 2)
        bench.arena.commit(none, 0, 1)


def test_the_ranks_of_a_ticket_report_in_any_order_and_count_once() -> None:
    with bench_of() as bench:
        ticket = bench.arena.pin(bench.fill("a", 64), owner=1, ranks=range(2)).ticket
        for rank in (1, 1, 5):
            bench.arena.done([ticket], rank)
            assert bench.arena.gauges().pins == 1
        bench.arena.done([ticket], 0)
        assert bench.arena.gauges().pins == 0
        bench.arena.done([ticket], 0)


def test_who_waits_for_room_is_told_when_bytes_are_freed_or_may_be_evicted() -> None:
    with bench_of() as bench:
        told: list[int] = []
        bench.arena.on_room = lambda: told.append(1)
        pins = [bench.arena.commit(bench.reserve("a", 64), 0, 1)]
        pins.append(bench.arena.pin(pins[0].item, 2))
        bench.arena.release([pins[0].ticket], 1)
        assert not told, "it is still pinned"
        bench.arena.release([pins[1].ticket], 2)
        assert len(told) == 1
        bench.arena.remove(pins[0].item, "dropped")
        bench.arena.abandon(bench.reserve("b", 64))
        assert len(told) == 3
        bench.arena.on_room = lambda: None
        bench.arena.abandon(bench.reserve("b", 64))
        assert len(told) == 3


def test_hand_offs_are_never_evicted_and_their_pins_cost_nothing() -> None:
    with bench_of() as bench:
        items = [bench.hand_off(str(number), 600) for number in range(7)]
        with pytest.raises(BufferFull, match="half"):
            bench.hand_off("more", 600)
        for item in items:
            bench.arena.pin(item, 1)
        for number in range(20):
            bench.fill(f"shared{number}", 1000)
        assert all(bench.arena.touch(item.address) is item for item in items)
        gauges = bench.arena.gauges()
        assert (gauges.pinned_bytes, gauges.reserved_bytes) == (0, 0)
        assert gauges.handoff_bytes == 7 * 640
        with pytest.raises(TensorTooLarge, match="half"):
            bench.hand_off("large", CAPACITY // 2 + 1)


def test_a_replaced_hand_off_is_charged_until_its_last_reader_has_it() -> None:
    with bench_of() as bench:
        old = bench.hand_off("a", 640)
        pin = bench.arena.pin(old, 1)
        new = bench.hand_off("a", 1280)
        assert new.generation > old.generation
        assert bench.arena.touch(address_of("a")) is new
        assert bench.removed == [("a", "replaced")]
        assert bench.arena.gauges().handoff_bytes == 640 + 1280
        bench.arena.release([pin.ticket], 1)
        assert bench.arena.gauges().handoff_bytes == 1280


def test_a_hand_off_is_not_replaced_by_one_that_finds_no_place() -> None:
    with bench_of() as bench:
        slots = [bench.fill(f"shared{number}", 640) for number in range(CAPACITY // 640)]
        for item in slots[::4]:
            bench.arena.pin(item, 1)
        old = bench.hand_off("a", 640)
        bench.removed.clear()
        with pytest.raises(BufferFull):
            bench.hand_off("a", CAPACITY // 2 - 200)
        assert bench.arena.touch(address_of("a")) is old
        assert bench.removed == []


def test_an_unpinned_hand_off_makes_room_for_its_next_generation() -> None:
    with bench_of() as bench:
        bench.hand_off("a", 3200)
        new = bench.hand_off("a", 3200)
        assert bench.removed == [("a", "replaced")]
        assert bench.arena.gauges().handoff_bytes == 3200
        bench.arena.pin(new, 1)
        with pytest.raises(BufferFull, match="half"):
            bench.hand_off("a", 3200)


def test_a_hand_off_beyond_the_share_is_kept_if_its_removal_would_not_make_room() -> None:
    with bench_of() as bench:
        bench.hand_off("full", 4800)
        beyond = bench.hand_off("a", 640, wanted=True)
        assert bench.arena.gauges().handoff_bytes == 4800 + 640
        with pytest.raises(BufferFull, match="half"):
            bench.hand_off("a", 640)
        assert bench.arena.touch(address_of("a")) is beyond
        assert bench.removed == []


def test_what_has_expired_is_removed_in_parts_and_never_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "EXPIRED_PAGE", 10)
    with bench_of() as bench:
        for number in range(25):
            bench.hand_off(str(number), 64)
        assert not bench.arena.remove_expired()
        bench.now = 300.0
        for removed in (10, 20, 25):
            assert bench.arena.remove_expired()
            assert bench.removed == [(str(n), "expired") for n in range(removed)]
            assert bench.arena.gauges().items == 25 - removed
        assert not bench.arena.remove_expired()
        bench.hand_off("a", 64)
        bench.now = 600.0
        assert bench.arena.hold(address_of("a"), 1) is None


def test_what_is_in_the_way_is_evicted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "EVICTED_MAX", 10)
    with bench_of(64 * 100) as bench:
        for number in range(100):
            bench.fill(str(number), 64)
        for evicted in (10, 20):
            with pytest.raises(Evicting):
                bench.fill("large", 25 * 64)
            assert bench.removed == [(str(n), "evicted") for n in range(evicted)]
        bench.fill("large", 25 * 64)
        assert len(bench.removed) == 25
        assert bench.arena.gauges().items == 76


def test_a_loan_is_never_found_and_goes_with_its_last_pin() -> None:
    with bench_of() as bench:
        arena = bench.arena
        mine = bench.hand_off("a", 64)
        loan = bench.reserve("a", 1000, loan=True)
        assert arena.gauges().reserved_bytes == 1000
        pins = [arena.commit(loan, 5, 1), arena.pin(loan, 2)]
        assert arena.touch(address_of("a")) is mine
        assert arena.addresses() == [mine.address]
        assert arena.items_of({mine.address[0]}) == [mine]
        assert arena.gauges().pinned_bytes == 1000
        for pin in pins:
            arena.release([pin.ticket], pin.owner)
        assert arena.gauges().used_bytes == 64
        arena.abandon(bench.reserve("b", 10, loan=True))
        gauges = arena.gauges()
        assert (gauges.used_bytes, gauges.reserved_bytes, gauges.items) == (64, 0, 1)
        assert bench.removed == []
