"""The heartbeat: which boot has a node id, when it is taken over, and when a node must end."""

import pytest

from awaited import at_once, awaited
from lookup_buffer.errors import ConfigError
from lookup_buffer.node.membership import Heartbeat, Identity
from lookup_buffer.times import WATCH_SECONDS
from memory_store import MemoryStore
from store import Beat, NodeInfo, StoreUnavailable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def heart(clock: Clock, boot: str = "mine") -> Heartbeat:
    return Heartbeat(Identity("node-1", boot, "tcp://127.0.0.1:1"), clock)


def beats_of_another_end(mine: Heartbeat, store: MemoryStore, boot: str, clock: Clock) -> str:
    """Why `mine` ends at the second beat of `boot` that it sees; the first may be a late one."""
    beat = store.beats()["node-1"]
    assert beat.boot == boot
    clock.now += 1.0
    store.beat("node-1", boot, beat.sequence + 1)
    assert is_watching(mine, store)
    clock.now += 1.0
    store.beat("node-1", boot, beat.sequence + 2)
    with pytest.raises(ConfigError) as caught:
        at_once(mine.beat(awaited(store)))
    assert store.beats() == {"node-1": Beat(boot, beat.sequence + 2)}
    return str(caught.value)


def is_watching(mine: Heartbeat, store: MemoryStore) -> bool:
    """Whether it writes no beat, and the id is not its own."""
    before = store.beats()
    is_new = at_once(mine.beat(awaited(store)))
    return not is_new and not mine.established and store.beats() == before


def test_a_free_id_is_taken_at_once(clock: Clock, store: MemoryStore) -> None:
    mine = heart(clock)
    assert at_once(mine.beat(awaited(store))) is True
    assert mine.established
    assert at_once(mine.beat(awaited(store))) is False


def test_a_store_that_lost_its_data_is_distinguished_from_a_known_node(
    clock: Clock, store: MemoryStore
) -> None:
    mine = heart(clock)
    at_once(mine.beat(awaited(store)))
    store.leave("node-1", "mine")
    assert at_once(mine.beat(awaited(store))) is True
    assert mine.established


class Deaf(MemoryStore):
    """It carries out all beats, and some answers are lost."""

    loses_answers = False

    def beat(self, node: str, boot: str, sequence: int, *, replacing: Beat | None = None) -> bool:
        known = super().beat(node, boot, sequence, replacing=replacing)
        if self.loses_answers:
            raise StoreUnavailable("no answer in time")
        return known


@pytest.mark.parametrize("loses_data", [True, False])
def test_a_loss_of_data_is_noticed_after_a_beat_without_an_answer(
    clock: Clock, loses_data: bool
) -> None:
    mine, store = heart(clock), Deaf()
    info = NodeInfo("node-1", "mine", "tcp://127.0.0.1:1", "h", "0", 1, 0, 0)
    at_once(mine.beat(awaited(store)))
    store.describe_node(info)
    if loses_data:
        store.leave("node-1", "mine")
    store.loses_answers = True
    with pytest.raises(StoreUnavailable):
        at_once(mine.beat(awaited(store)))
    store.loses_answers = False
    assert at_once(mine.beat(awaited(store))) is loses_data
    store.describe_node(info)
    assert at_once(mine.beat(awaited(store))) is False


def test_a_description_on_a_server_that_is_away_fails_no_beat(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, store = heart(clock), Deaf()
    at_once(mine.beat(awaited(store)))
    store.loses_answers = True
    with pytest.raises(StoreUnavailable):
        at_once(mine.beat(awaited(store)))
    store.loses_answers = False

    def away(_: object) -> dict[str, NodeInfo]:
        raise StoreUnavailable("another master of the cluster")

    with monkeypatch.context() as patch:
        patch.setattr(store, "node_infos", away)
        for _ in range(3):
            assert at_once(mine.beat(awaited(store))) is False
    assert at_once(mine.beat(awaited(store))) is True, "it has no description: all was lost"


def test_a_boot_without_new_beats_is_replaced(clock: Clock, store: MemoryStore) -> None:
    store.beat("node-1", "old", 7)
    mine = heart(clock)
    while clock.now < 100.0 + WATCH_SECONDS:
        assert is_watching(mine, store)
        assert store.beats() == {"node-1": Beat("old", 7)}
        clock.now += mine.pause_seconds()
    assert at_once(mine.beat(awaited(store))) is True
    assert mine.established
    assert store.beats()["node-1"].boot == "mine"


def test_a_boot_with_new_beats_keeps_its_id(clock: Clock, store: MemoryStore) -> None:
    store.beat("node-1", "other", 7)
    store.describe_node(NodeInfo("node-1", "other", "tcp://10.0.0.1:1", "far", "0", 1, 0, 0))
    mine = heart(clock)
    assert is_watching(mine, store)
    reason = beats_of_another_end(mine, store, "other", clock)
    for part in ("'node-1'", "boot other", "on host far", "another id"):
        assert part in reason


def test_a_late_beat_of_a_boot_that_ended_ends_no_node(clock: Clock, store: MemoryStore) -> None:
    """The process was killed while its last beat was on the network."""
    store.beat("node-1", "old", 7)
    mine = heart(clock)
    assert is_watching(mine, store)
    clock.now += 1.0
    store.beat("node-1", "old", 8)
    since = clock.now
    while clock.now < since + WATCH_SECONDS:
        assert is_watching(mine, store)
        clock.now += mine.pause_seconds()
    assert at_once(mine.beat(awaited(store))) is True
    assert store.beats()["node-1"].boot == "mine"


def test_of_two_nodes_that_wait_for_one_id_one_gets_it(clock: Clock, store: MemoryStore) -> None:
    store.beat("node-1", "old", 7)
    hearts = [heart(clock, "first"), heart(clock, "second")]
    given_up = []
    for _ in range(40):
        for one in list(hearts):
            try:
                at_once(one.beat(awaited(store)))
            except ConfigError:
                hearts.remove(one)
                given_up.append(one)
        clock.now += 0.25
    assert (len(hearts), len(given_up)) == (1, 1)
    assert hearts[0].established
    assert not given_up[0].established


def test_a_silence_in_which_the_store_was_away_does_not_count(
    clock: Clock, store: MemoryStore
) -> None:
    store.beat("node-1", "other", 7)
    mine = heart(clock)
    assert is_watching(mine, store)
    gone = MemoryStore()
    gone.close()
    clock.now += 10.0
    with pytest.raises(StoreUnavailable):
        at_once(mine.beat(awaited(gone)))
    assert is_watching(mine, store), "the other could not beat either"
    beats_of_another_end(mine, store, "other", clock)


def test_a_node_replaced_while_frozen_ends(clock: Clock, store: MemoryStore) -> None:
    mine = heart(clock)
    at_once(mine.beat(awaited(store)))
    store.beat("node-1", "later", 1, replacing=store.beats()["node-1"])
    assert is_watching(mine, store)
    reason = beats_of_another_end(mine, store, "later", clock)
    assert "boot later took this id over while this node" in reason


def test_a_beat_of_the_past_does_not_end_a_node(clock: Clock, store: MemoryStore) -> None:
    """The store was restored from a snapshot that is older than this boot."""
    mine = heart(clock)
    at_once(mine.beat(awaited(store)))
    store.leave("node-1", "mine")
    store.beat("node-1", "old", 7)
    since = clock.now
    while clock.now < since + WATCH_SECONDS:
        assert is_watching(mine, store)
        clock.now += mine.pause_seconds()
    assert at_once(mine.beat(awaited(store))) is True, "all is to be published again"
    assert mine.established
    assert store.beats()["node-1"].boot == "mine"
