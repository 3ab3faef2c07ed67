"""`top`: what is shown of a fleet at work, once and live."""

import os
import pty
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from command_line import PROGRAM, environment, run, run_json
from lookup_buffer.cli.top import _nodes, _summary
from lookup_buffer.dashboard.metrics import FAMILIES
from lookup_buffer.errors import MissingTensor
from lookup_buffer.inspection.history import Activity, Sample
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess, StartNode, key
from servers import StartServer
from store import Beat

SPACE = Namespace.named("tests").fingerprint


@contextmanager
def busy(node: NodeProcess, hit: str, namespace: str = "tests") -> Iterator[None]:
    """A client that finds one key and misses another, again and again."""
    over = threading.Event()
    name, missing = key(hit), key()

    def work() -> None:
        with node.client(namespace) as client:
            client.insert(name, torch.ones(3))
            while not over.wait(0.01):
                client.select(name)
                with pytest.raises(MissingTensor):
                    client.select(missing)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_once(start_server: StartServer, start_node: StartNode) -> None:
    url = start_server().url  # whose hottest keys are those of this test
    here, there = node_pair = start_node(store_url=url), start_node(store_url=url)
    with busy(here, "hot-key"):
        time.sleep(2.0)
        document = run_json("top", "--store-url", url)
        text = run("top", "--store-url", url, "--interval", "3").stdout
    assert document["seconds"] >= 2.0
    for node in node_pair:
        assert document["nodes"][node.node_id]["alive"]
    mine = document["nodes"][here.node_id]["counted"]
    assert mine["hits_local"] > 10
    assert mine["misses_absent"] > 10
    assert document["nodes"][there.node_id]["counted"].get("hits_local", 0) == 0
    assert document["counted"]["hits_local"] == mine["hits_local"]
    (hottest,) = [one for one in document["hottest"] if one["key"].startswith("hot-key")]
    assert hottest["namespace"] == SPACE
    assert 0 < hottest["hits_meanwhile"] <= hottest["hits"]
    for word in ("hits and", "misses a second (absent", "hit rate ", here.node_id, "hot-key"):
        assert word in text


@pytest.mark.parametrize("size", [(24, 80), (12, 40)])
def test_live(start_server: StartServer, start_node: StartNode, size: tuple[int, int]) -> None:
    """On a separate server: the small screen has no room for nodes of other tests."""
    url = start_server().url
    here, _ = start_node(store_url=url), start_node(store_url=url)
    with busy(here, "hot"), terminal("top", url, size) as screen:
        screen.wait_for("nodes live", here.node_id[:8], "HITS/s", "hot")
        screen.interrupt()
        assert screen.process.wait(20.0) == 0


def test_a_lost_store_is_reported_and_waited_for(start_server: StartServer) -> None:
    server = start_server()
    with terminal("top", server.url, (24, 80)) as screen:
        screen.wait_for("0 of 0 nodes live")
        server.close()
        screen.wait_for("o such file")  # the path before it is wrapped
        assert screen.process.poll() is None
        screen.interrupt()
        assert screen.process.wait(20.0) == 0


class Screen:
    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._seen = b""

    def wait_for(self, *words: str) -> None:
        """Until all words were shown, since the last call."""
        deadline = time.monotonic() + 30.0
        while not all(word.encode() in self._seen for word in words):
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self._descriptor], [], [], max(0.0, left))
            assert readable, f"not shown: {words}: {self._seen[-2000:]!r}"
            self._seen += os.read(self._descriptor, 65536)
        self._seen = b""

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        try:
            while os.read(self._descriptor, 65536):
                pass
        except OSError:
            pass


@contextmanager
def terminal(name: str, url: str, size: tuple[int, int]) -> Iterator[Screen]:
    lines, columns = map(str, size)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [PROGRAM, name, "--store-url", url],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment({"TERM": "xterm", "LINES": lines, "COLUMNS": columns}),
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Screen(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# -- what it is made of


def sample(
    at: float, beats: Mapping[str, int], counters: Mapping[str, Mapping[str, int]], **hits: int
) -> Sample:
    moved = {node: Beat("boot", sequence) for node, sequence in beats.items()}
    return Sample(at, moved, {}, counters, {("ns", key): count for key, count in hits.items()})


def test_every_kind_of_hit_counts() -> None:
    """As on the dashboard and in the metrics, whose names they are."""
    (hits,) = [family.series.values() for family in FAMILIES if family.name == "hits"]
    counted = {"misses_absent": 2, **dict.fromkeys(hits, 2)}
    activity = Activity(sample(0.0, {"a": 1}, {"a": {}}), sample(2.0, {"a": 2}, {"a": counted}))
    assert f"{len(hits)}.0 hits and 1.0 misses a second" in _summary(activity)
    assert _nodes(activity)[1][0][5] == f"{len(hits)}.0"


def test_the_difference_of_two_samples() -> None:
    activity = Activity(
        sample(10.0, {"a": 1, "b": 1}, {"a": {"hits_local": 5}, "b": {"hits_local": 9}}, x=3, y=9),
        sample(
            12.0, {"a": 2, "b": 1, "c": 1},
            {"a": {"hits_local": 7}, "b": {"hits_local": 4}, "c": {"misses_absent": 1}},
            x=8, y=9, new=100,
        ),
    )  # fmt: skip
    assert activity.seconds == 2.0
    assert [activity.alive(node) for node in "abc"] == [True, False, True]
    assert activity.of_node("a") == {"hits_local": 2}
    assert activity.of_node("b") == {"hits_local": 4}, "it was started anew"
    assert activity.of_all() == {"hits_local": 6, "misses_absent": 1}
    assert activity.hottest() == [
        (("ns", "x"), 5, 8), (("ns", "new"), 0, 100), (("ns", "y"), 0, 9),
    ]  # fmt: skip
