"""The backlog: new changes first, rewrites at a limited rate, nothing twice, claims kept."""

from lookup_buffer.node.backlog import AGAIN_PER_SECOND_MAX, BATCH, Backlog, Change


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def keys(changes: list[Change]) -> list[str]:
    return [change.address[1] for change in changes]


def of(key: str, reason: str = "", token: str | None = None) -> Change:
    return Change(("ns", key), reason, token)


def test_fresh_changes_come_before_rewriting() -> None:
    backlog = Backlog(Clock())
    backlog.repeat([("ns", "old1"), ("ns", "old2")], 1000.0)
    backlog.add(of("new"))
    assert len(backlog) == 3
    assert keys(backlog.take(2)) == ["new", "old1"]
    assert keys(backlog.take(2)) == ["old2"]
    assert (backlog.take(), backlog.wait_seconds()) == ([], None)


def test_hand_offs_that_appeared_come_first() -> None:
    """Producers wait until they are published, and takers may wait for them."""
    backlog = Backlog(Clock())
    for key in ("a", "gone@r", "b", "first@r", "second@r"):
        backlog.add(of(key, "taken" if key == "gone@r" else ""))
    assert len(backlog) == 5
    taken = backlog.take(3)
    assert keys(taken) == ["first@r", "second@r", "a"]
    backlog.put_back(taken)
    backlog.add(of("second@r", "taken"))
    assert keys(backlog.take()) == ["first@r", "gone@r", "b", "a", "second@r"]


def test_held_changes_are_due_when_they_are_retried() -> None:
    backlog = Backlog(Clock())
    held = [of("a", token="t"), of("b"), of("c"), Change(("ns", "old"), "", paced=True)]
    assert backlog.hold(held, lambda _: "server") == {"server"}
    assert (len(backlog), backlog.take(), backlog.wait_seconds()) == (4, [], None)
    backlog.add(of("a", "evicted"))
    backlog.repeat([("ns", "b"), ("ns", "d")], 1000.0)
    (newest,) = backlog.take(1)
    assert (newest.address[1], newest.reason, newest.claim_token) == ("a", "evicted", "t")
    assert backlog.retry(1) == {"server"}
    assert keys(backlog.take()) == ["b", "d"]
    backlog.retry_all({"server", "another"})
    assert keys(backlog.take()) == ["c", "old"]
    assert (len(backlog), backlog.retry()) == (0, set())


def test_a_server_that_is_back_is_not_delayed_by_one_that_is_still_down() -> None:
    backlog = Backlog(Clock())

    def place_of(address: tuple[str, str]) -> str:
        return address[1][0]

    def write(down: str) -> None:
        while changes := backlog.take():
            missed.update(backlog.hold([c for c in changes if c.address[1][0] in down], place_of))
            written.extend(key for key in keys(changes) if key[0] not in down)

    written: list[str] = []
    missed: set[str] = set()
    names = [f"{server}{n}" for server in "abc" for n in range(1000)]
    backlog.hold(map(of, names), place_of)
    retried = backlog.retry()
    write(down="ac")
    assert (retried, missed) == ({"a", "b", "c"}, {"a", "c"})
    backlog.retry_all(retried - missed)
    write(down="ac")
    assert sorted(written) == sorted(f"b{n}" for n in range(1000))
    assert len(backlog) == 2000
    for _ in range(3):
        backlog.retry_all(backlog.retry())
    write(down="")
    assert sorted(written) == sorted(names)
    assert len(backlog) == 0


def test_rewrites_are_rate_limited_and_new_changes_are_not() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    backlog.repeat([("ns", f"old{n}") for n in range(10_000)], AGAIN_PER_SECOND_MAX)
    rewritten = 0
    for _ in range(1000):  # one second, a millisecond at a time
        rewritten += len(backlog.take())
        clock.now += 0.001
    assert AGAIN_PER_SECOND_MAX * 0.95 <= rewritten <= AGAIN_PER_SECOND_MAX + BATCH
    for n in range(5000):
        backlog.add(of(f"new{n}"))
    assert backlog.wait_seconds() == 0.0
    fresh = 0
    while any(key.startswith("new") for key in keys(backlog.take())):
        fresh += 1
    assert fresh == -(-5000 // BATCH)


def test_a_batch_is_due_when_it_is_worth_a_round_trip() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    backlog.repeat([("ns", f"old{n}") for n in range(BATCH + 10)], 100.0)
    assert len(backlog.take()) == BATCH
    assert backlog.take() == []
    wait = backlog.wait_seconds()
    assert wait is not None
    assert abs(wait - 0.1) < 1e-6, "for the ten that are left"
    clock.now += wait + 1e-6
    assert len(backlog.take()) == 10


def test_an_address_is_in_it_once_and_the_newest_change_counts() -> None:
    backlog = Backlog(Clock())
    backlog.repeat([("ns", "a")], 1000.0)
    backlog.add(of("a"))
    backlog.add(of("b"))
    backlog.add(of("a", "evicted"))
    backlog.repeat([("ns", "a")], 1000.0)
    assert backlog.take() == [of("b"), of("a", "evicted")]


def test_a_later_change_keeps_the_claim() -> None:
    backlog = Backlog(Clock())
    backlog.add(of("a", token="t1"))
    backlog.add(of("a", "evicted"))
    assert backlog.take() == [of("a", "evicted", "t1")]


def test_a_failed_write_is_repeated_unless_the_key_changed_since() -> None:
    backlog = Backlog(Clock())
    backlog.add(of("a", token="t1"))
    backlog.add(of("b"))
    taken = backlog.take()
    backlog.add(of("a", "evicted"))
    backlog.put_back(taken)
    assert {change.address[1]: change for change in backlog.take()} == {
        "a": of("a", "evicted", "t1"),
        "b": of("b"),
    }


def test_the_last_minute_is_written_again_and_no_more() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    backlog.add(of("too old"))
    backlog.take()
    clock.now += 30
    backlog.add(of("inserted", token="t1"))
    backlog.add(of("withdrawn", "evicted"))
    backlog.take()
    backlog.repeat([("ns", "only rewritten")], 1000.0)
    backlog.take()
    clock.now += 31
    backlog.repeat_recent()
    assert backlog.take() == [of("inserted"), of("withdrawn", "evicted")]


def test_failed_rewrites_stay_rate_limited() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    backlog.add(of("fresh"))
    backlog.repeat([("ns", f"old{n}") for n in range(1000)], 100.0)
    taken = backlog.take()
    assert len(taken) == BATCH
    backlog.put_back(taken)
    assert keys(backlog.take(1)) == ["fresh"]
    left = backlog.take()
    assert len(left) <= 1, "what failed has used up the pace"
    backlog.put_back(left)
    rewritten = 0
    for _ in range(100):  # ten seconds, in which each batch fails
        clock.now += 0.1
        taken = backlog.take()
        rewritten += len(taken)
        backlog.put_back(taken)
    assert rewritten <= 10 * 100 + BATCH
    assert len(backlog) == 1000


def test_a_failed_rewrite_is_repeated_unless_the_key_changed_since() -> None:
    backlog = Backlog(Clock())
    backlog.repeat([("ns", "a"), ("ns", "b")], 1000.0)
    taken = backlog.take()
    backlog.add(of("a", "evicted", "t1"))
    backlog.put_back(taken)
    assert backlog.take() == [of("a", "evicted", "t1"), of("b")]


def test_writes_repeated_after_a_failover_are_rate_limited_too() -> None:
    backlog = Backlog(Clock())
    backlog.add(of("a"))
    backlog.take()
    backlog.repeat_recent()
    backlog.put_back(backlog.take())
    backlog.add(of("fresh"))
    assert keys(backlog.take(1)) == ["fresh"]
