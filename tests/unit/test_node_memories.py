"""The memory of lost nodes is unmapped, while others are read and never under a reader."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from lookup_buffer.client import memories
from lookup_buffer.client.memories import NodeMemories
from lookup_buffer.errors import Closed, NodeUnavailable
from patience import scaled


class Memory:
    """Stands in for the memory of a node."""

    def __init__(self, on_close: Callable[[], None] = lambda: None) -> None:
        self._on_close = on_close
        self.unmapped = threading.Event()

    def close(self) -> None:
        self._on_close()
        self.unmapped.set()


class Nodes(NodeMemories):
    """With the memory of a node that was lost long ago, and of one that is connected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.read_meanwhile = False
        self.lost, self.live = Memory(self._read), Memory()
        self.show("lost", self.lost)
        self.show("live", self.live)
        self.mark_lost("lost")
        monkeypatch.setattr(memories, "LOST_SECONDS", -1.0)

    def show(self, boot: str, memory: Any) -> None:
        self.add(boot, memory)

    def _read(self) -> None:
        """On another thread, since the lock may be held here."""
        reader = threading.Thread(target=self._read_once, daemon=True)
        reader.start()
        reader.join(scaled(2.0))

    def _read_once(self) -> None:
        with suppress(Closed), self.use("live"):
            self.read_meanwhile = True


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(monkeypatch)


def test_reads_go_on_while_lost_memory_is_unmapped(nodes: Nodes) -> None:
    nodes.retire_lost()
    assert nodes.lost.unmapped.wait(scaled(5.0))
    assert nodes.read_meanwhile
    assert not nodes.live.unmapped.is_set()
    with pytest.raises(NodeUnavailable), nodes.use("lost"):
        pass


def test_the_last_reader_of_lost_memory_unmaps_it(nodes: Nodes) -> None:
    with nodes.use("lost"):
        with nodes.use("lost"):
            nodes.retire_lost()
        assert not nodes.lost.unmapped.is_set()
    assert nodes.lost.unmapped.is_set()
    assert nodes.read_meanwhile


def test_a_new_session_with_the_same_node_unmaps_what_the_former_one_mapped(nodes: Nodes) -> None:
    again = Memory()
    nodes.show("lost", again)
    assert nodes.lost.unmapped.wait(scaled(5.0))
    assert nodes.read_meanwhile
    nodes.retire_lost()
    assert not again.unmapped.is_set()
    with nodes.use("lost"):
        pass


def test_without_a_thread_the_last_reference_unmaps_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    nodes.retire_lost()
    with pytest.raises(NodeUnavailable), nodes.use("lost"):
        pass


def test_what_is_used_after_the_close_is_closed(nodes: Nodes) -> None:
    nodes.close()
    for memory in (nodes.lost, nodes.live):
        assert memory.unmapped.is_set()
    with pytest.raises(Closed), nodes.use("live"):
        pass


def test_what_is_added_after_the_close_is_unmapped(nodes: Nodes) -> None:
    """A session opened while its client was closed: its arena stayed mapped."""
    nodes.close()
    late = Memory()
    with pytest.raises(Closed):
        nodes.show("late", late)
    assert late.unmapped.is_set()
    with pytest.raises(Closed), nodes.use("late"):
        pass
