"""Invalidated namespaces: nodes drop their items of them, and nothing else."""

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from awaited import awaited
from command_line import assert_refused, run, run_json
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.inspection.findings import Code
from lookup_buffer.inspection.history import history_of
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.node import invalidations as invalidations_module
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.invalidations import LATE_SECONDS, PAGE, Invalidations
from lookup_buffer.protocol.header import TensorHeader
from memory_store import MemoryStore
from nodes import StartNode, handoff, key, wait_until
from servers import StartServer, command, patient
from store import INVALIDATIONS_MAX, BlockingStore, Invalidation, layout
from store.testing.samples import a_mark
from virtual_loop import VirtualLoop


@pytest.fixture
def url(start_server: StartServer) -> str:
    """On a separate server: nodes that other tests have killed do not beat."""
    return start_server().url


@pytest.fixture
def store(url: str) -> Iterator[BlockingStore]:
    with patient(url) as store:
        yield store


def given_up(store: BlockingStore, space: Namespace, name: TensorKey) -> bool:
    found = list(store.run(history_of(store.browsed, name.text, space.fingerprint)).findings())
    return found[0].code is Code.INVALIDATED


def test_all_nodes_drop_it_and_only_it(
    store: BlockingStore, url: str, start_node: StartNode
) -> None:
    here, there = start_node(store_url=url), start_node(store_url=url)
    space, other = (Namespace.named(f"{name}-{secrets.token_hex(4)}") for name in ("old", "kept"))
    name, passing = key(), handoff()
    with ExitStack() as stack:
        first, second, kept = (
            stack.enter_context(LookupBuffer(node.config, namespace))
            for node, namespace in ((here, space), (there, space), (here, other))
        )
        first.insert(name, torch.ones(3))
        first.insert(passing, torch.ones(3))
        kept.insert(name, torch.ones(3))
        assert second.select(name, timeout=5.0) is not None  # a copy there as well
        wait_until(lambda: store.locate(other.fingerprint, [name.text]) != [None], 10.0)
        with first.view(name) as seen:
            done = run_json("invalidate", space.fingerprint[:16], "--store-url", url)
            assert (done["namespace"], done["silent_nodes"]) == (space.fingerprint, [])
            assert done["records"] >= 1
            assert seen is not None
            assert torch.equal(seen, torch.ones(3)), "what is in use stays until it is not"
        for name_ in (name, passing):
            wait_until(lambda: given_up(store, space, name_), 10.0)  # noqa: B023
        for buffer in (first, second):
            assert buffer.has_caches([name, passing], timeout=1.0) == [False, False]
        assert kept.has_caches([name], timeout=5.0) == [True]
        first.insert(name, torch.zeros(3))  # by an engine that was put right
        found = second.select(name, timeout=5.0)
        assert found is not None
        assert torch.equal(found, torch.zeros(3))
        asked_again = run_json("invalidate", other.fingerprint, "--store-url", url)
        assert asked_again["records"] == 1
        assert first.has_caches([name], timeout=5.0) == [True], "an old mark drops nothing anew"


def test_a_node_that_was_frozen_drops_it_when_it_is_back(
    store: BlockingStore, url: str, start_node: StartNode
) -> None:
    node, name = start_node(store_url=url), key()
    space = Namespace.named(f"frozen-{secrets.token_hex(4)}")
    with LookupBuffer(node.config, space) as buffer:
        buffer.insert(name, torch.ones(3))
        wait_until(lambda: store.locate(space.fingerprint, [name.text]) != [None], 10.0)
        with node.frozen():
            done = run("invalidate", space.fingerprint, "--store-url", url)
            assert done.returncode == 1
            assert "the mark was still there after 2 beats of every live node" in done.stdout
            assert f"node {node.node_id} is silent" in done.stdout
        wait_until(lambda: not buffer.has_caches([name], timeout=1.0)[0], 10.0)
        wait_until(lambda: given_up(store, space, name), 10.0)


def test_a_node_started_later_has_nothing_to_drop(
    store: BlockingStore, url: str, start_node: StartNode
) -> None:
    space, name = Namespace.named(f"later-{secrets.token_hex(4)}"), key()
    with LookupBuffer(start_node(store_url=url).config, space) as buffer:
        buffer.insert(name, torch.ones(3))
        wait_until(lambda: space.fingerprint in store.namespaces(), 10.0)
    run_json("invalidate", space.fingerprint, "--store-url", url)
    later = start_node(store_url=url)
    wait_until(lambda: later.stats()["store_up"], 10.0)
    with LookupBuffer(later.config, space) as buffer:
        buffer.insert(name, torch.ones(3))
        wait_until(lambda: store.locate(space.fingerprint, [name.text]) != [None], 10.0)
        assert buffer.has_caches([name], timeout=5.0) == [True]


def test_an_invalid_namespace_is_refused(store: BlockingStore, url: str) -> None:
    common = secrets.token_hex(4)
    for end in "ab":
        store.describe_namespace(common + end * 56, {"name": end})
    assert_refused(run("invalidate", common, "--store-url", url), 2, "2 namespaces begin with")
    assert_refused(run("invalidate", "", "--store-url", url), 2, "namespaces begin with ''")
    assert_refused(run("invalidate", "none such", "--store-url", url), 1, "no namespace")
    assert store.invalidations().keys().isdisjoint({common + end * 56 for end in "ab"})


# -- one node's part, with an injected clock


class Part:
    def __init__(self) -> None:
        self.loop, self.wall = VirtualLoop(), 5000.0
        self.store = MemoryStore()
        self.gone: list[tuple[str, str]] = []
        self.arena = Arena(1 << 20, self._changed, self.loop.time)
        self.invalidations = Invalidations(self.loop, self.arena, lambda: self.wall)

    def _changed(self, address: tuple[str, str], reason: str) -> None:
        if reason:
            self.gone.append((address[1], reason))

    def hold(self, key: str, *, origin: str = "local") -> None:
        header = TensorHeader("uint8", (4,), 4)
        item = self.arena.reserve(("ns", key), header, origin=origin, ttl_seconds=None)
        assert item is not None
        self.arena.release([self.arena.commit(item, 7, 1).ticket], 1)

    def mark(self, at: int = 5001) -> Invalidation:
        mark = a_mark(at)
        self.store.mark_invalid("ns", mark)
        return mark

    def heed(self, seconds_later: float = 0.0) -> list[str]:
        """The keys that went."""
        self.loop.run(seconds_later)
        self.gone.clear()
        applied = self.loop.create_task(self.invalidations.apply(awaited(self.store)))
        self.loop.run(0.0)
        applied.result()
        assert {reason for _, reason in self.gone} <= {"invalidated"}
        return sorted(key for key, _ in self.gone)


@pytest.fixture
def part() -> Iterator[Part]:
    part = Part()
    yield part
    part.arena.close()


def test_nodes_that_read_the_mark_later_drop_their_copies_too(part: Part) -> None:
    assert part.heed() == []
    part.hold("old")
    part.mark()
    part.store.mark_invalid("another", a_mark(5001))
    assert part.heed() == ["old"]
    part.hold("new")
    part.hold("late", origin="other-node")
    assert part.heed(1.0) == ["late"]
    assert part.heed(LATE_SECONDS) == []
    part.hold("of today", origin="other-node")
    assert part.heed(1.0) == [], "by now everybody has heard"
    part.mark()
    assert part.heed() == ["new", "of today"]


def test_a_copy_on_its_way_is_not_kept_however_late_it_comes(part: Part) -> None:
    part.heed()
    part.mark()
    header, clock = TensorHeader("uint8", (4,), 4), part.loop.time
    item = part.arena.reserve(("ns", "k"), header, origin="other-node", ttl_seconds=None)
    assert item is not None
    began = clock()
    part.heed()
    late = clock() + LATE_SECONDS - 1.0
    part.heed(LATE_SECONDS)
    part.heed(100.0)
    assert part.arena.is_invalid(item, began)
    assert part.arena.is_invalid(item, late), "its holder may not have read the mark yet"
    assert not part.arena.is_invalid(item, clock())
    part.arena.abandon(item)


def test_a_large_namespace_is_removed_in_pages(part: Part) -> None:
    part.heed()
    for n in range(2 * PAGE + 1):
        part.hold(f"k{n}")
    part.mark()
    gone: list[int] = []

    async def apply() -> None:
        await part.invalidations.apply(awaited(part.store))
        while len(gone) < 4:
            gone.append(len(part.gone))
            await asyncio.sleep(0)

    applied = part.loop.create_task(apply())
    part.loop.run(0.0)
    applied.result()
    assert gone == [0, PAGE, 2 * PAGE, 2 * PAGE + 1], "the loop goes on between them"


def test_a_bug_in_a_removal_is_raised_and_ends_no_other(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    part.heed()
    for n in range(3):
        part.hold(f"k{n}")
    part.mark()
    with monkeypatch.context() as patch:
        patch.setattr(part.arena, "remove", lambda *_: 1 / 0)
        assert part.heed() == []
    with pytest.raises(ZeroDivisionError):
        part.heed(1.0)
    assert len(part.gone) == 2
    assert part.heed(1.0) == []


@pytest.mark.parametrize(
    ("at", "gone"),
    [(0, []), (4939, []), (4941, ["first"]), (5001, ["first"]), (10**12 - 1, ["first"])],
)
def test_the_first_marks_read_count_unless_they_are_older_than_the_node(
    part: Part, at: int, gone: list[str]
) -> None:
    """The clocks of two hosts may differ by a minute."""
    part.hold("first")
    part.mark(at)
    assert part.heed() == gone
    part.hold("second")
    assert part.heed(LATE_SECONDS) == []


def test_an_old_mark_drops_nothing_again(part: Part) -> None:
    """A snapshot of the store brings it back, also after the store had lost all."""
    part.heed()
    marks = []
    for n in range(2):
        part.hold(f"before {n}")
        marks.append(part.mark())
        assert part.heed() == [f"before {n}"]
    part.hold("kept")
    part.store.mark_invalid("ns", marks[0])
    assert part.heed() == []
    part.store = MemoryStore()
    assert part.heed() == []
    part.store.mark_invalid("ns", marks[1])
    assert part.heed() == []
    part.mark()
    assert part.heed() == ["kept"]


def test_a_mark_from_before_the_node_drops_nothing_when_it_comes_back(part: Part) -> None:
    old = part.mark(4000)
    assert part.heed() == []
    part.hold("kept")
    part.store = MemoryStore()
    assert part.heed() == []
    part.store.mark_invalid("ns", old)
    assert part.heed() == []


@pytest.mark.parametrize("before", [0, 4000, 5001, 10**12 - 1])
@pytest.mark.parametrize("at", [0, 4000, 5001])
def test_no_mark_hides_a_later_one_whatever_their_times(part: Part, before: int, at: int) -> None:
    """Of a writer of the store, or by a clock that is wrong."""
    part.heed()
    part.mark(before)
    part.heed()
    part.heed(LATE_SECONDS)
    part.hold("wrong")
    part.mark(at)
    assert part.heed() == ["wrong"]


def test_what_is_remembered_of_marks_is_bounded(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the list has are never forgotten: they would drop the items at every beat."""
    monkeypatch.setattr(invalidations_module, "SEEN_MAX", 3)
    part.store.mark_invalid("another", a_mark(5001))
    part.mark()
    part.heed()
    for _ in range(5):
        last = part.mark()
        part.heed()
        part.heed(LATE_SECONDS)
        part.hold("kept")
        assert part.heed() == []
    seen = part.invalidations._seen
    assert seen is not None
    assert len(seen) == 3
    assert ("ns", last.id) in seen


def test_no_number_of_other_marks_hides_one(part: Part) -> None:
    """Of a writer of the store: nearly as many as nodes read, and others at each beat."""

    def crowd(mark: Invalidation | None = None) -> None:
        part.store = MemoryStore()
        for number in range(INVALIDATIONS_MAX - 2):
            part.store.mark_invalid(f"{part.loop.time()}-{number}", a_mark(5001))
        if mark is not None:
            part.store.mark_invalid("ns", mark)

    part.heed()
    for _ in range(2):
        crowd()
        assert part.heed(1.0) == []
    header = TensorHeader("uint8", (4,), 4)
    coming = part.arena.reserve(("ns", "k"), header, origin="other-node", ttl_seconds=None)
    assert coming is not None
    began, mark = part.loop.time(), a_mark(5001)
    part.hold("old")
    crowd(mark)
    assert part.heed() == ["old"]
    part.hold("new")
    for second in range(int(LATE_SECONDS)):
        part.hold("late", origin="other-node")
        crowd(mark)
        assert part.heed(1.0) == ["late"], f"{second} s later"
        assert part.arena.is_invalid(coming, began)
    part.store = MemoryStore()
    part.heed(LATE_SECONDS)
    part.hold("of today", origin="other-node")
    assert part.heed(1.0) == [], "the control: they have ended"
    assert part.arena.is_invalid(coming, began)
    part.arena.abandon(coming)


# -- what the command says


def test_a_mark_by_a_clock_that_was_ahead_does_not_hide_the_next_one(
    store: BlockingStore, url: str
) -> None:
    space, ahead = Namespace.named(f"ahead-{secrets.token_hex(4)}").fingerprint, a_mark(10**12 - 1)
    store.mark_invalid(space, ahead)
    run_json("invalidate", space, "--store-url", url)
    mark = store.invalidations()[space]
    assert mark.id != ahead.id
    assert abs(mark.at - time.time()) < 3600


def test_it_fails_if_the_mark_does_not_stay(store: BlockingStore, url: str) -> None:
    """Here a writer of the store removes it; a fail-over may, too."""
    space, removed = Namespace.named(f"lost-{secrets.token_hex(4)}").fingerprint, threading.Event()
    store.beat("silent", "boot", 1)  # it is waited for, for some seconds

    def remove() -> None:
        while not removed.is_set() and command(url, "HDEL", layout.INVALID, space) != b":1":
            time.sleep(0.01)

    removing = threading.Thread(target=remove)
    removing.start()
    done = run("invalidate", space, "--store-url", url)
    removed.set()
    removing.join()
    assert_refused(done, 1, f"the mark of namespace {space} did not stay", "invalidate again")


def test_it_fails_if_nodes_may_not_find_the_mark(store: BlockingStore, url: str) -> None:
    """They read a bounded part of the list."""
    mark, spaces = a_mark().text, [f"n{number}" for number in range(INVALIDATIONS_MAX)]
    for start in range(0, len(spaces), 4096):
        page = spaces[start : start + 4096]
        command(url, "HSET", layout.INVALID, *(text for n in page for text in (n, mark)))
    space = Namespace.named(f"crowd-{secrets.token_hex(4)}").fingerprint
    refused = run("invalidate", space, "--store-url", url)
    assert_refused(refused, 1, f"one of the {INVALIDATIONS_MAX} that nodes read", layout.INVALID)
    command(url, "UNLINK", layout.INVALID)
    assert run("invalidate", space, "--store-url", url).returncode == 0
