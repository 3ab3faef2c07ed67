"""The dirty set: new changes first, rewrites at a limited rate, nothing twice, claims kept."""

import time
from collections.abc import Iterable

import pytest

from lookup_buffer.node import dirty_set
from lookup_buffer.node.dirty_set import (
    AGAIN_PER_SECOND_MAX,
    BATCH,
    CHANGE_BYTES,
    FORGOTTEN_AT_ONCE,
    RECENT_SECONDS,
    TOGETHER_SECONDS,
    Change,
    DirtySet,
)
from steps import steps_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def keys(changes: list[Change]) -> list[str]:
    return [change.address[1] for change in changes]


def of(key: str, reason: str = "", token: str | None = None) -> Change:
    return Change(("ns", key), reason, token)


def write(dirty: DirtySet, names: Iterable[str]) -> None:
    for name in names:
        dirty.add(of(name))
    while changes := dirty.take():
        dirty.written(changes)


def test_fresh_changes_come_before_rewriting() -> None:
    dirty = DirtySet(Clock())
    dirty.walk([("ns", "old1"), ("ns", "old2")], 1000.0)
    dirty.add(of("new"))
    assert len(dirty) == 3
    assert keys(dirty.take(2)) == ["new", "old1"]
    assert keys(dirty.take(2)) == ["old2"]
    assert (dirty.take(), dirty.wait_seconds()) == ([], None)


def test_hand_offs_that_appeared_come_first() -> None:
    """Producers wait until they are published, and takers may wait for them."""
    dirty = DirtySet(Clock())
    for key in ("a", "gone@r", "b", "first@r", "second@r"):
        dirty.add(of(key, "taken" if key == "gone@r" else ""))
    assert len(dirty) == 5
    taken = dirty.take(3)
    assert keys(taken) == ["first@r", "second@r", "a"]
    dirty.put_back(taken)
    dirty.add(of("second@r", "taken"))
    assert keys(dirty.take()) == ["first@r", "gone@r", "b", "a", "second@r"]


def test_changes_of_a_sequence_are_due_together() -> None:
    """The first at once; then a batch that is full, a hand-off, or what has waited."""
    clock = Clock()
    dirty = DirtySet(clock)
    assert dirty.add(of("first"))
    assert dirty.wait_seconds() == 0.0
    dirty.take()
    assert dirty.add(of("0"))
    assert [dirty.add(of(str(n))) for n in range(1, BATCH)] == [*[False] * (BATCH - 2), True]
    assert dirty.wait_seconds() == 0.0
    dirty.take(1)
    assert dirty.wait_seconds() != 0.0
    clock.now += 2 * TOGETHER_SECONDS
    assert dirty.wait_seconds() == 0.0
    dirty.take(1)
    assert dirty.add(of("hand-off@r"))
    assert dirty.wait_seconds() == 0.0


def test_held_changes_are_due_when_they_are_retried() -> None:
    dirty = DirtySet(Clock())
    for change in (of("a", token="t"), of("b"), of("c"), Change(("ns", "old"), "", paced=True)):
        dirty.hold(change, "server")
    assert (len(dirty), dirty.take(), dirty.wait_seconds()) == (4, [], None)
    dirty.add(of("a", "evicted"))
    dirty.walk([("ns", "b"), ("ns", "d")], 1000.0)
    (newest,) = dirty.take(1)
    assert (newest.address[1], newest.reason, newest.claim_token) == ("a", "evicted", "t")
    dirty.retry(1)
    tried = dirty.take()
    assert keys(tried) == ["b", "d"]
    assert (keys(dirty.take()), dirty.wait_seconds()) == ([], None)
    dirty.written(tried)
    assert dirty.wait_seconds() == 0.0, "the server is back"
    rest = dirty.take()
    assert keys(rest) == ["c", "b", "old"], "and what was in doubt is written once more"
    dirty.written(rest)
    assert sorted(keys(dirty.take())) == ["c", "old"]
    assert (len(dirty), dirty.wait_seconds()) == (0, None)


def test_a_server_that_is_back_is_not_delayed_by_one_that_is_still_down() -> None:
    clock = Clock()
    dirty = DirtySet(clock)

    def write(down: str) -> None:
        while (wait := dirty.wait_seconds()) is not None and wait < 2 * TOGETHER_SECONDS:
            clock.now += wait
            changes = dirty.take()
            reached = [change for change in changes if change.address[1][0] not in down]
            dirty.written(reached)
            for change in changes:
                if change not in reached:
                    dirty.hold(change, change.address[1][0])
            written.update(keys(reached))

    written: set[str] = set()
    names = [f"{server}{n}" for server in "abc" for n in range(1000)]
    for name in names:
        dirty.hold(of(name), name[0])
    dirty.retry()
    write(down="ac")
    assert written == {f"b{n}" for n in range(1000)}
    assert 2000 <= len(dirty) < 3000, "those of b are written once more, at a bounded rate"
    dirty.retry()
    write(down="")
    assert written == {*names}


def test_rewrites_are_rate_limited_and_new_changes_are_not() -> None:
    clock = Clock()
    dirty = DirtySet(clock)
    dirty.walk([("ns", f"old{n}") for n in range(10_000)], AGAIN_PER_SECOND_MAX)
    rewritten = 0
    for _ in range(1000):  # one second, a millisecond at a time
        rewritten += len(dirty.take())
        clock.now += 0.001
    assert AGAIN_PER_SECOND_MAX * 0.95 <= rewritten <= AGAIN_PER_SECOND_MAX + BATCH
    for n in range(5000):
        dirty.add(of(f"new{n}"))
    assert dirty.wait_seconds() == 0.0
    fresh = 0
    while any(key.startswith("new") for key in keys(dirty.take())):
        fresh += 1
    assert fresh == -(-5000 // BATCH)


@pytest.mark.parametrize("width", [10, 4000], ids=["short keys", "long keys"])
def test_what_waits_and_what_was_written_are_bounded(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """The oldest are dropped: those not written, and those written that a failover may lose."""
    each = CHANGE_BYTES + len("ns") + width
    most = 300
    monkeypatch.setattr(dirty_set, "WAITING_BYTES_MAX", most * each)
    monkeypatch.setattr(dirty_set, "RECENT_BYTES_MAX", most * each)
    clock = Clock()
    dirty = DirtySet(clock)
    for n in range(1000):
        dirty.add(of(f"{n}".zfill(width)))
    assert len(dirty) == most
    written = 0
    for n in range(1000):
        dirty.add(of(f"{n}".zfill(width)))
        written += len(dirty.take())
    assert written > 1000
    dirty.repeat_recent()
    assert len(dirty) == most
    clock.now += 10.0
    newest: list[str] = []
    while again := dirty.take():
        newest += keys(again)
        clock.now += 1.0
    assert newest[-1] == "999".zfill(width)


def test_changes_are_bounded_together_wherever_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that many servers did not take, as well; the largest queue loses its oldest."""
    dirty, most = DirtySet(Clock()), 100
    monkeypatch.setattr(dirty_set, "WAITING_BYTES_MAX", most * (CHANGE_BYTES + len("ns") + 4))
    for place in ("server-1", "server-2", "server-3"):
        for n in range(60):
            dirty.hold(of(f"{place[-1]}{n:03}"), place)
    assert len(dirty) == most
    for n in range(10):
        dirty.add(of(f"n{n:03}"))
    assert len(dirty) == most
    assert keys(dirty.take()) == [f"n{n:03}" for n in range(10)]


def test_a_batch_is_due_when_it_is_worth_a_round_trip() -> None:
    clock = Clock()
    dirty = DirtySet(clock)
    dirty.walk([("ns", f"old{n}") for n in range(BATCH + 10)], 100.0)
    assert len(dirty.take()) == BATCH
    assert dirty.take() == []
    wait = dirty.wait_seconds()
    assert wait is not None
    assert abs(wait - 0.1) < 1e-6, "for the ten that are left"
    clock.now += wait + 1e-6
    assert len(dirty.take()) == 10


def test_an_address_is_in_it_once_and_the_newest_change_counts() -> None:
    dirty = DirtySet(Clock())
    dirty.walk([("ns", "a")], 1000.0)
    dirty.add(of("a"))
    dirty.add(of("b"))
    dirty.add(of("a", "evicted"))
    dirty.walk([("ns", "a")], 1000.0)
    assert dirty.take() == [of("b"), of("a", "evicted")]


def test_a_later_change_keeps_the_claim() -> None:
    dirty = DirtySet(Clock())
    dirty.add(of("a", token="t1"))
    dirty.add(of("a", "evicted"))
    assert dirty.take() == [of("a", "evicted", "t1")]


def test_a_failed_write_is_repeated_unless_the_key_changed_since() -> None:
    dirty = DirtySet(Clock())
    dirty.add(of("a", token="t1"))
    dirty.add(of("b"))
    taken = dirty.take()
    dirty.add(of("a", "evicted"))
    dirty.put_back(taken)
    assert {change.address[1]: change for change in dirty.take()} == {
        "a": of("a", "evicted", "t1"),
        "b": of("b"),
    }


def test_what_was_written_after_a_write_without_an_answer_is_written_once_more() -> None:
    """That first write may still take effect, after the second."""
    dirty = DirtySet(Clock())
    for key in ("certain", "late", "held", "gone"):
        dirty.add(of(key))
    certain, *others = dirty.take()
    dirty.written([certain])
    dirty.put_back(others[:1])
    for change in others[1:]:
        dirty.hold(change, "a server")
    dirty.add(of("gone", "evicted"))  # meanwhile
    dirty.retry()
    again = dirty.take()
    assert sorted(keys(again)) == ["gone", "held", "late"]
    dirty.written(again)
    rewritten = dirty.take()
    assert sorted((change.address[1], change.reason) for change in rewritten) == [
        ("gone", "evicted"), ("held", ""), ("late", "")
    ]  # fmt: skip
    assert all(change.paced for change in rewritten)
    dirty.written(rewritten)
    assert dirty.take() == []


def test_the_last_minute_is_written_again_and_no_more() -> None:
    clock = Clock()
    dirty = DirtySet(clock)
    dirty.add(of("too old"))
    dirty.take()
    clock.now += 30
    dirty.add(of("inserted", token="t1"))
    dirty.add(of("withdrawn", "evicted"))
    dirty.take()
    dirty.walk([("ns", "only rewritten")], 1000.0)
    dirty.take()
    clock.now += 31
    dirty.repeat_recent()
    assert dirty.take() == [of("inserted"), of("withdrawn", "evicted")]


def test_what_is_repeated_is_not_forgotten_before_its_turn() -> None:
    clock = Clock()
    dirty = DirtySet(clock)
    dirty.walk([("ns", "walked")], 10.0)
    names = [str(n) for n in range(1000)]
    write(dirty, ["walked", *names])
    clock.now += 1.0
    dirty.repeat_recent()
    clock.now += 1.0
    repeated = keys(dirty.take(10))
    for name in names[500:600]:
        dirty.add(of(name))
    assert keys(dirty.take(100)) == names[500:600]
    while (wait := dirty.wait_seconds()) is not None:
        clock.now += wait + 1e-6
        repeated += keys(dirty.take())
    assert repeated == ["walked", *names[:500], *names[600:]]
    assert clock.now > 100.0 + RECENT_SECONDS
    assert len(dirty) == 0


def test_what_is_repeated_is_repeated_again_after_the_next_failover() -> None:
    clock = Clock()
    dirty = DirtySet(clock)
    write(dirty, ["first", "second"])
    for _ in range(3):
        clock.now += 0.9 * RECENT_SECONDS
        dirty.repeat_recent()
        assert keys(dirty.take()) == ["first", "second"]
    dirty.repeat_recent()
    assert keys(dirty.take(1)) == ["first"]
    dirty.repeat_recent()
    assert keys(dirty.take()) == ["second", "first"]
    clock.now += 1.1 * RECENT_SECONDS
    dirty.repeat_recent()
    assert dirty.take() == []


def test_what_waits_to_be_written_is_not_repeated() -> None:
    clock = Clock()
    dirty = DirtySet(clock)
    write(dirty, ["waits", "written"])
    dirty.add(of("waits", "evicted"))
    dirty.repeat_recent()
    clock.now += 1.0
    assert dirty.take() == [of("waits", "evicted"), of("written")]
    assert dirty.wait_seconds() is None


def test_one_call_repeats_or_forgets_few_of_many() -> None:
    """The loop answers nothing meanwhile."""
    many, each = 20 * FORGOTTEN_AT_ONCE, 100
    clock = Clock()
    dirty = DirtySet(clock)
    write(dirty, map(str, range(many)))
    assert steps_of(dirty.repeat_recent) < 10 * each
    assert steps_of(dirty.take) < 10 * BATCH * each
    dirty = DirtySet(clock)
    write(dirty, map(str, range(many)))
    clock.now += RECENT_SECONDS + 1.0
    assert steps_of(dirty.take) < FORGOTTEN_AT_ONCE * each


def test_to_forget_one_of_many_costs_the_same_as_one_of_few() -> None:
    def seconds_for_each(many: int) -> float:
        clock = Clock()
        dirty = DirtySet(clock)
        write(dirty, map(str, range(many)))
        clock.now += RECENT_SECONDS + 1.0
        began = time.thread_time()
        while dirty._recent:
            dirty.take()
        return (time.thread_time() - began) / many

    assert seconds_for_each(80_000) < 4 * seconds_for_each(5_000)


def test_failed_rewrites_stay_rate_limited() -> None:
    clock = Clock()
    dirty = DirtySet(clock)
    dirty.add(of("fresh"))
    dirty.walk([("ns", f"old{n}") for n in range(1000)], 100.0)
    taken = dirty.take()
    assert len(taken) == BATCH
    dirty.put_back(taken)
    assert keys(dirty.take(1)) == ["fresh"]
    left = dirty.take()
    assert len(left) <= 1, "what failed has used up the pace"
    dirty.put_back(left)
    rewritten = 0
    for _ in range(100):  # ten seconds, in which each batch fails
        clock.now += 0.1
        taken = dirty.take()
        rewritten += len(taken)
        dirty.put_back(taken)
    assert rewritten <= 10 * 100 + BATCH
    assert len(dirty) == 1000


def test_a_failed_rewrite_is_repeated_unless_the_key_changed_since() -> None:
    dirty = DirtySet(Clock())
    dirty.walk([("ns", "a"), ("ns", "b")], 1000.0)
    taken = dirty.take()
    dirty.add(of("a", "evicted", "t1"))
    dirty.put_back(taken)
    assert dirty.take() == [of("a", "evicted", "t1"), of("b")]


def test_writes_repeated_after_a_failover_are_rate_limited_too() -> None:
    dirty = DirtySet(Clock())
    dirty.add(of("a"))
    dirty.take()
    dirty.repeat_recent()
    dirty.put_back(dirty.take())
    dirty.add(of("fresh"))
    assert keys(dirty.take(1)) == ["fresh"]


def test_a_walk_of_a_large_inventory_blocks_the_loop_for_less_than_a_tenth_of_a_second() -> None:
    dirty = DirtySet(Clock())
    addresses = [("ns", str(n)) for n in range(200_000)]
    began = time.thread_time()
    dirty.walk(addresses, 1000.0)
    assert keys(dirty.take()) == [str(n) for n in range(BATCH)]
    assert time.thread_time() - began < 0.1


def test_a_walk_has_ended_when_all_of_it_was_taken() -> None:
    dirty = DirtySet(Clock())
    walking = [dirty.walking]
    dirty.walk([("ns", f"a{n}") for n in range(3)], 1e6)
    for n in range(3):
        walking.append(dirty.walking)
        assert keys(dirty.take(1)) == [f"a{n}"]
    walking.append(dirty.walking)
    assert walking == [False, True, True, True, False]


def test_a_walk_leaves_out_what_was_written_since_it_began() -> None:
    clock = Clock()
    dirty = DirtySet(clock)
    dirty.add(of("before"))
    dirty.take()
    clock.now += 1.0
    dirty.walk([("ns", key) for key in ("before", "since", "waits", "held")], 1e6)
    dirty.add(of("since", "evicted"))
    assert keys(dirty.take(1)) == ["since"]
    dirty.hold(of("held"), "server")
    dirty.add(of("waits"))
    clock.now += 1.0
    assert keys(dirty.take()) == ["waits", "before"]
    assert keys(dirty.take()) == []
    dirty.retry()
    assert keys(dirty.take()) == ["held"]
