"""The inventory against a model: bytes are charged once and released once."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hypothesis_profiles import examples
from lookup_buffer.errors import BufferFull, TensorTooLarge
from lookup_buffer.node.inventory import Inventory, Item
from lookup_buffer.protocol.header import TensorHeader

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


class InventoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.inventory = Inventory(CAPACITY, lambda: self.now)
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
        for item, reason in self.inventory.take_removed():
            name = item.address[1]
            model = self.found.pop(name)
            assert model.item is item
            assert model.ready, "a reservation was taken away from its writer"
            if reason == "evicted":
                assert not model.pins, "a pinned item was evicted"
            if reason == "expired":
                assert item.expires_at is not None
                assert item.expires_at <= self.now
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
        if name in self.found:
            assert self.inventory.holds(address_of(name))
            return
        held = self.held_bytes()
        try:
            item = self.inventory.reserve(
                address_of(name), header_of(nbytes), origin="local", ttl_seconds=ttl
            )
        except TensorTooLarge:
            assert nbytes > CAPACITY - CAPACITY % 64
            return
        except BufferFull:
            busy = any(model.pins or not model.ready for model in self.everything())
            assert busy, "an arena without pins and writers takes whatever fits into it"
            self.note_removed()
            return
        assert nbytes == 0 or held == 0 or held + nbytes <= CAPACITY / 3
        self.note_removed()
        assert item.generation > self.generation
        self.generation = item.generation
        self.found[name] = ModelItem(item)

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def commit(self, name: str, pinned: bool) -> None:
        model = self.found.get(name)
        if model is None or model.ready:
            return
        assert self.inventory.find(address_of(name)) is None, "seen before it is complete"
        self.inventory.commit(model.item, checksum=7)
        model.ready = True
        if pinned:  # the writer's own pin is never refused
            model.pins[self.inventory.pin(model.item, 1)] = (1, None)

    @rule(name=st.sampled_from(NAMES))
    def abandon(self, name: str) -> None:
        model = self.found.get(name)
        if model is not None and not model.ready:
            self.inventory.abandon(model.item)
            del self.found[name]

    @rule(name=st.sampled_from(NAMES), reason=st.sampled_from(["checksum", "dropped"]))
    def remove(self, name: str, reason: str) -> None:
        model = self.found.get(name)
        if model is not None and model.ready:
            self.inventory.remove(model.item, reason)
            self.inventory.remove(model.item, reason)  # idempotent
            assert self.note_removed() == {name: reason}

    @rule(
        name=st.sampled_from(NAMES),
        owner=st.sampled_from(OWNERS),
        ranks=st.sampled_from([None, {0}, {0, 1, 2}]),
    )
    def pin(self, name: str, owner: int, ranks: set[int] | None) -> None:
        model = self.found.get(name)
        item = self.inventory.find(address_of(name))
        expired = self.note_removed()
        if model is None or not model.ready or name in expired:
            assert item is None
            return
        assert item is model.item
        held = self.held_bytes()
        try:
            ticket = self.inventory.pin(item, owner, ranks)
        except BufferFull:
            assert not model.pins
            assert held
            assert held + item.nbytes > CAPACITY / 3
            return
        assert ticket not in self.tickets_given
        self.tickets_given.add(ticket)
        model.pins[ticket] = (owner, None if ranks is None else set(ranks))

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def unpin(self, data: st.DataObject, owner: int) -> None:
        ticket = data.draw(st.sampled_from([*sorted(self.tickets_given), 999_999]))
        self.inventory.unpin(ticket, owner)
        self.drop(ticket, owner)

    @rule(data=st.data(), rank=st.integers(0, 3))
    def done(self, data: st.DataObject, rank: int) -> None:
        ticket = data.draw(st.sampled_from([*sorted(self.tickets_given), 999_999]))
        self.inventory.done(ticket, rank)
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
        for ticket in self.inventory.pins_of(owner):
            self.inventory.unpin(ticket, owner)
            self.drop(ticket, owner)
        assert not any(o == owner for m in self.everything() for o, _ in m.pins.values())

    @rule(seconds=st.floats(0.1, 10.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.inventory.remove_expired()
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
        gauges = self.inventory.gauges()
        left = (gauges.items, gauges.used_bytes, gauges.pinned_bytes, gauges.reserved_bytes)
        assert (*left, gauges.pins) == (0, 0, 0, 0, 0)

    @invariant()
    def gauges_are_what_the_model_says(self) -> None:
        models = self.everything()
        gauges = self.inventory.gauges()
        assert gauges.items == len(self.found)
        assert gauges.used_bytes == sum(m.charged_bytes for m in models)
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


TestInventory = InventoryMachine.TestCase
TestInventory.settings = settings(max_examples=examples(120), stateful_step_count=40)


def filled(inventory: Inventory, name: str, nbytes: int) -> Item:
    item = inventory.reserve(address_of(name), header_of(nbytes), origin="local", ttl_seconds=None)
    inventory.commit(item, 0)
    return item


def test_the_least_recently_used_goes_first() -> None:
    clock = [0.0]
    inventory = Inventory(4 * 64, lambda: clock[0])
    for number in range(4):
        clock[0] = float(number)
        filled(inventory, str(number), 64)
    clock[0] = 10.0
    assert inventory.find(address_of("0")) is not None
    filled(inventory, "new", 64)
    assert [(i.address[1], why) for i, why in inventory.take_removed()] == [("1", "evicted")]


def test_a_look_up_without_a_touch_does_not_keep_an_item() -> None:
    clock = [0.0]
    inventory = Inventory(2 * 64, lambda: clock[0])
    for number in range(2):
        clock[0] = float(number)
        filled(inventory, str(number), 64)
    clock[0] = 10.0
    assert inventory.peek(address_of("0")) is not None
    filled(inventory, "new", 64)
    assert [item.address[1] for item, _ in inventory.take_removed()] == ["0"]


def test_larger_than_the_arena_never_fits_even_by_rounding() -> None:
    inventory = Inventory(1000, lambda: 0.0)
    with pytest.raises(TensorTooLarge):
        filled(inventory, "a", 1001)
    with pytest.raises(TensorTooLarge):
        filled(inventory, "a", 1000)  # 1024 bytes of blocks in an arena of 960
    filled(inventory, "a", 960)


def test_a_none_passes_beside_a_large_write() -> None:
    inventory = Inventory(CAPACITY, lambda: 0.0)
    none = inventory.reserve(address_of("a"), header_of(0), origin="x", ttl_seconds=None)
    inventory.reserve(address_of("b"), header_of(CAPACITY // 2), origin="x", ttl_seconds=None)
    inventory.commit(none, 0)
    inventory.pin(none, 1)


def test_the_ranks_of_a_ticket_report_in_any_order_and_count_once() -> None:
    inventory = Inventory(CAPACITY, lambda: 0.0)
    ticket = inventory.pin(filled(inventory, "a", 64), owner=1, ranks=range(2))
    for rank in (1, 1, 5):
        inventory.done(ticket, rank)
        assert inventory.gauges().pins == 1
    inventory.done(ticket, 0)
    assert inventory.gauges().pins == 0
    inventory.done(ticket, 0)


def handed_off(inventory: Inventory, name: str, nbytes: int) -> Item:
    item = inventory.reserve_handoff(
        address_of(name), header_of(nbytes), ttl_seconds=300.0, wanted=False
    )
    inventory.commit(item, 0)
    return item


def test_hand_offs_are_never_evicted_and_their_pins_cost_nothing() -> None:
    inventory = Inventory(CAPACITY, lambda: 0.0)
    items = [handed_off(inventory, str(number), 600) for number in range(7)]
    with pytest.raises(BufferFull, match="half"):
        handed_off(inventory, "more", 600)
    for item in items:
        inventory.pin(item, 1)
    for number in range(20):
        filled(inventory, f"shared{number}", 1000)
    assert all(inventory.find(item.address) is item for item in items)
    gauges = inventory.gauges()
    assert (gauges.pinned_bytes, gauges.reserved_bytes) == (0, 0)
    assert gauges.handoff_bytes == 7 * 640
    with pytest.raises(TensorTooLarge, match="half"):
        handed_off(inventory, "large", CAPACITY // 2 + 1)


def test_a_replaced_hand_off_is_charged_until_its_last_reader_has_it() -> None:
    inventory = Inventory(CAPACITY, lambda: 0.0)
    old = handed_off(inventory, "a", 640)
    ticket = inventory.pin(old, 1)
    new = handed_off(inventory, "a", 1280)
    assert new.generation > old.generation
    assert inventory.find(address_of("a")) is new
    assert inventory.gauges().handoff_bytes == 640 + 1280
    inventory.unpin(ticket, 1)
    assert inventory.gauges().handoff_bytes == 1280


def test_a_loan_is_never_found_and_goes_with_its_last_pin() -> None:
    inventory = Inventory(CAPACITY, lambda: 0.0)
    mine = handed_off(inventory, "a", 64)
    loan = inventory.reserve_loan(address_of("a"), header_of(1000), origin="another")
    assert inventory.gauges().reserved_bytes == 1000
    inventory.commit(loan, 5)
    tickets = [inventory.pin(loan, 1), inventory.pin(loan, 2)]
    assert inventory.find(address_of("a")) is mine
    assert inventory.items() == [mine]
    assert inventory.gauges().pinned_bytes == 1000
    for owner, ticket in zip((1, 2), tickets, strict=True):
        inventory.unpin(ticket, owner)
    assert inventory.gauges().used_bytes == 64
    inventory.abandon(inventory.reserve_loan(address_of("b"), header_of(10), origin="another"))
    gauges = inventory.gauges()
    assert (gauges.used_bytes, gauges.reserved_bytes, gauges.items) == (64, 0, 1)
