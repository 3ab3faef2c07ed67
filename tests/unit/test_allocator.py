"""The allocator against a naive model, and its windows against brute force."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hypothesis_profiles import examples
from lookup_buffer.shm.allocator import Allocator


def fill(allocator: Allocator, *units: int) -> list[int]:
    offsets = [allocator.allocate(unit * 64) for unit in units]
    assert None not in offsets
    return [offset for offset in offsets if offset is not None]


def oldest_first(last_use: Mapping[int, float | None]) -> Iterator[tuple[float, int]]:
    """Blocks that may go, by the time of their last use; what has none is pinned."""
    ages = [(time, offset) for offset, time in last_use.items() if time is not None]
    return iter(sorted(ages, key=lambda age: age[0]))


def test_blocks_are_aligned_and_rounded_up() -> None:
    allocator = Allocator(1000, alignment=64)
    assert allocator.capacity_bytes == 960
    assert allocator.allocate(1) == 0
    assert allocator.allocate(65) == 64
    assert allocator.allocate(64) == 192
    assert allocator.used_bytes == 256
    allocator.free(64)
    assert allocator.used_bytes == 128, "the second block took 128 bytes"
    with pytest.raises(KeyError):
        allocator.free(65)


def test_a_block_of_no_bytes_has_an_offset_of_its_own() -> None:
    allocator = Allocator(128)
    assert {allocator.allocate(0), allocator.allocate(0)} == {0, 64}
    assert allocator.allocate(0) is None


def test_the_smallest_gap_that_fits_is_taken_and_the_lowest_among_equals() -> None:
    allocator = Allocator(64 * 20)
    offsets = fill(allocator, 3, 1, 2, 1, 2, 1, 10)
    for index in (0, 2, 4):
        allocator.free(offsets[index])
    assert allocator.allocate(2 * 64) == offsets[2]
    assert allocator.allocate(2 * 64) == offsets[4]
    assert allocator.allocate(2 * 64) == offsets[0]
    assert allocator.allocate(2 * 64) is None
    assert allocator.allocate(64) == offsets[0] + 128
    assert allocator.used_bytes == allocator.capacity_bytes
    assert allocator.largest_free_bytes == 0


def test_neighbouring_gaps_are_one() -> None:
    allocator = Allocator(64 * 3)
    first, second, third = fill(allocator, 1, 1, 1)
    allocator.free(first)
    allocator.free(third)
    assert allocator.largest_free_bytes == 64
    allocator.free(second)
    assert allocator.largest_free_bytes == 192
    assert allocator.allocate(192) == 0


def test_wrong_uses_are_refused() -> None:
    allocator = Allocator(128)
    offset = allocator.allocate(1)
    assert offset is not None
    allocator.free(offset)
    for wrong in (offset, 1, -64, 4096):
        with pytest.raises(KeyError):
            allocator.free(wrong)
    with pytest.raises(ValueError, match="-1"):
        allocator.allocate(-1)
    with pytest.raises(ValueError, match="capacity"):
        Allocator(-1)
    with pytest.raises(ValueError, match="alignment"):
        Allocator(64, alignment=0)
    assert allocator.used_bytes == 0


def test_a_range_without_room() -> None:
    allocator = Allocator(63)
    assert allocator.allocate(0) is None
    assert allocator.eviction_window(0, (), lambda _: None) is None


def test_the_window_with_the_oldest_youngest_wins() -> None:
    allocator = Allocator(64 * 6)
    offsets = fill(allocator, 1, 1, 1, 1, 1, 1)
    last_use = dict(zip(offsets, [1.0, 9.0, 3.0, 4.0, 2.0, 8.0], strict=True))
    assert allocator.eviction_window(64, oldest_first(last_use), last_use.get) == [offsets[0]]
    assert allocator.eviction_window(128, oldest_first(last_use), last_use.get) == offsets[2:4]
    assert allocator.eviction_window(192, oldest_first(last_use), last_use.get) == offsets[2:5]
    assert allocator.eviction_window(385, oldest_first(last_use), last_use.get) is None


def test_gaps_beside_the_blocks_count() -> None:
    allocator = Allocator(64 * 8)
    offsets = fill(allocator, 2, 1, 2, 1, 2)
    allocator.free(offsets[0])
    allocator.free(offsets[2])
    last_use = dict.fromkeys((offsets[1], offsets[3], offsets[4]), 1.0)
    assert allocator.eviction_window(2 * 64, oldest_first(last_use), last_use.get) == []
    assert allocator.eviction_window(5 * 64, oldest_first(last_use), last_use.get) == [offsets[1]]
    assert allocator.eviction_window(6 * 64, oldest_first(last_use), last_use.get) == [
        offsets[1],
        offsets[3],
    ]


def test_no_window_crosses_a_pinned_block() -> None:
    allocator = Allocator(64 * 5)
    offsets = fill(allocator, 1, 1, 1, 1, 1)
    last_use: dict[int, float | None] = dict.fromkeys(offsets, 1.0)
    last_use[offsets[2]] = None
    assert allocator.eviction_window(2 * 64, oldest_first(last_use), last_use.get) == offsets[:2]
    assert allocator.eviction_window(3 * 64, oldest_first(last_use), last_use.get) is None


def test_among_equal_ages_the_fewest_bytes_are_evicted() -> None:
    allocator = Allocator(64 * 8)
    offsets = fill(allocator, 4, 1, 3)
    last_use = {offsets[0]: 5.0, offsets[1]: None, offsets[2]: 5.0}
    assert allocator.eviction_window(2 * 64, oldest_first(last_use), last_use.get) == [offsets[2]]


def brute_force(
    blocks: Mapping[int, int], capacity: int, need: int, last_use: Mapping[int, float | None]
) -> list[tuple[float, int, int]]:
    """Youngest use, bytes and first block of all runs whose eviction makes room, by trying every
    one; of those that begin at one block the shortest is enough."""
    offsets = sorted(blocks)
    costs = []
    for first, offset in enumerate(offsets):
        start = 0 if first == 0 else offsets[first - 1] + blocks[offsets[first - 1]]
        youngest, nbytes = 0.0, 0
        for last in range(first, len(offsets)):
            time = last_use[offsets[last]]
            if time is None:
                break
            youngest, nbytes = max(youngest, time), nbytes + blocks[offsets[last]]
            end = offsets[last + 1] if last + 1 < len(offsets) else capacity
            if end - start >= need:
                costs.append((youngest, nbytes, offset))
                break
    return costs


@settings(max_examples=examples(300))
@given(st.data())
def test_the_window_is_the_best_of_all(data: st.DataObject) -> None:
    allocator = Allocator(64 * data.draw(st.integers(1, 24)))
    blocks: dict[int, int] = {}
    for units in data.draw(st.lists(st.integers(1, 4), max_size=14)):
        offset = allocator.allocate(units * 64)
        if offset is not None:
            blocks[offset] = units * 64
    for offset in sorted(blocks):
        if data.draw(st.booleans(), label=f"free {offset}"):
            allocator.free(offset)
            del blocks[offset]
    times = st.none() | st.integers(0, 5).map(float)
    last_use = {offset: data.draw(times) for offset in sorted(blocks)}
    need = 64 * data.draw(st.integers(1, 26))

    window = allocator.eviction_window(need, oldest_first(last_use), last_use.get)

    costs = brute_force(blocks, allocator.capacity_bytes, need, last_use)
    if allocator.largest_free_bytes >= need:
        assert window == []
    elif not costs:
        assert window is None
    else:
        assert window is not None
        ages = [time for offset in window if (time := last_use[offset]) is not None]
        assert len(ages) == len(window)
        assert (max(ages), sum(blocks[offset] for offset in window), window[0]) == min(costs)
        for offset in window:
            allocator.free(offset)
        assert allocator.allocate(need) is not None


@pytest.mark.parametrize("seed", range(8))
def test_the_window_is_the_best_of_all_where_there_are_many(seed: int) -> None:
    chance = random.Random(seed)
    allocator = Allocator(64 * 3000)
    blocks = {
        offset: 64 * units
        for units in [chance.randint(1, 4) for _ in range(1000)]
        if (offset := allocator.allocate(64 * units)) is not None
    }
    for offset in chance.sample(sorted(blocks), len(blocks) // 10):
        allocator.free(offset)
        del blocks[offset]
    ages = chance.choice([range(1_000_000), range(40)])
    last_use = {
        offset: None if chance.random() < 0.02 else float(chance.choice(ages)) for offset in blocks
    }
    for need in (2, 4, 7, 12, 30, 200, 2000):
        window = allocator.eviction_window(64 * need, oldest_first(last_use), last_use.get)
        costs = brute_force(blocks, allocator.capacity_bytes, 64 * need, last_use)
        if allocator.largest_free_bytes >= 64 * need:
            assert window == []
        elif not costs:
            assert window is None
        else:
            assert window is not None
            youngest = max(last_use[offset] or 0.0 for offset in window)
            assert (youngest, sum(map(blocks.__getitem__, window)), window[0]) == min(costs)


class AllocatorMachine(RuleBasedStateMachine):
    """The model is an array with the owner of each unit of 64 bytes."""

    allocator: Allocator

    @initialize(units=st.integers(1, 40), ragged=st.integers(0, 63))
    def begin(self, units: int, ragged: int) -> None:
        self.allocator = Allocator(units * 64 + ragged)
        self.owners: list[int | None] = [None] * units
        self.blocks: dict[int, int] = {}

    def gaps(self) -> list[int]:
        runs = "".join(" " if owner is None else "x" for owner in self.owners).split("x")
        return [len(run) for run in runs if run]

    @rule(nbytes=st.integers(0, 64 * 12))
    def allocate(self, nbytes: int) -> None:
        units = max(1, -(-nbytes // 64))
        fitting = [gap for gap in self.gaps() if gap >= units]
        offset = self.allocator.allocate(nbytes)
        if not fitting:
            assert offset is None
            return
        assert offset is not None
        assert offset % 64 == 0
        start = offset // 64
        assert self.owners[start : start + units] == [None] * units
        end = next(
            (i for i in range(start, len(self.owners)) if self.owners[i] is not None),
            len(self.owners),
        )
        assert end - start == min(fitting), "not the best fit"
        self.owners[start : start + units] = [offset] * units
        self.blocks[offset] = units

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.blocks)))
        self.allocator.free(offset)
        units = self.blocks.pop(offset)
        self.owners[offset // 64 : offset // 64 + units] = [None] * units

    @precondition(lambda self: self.blocks)
    @rule(units=st.integers(1, 40), modulus=st.integers(1, 5))
    def evict(self, units: int, modulus: int) -> None:
        def last_use(offset: int) -> float | None:
            return None if offset // 64 % 7 == modulus else float(offset // 64 % modulus)

        ages = {offset: last_use(offset) for offset in self.blocks}
        window = self.allocator.eviction_window(units * 64, oldest_first(ages), ages.get)
        if window is None:
            return
        for offset in window:
            assert last_use(offset) is not None
            self.allocator.free(offset)
            freed = self.blocks.pop(offset)
            self.owners[offset // 64 : offset // 64 + freed] = [None] * freed
        self.allocate(units * 64)

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "allocator"):
            return
        used = sum(owner is not None for owner in self.owners) * 64
        assert self.allocator.used_bytes == used
        assert self.allocator.capacity_bytes == len(self.owners) * 64
        assert self.allocator.largest_free_bytes == max(self.gaps(), default=0) * 64
        assert len(self.allocator) == len(self.blocks)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=examples(80), stateful_step_count=60, deadline=None
)


def processor_seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


@pytest.mark.alone  # lists of that length move at the memory's pace, which others share
def test_a_hundred_thousand_blocks_do_not_slow_it_down() -> None:
    """Against a walk over so many, on the same machine: a hundredth to a thirtieth of it."""
    count = 100_000
    allocator = Allocator(64 * 3 * count)
    offsets = fill(allocator, *(1 + i % 3 for i in range(count)))
    for offset in offsets[::2]:
        allocator.free(offset)

    def allocate_and_free() -> None:
        taken = [allocator.allocate(64 * (1 + i % 3)) for i in range(200)]
        for new in taken:
            assert new is not None
            allocator.free(new)

    a_walk = min(processor_seconds(lambda: sum(offset > 0 for offset in offsets)) for _ in range(5))
    assert min(processor_seconds(allocate_and_free) for _ in range(5)) / 200 < a_walk / 5


@pytest.mark.alone
def test_to_free_the_oldest_of_very_many_costs_what_it_costs_among_few() -> None:
    """Among so many it took ten times as long: all that lie behind one were moved."""
    few, many, some = 20_000, 600_000, 2000

    def seconds_to_free_of(count: int) -> float:
        allocator = Allocator(64 * count)
        offsets = iter(fill(allocator, *[1] * count))

        def free() -> None:
            for offset in islice(offsets, some):
                allocator.free(offset)

        return min(processor_seconds(free) for _ in range(5))

    assert seconds_to_free_of(many) < 4 * seconds_to_free_of(few)


class Ages:
    """Blocks by age, and how many of them were requested."""

    def __init__(self, ages: Mapping[int, float]) -> None:
        self.times = ages
        self.ages = sorted((time, offset) for offset, time in ages.items())
        self.asked = 0

    def time_of(self, offset: int) -> float | None:
        self.asked += 1
        return self.times.get(offset)

    def __iter__(self) -> Iterator[tuple[float, int]]:
        for age in self.ages:
            self.asked += 1
            yield age


def shuffled(count: int) -> tuple[Allocator, dict[int, float]]:
    """Blocks of one unit without a gap, and their times, in any order."""
    allocator = Allocator(64 * count)
    order = random.Random(1).sample(range(count), count)
    return allocator, dict(zip(fill(allocator, *[1] * count), map(float, order), strict=True))


def test_no_more_blocks_are_looked_at_than_have_to_be() -> None:
    count = 10_000
    allocator, ages = shuffled(count)

    def asked_for(blocks: int) -> int:
        oldest = Ages(ages)
        window = allocator.eviction_window(64 * blocks, oldest, oldest.time_of)
        assert window is not None
        assert len(window) == blocks
        assert all(after - before == 64 for before, after in pairwise(window))
        return oldest.asked

    assert asked_for(1) <= 3
    assert asked_for(2) < 500
    assert asked_for(3) < 3000
    assert asked_for(100) < count
    assert asked_for(6000) <= count + count // 16 + 1  # all, and the oldest before


def test_of_very_many_blocks_a_part_is_looked_at_that_changes() -> None:
    count = 50_000
    allocator, ages = shuffled(count)
    found = []
    for _ in range(8):
        oldest = Ages(ages)
        window = allocator.eviction_window(64 * 16, oldest, oldest.time_of)
        assert window is not None
        assert oldest.asked < count // 4
        assert max(ages[offset] for offset in window) < 0.75 * count, "far from the youngest"
        found.append(window[0])
    assert len(set(found)) > 4


def test_the_only_room_among_very_many_blocks_is_found_after_some_calls() -> None:
    """Also where one part that is looked at ends and the next one begins."""
    count, run = 30_000, 16
    allocator = Allocator(64 * count)
    offsets = fill(allocator, *[1] * count)
    for first in (8192 - run, 8192 - 5, 8192):
        free = offsets[first : first + run]
        times = {at: 1.0 for index, at in enumerate(offsets) if index % 8} | dict.fromkeys(
            free, 2.0
        )
        for at in (offsets[first - 1], offsets[first + run]):
            times.pop(at, None)
        for _ in range(8):
            window = allocator.eviction_window(64 * run, oldest_first(times), times.get)
            if window is not None:
                break
        assert window == free
