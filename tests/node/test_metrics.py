"""`/metrics` and `/healthz` of real nodes: each event is counted."""

import itertools
import re
import threading
from pathlib import Path

import pytest
import torch

from lookup_buffer.dashboard.metrics import FAMILIES
from lookup_buffer.errors import BufferFull, MissingTensor
from lookup_buffer.node.counters import COUNTERS
from nodes import MIB, NodeProcess, StartNode, handoff, key, tensor_of, wait_until
from observing import families, get, number, samples
from servers import StartServer, command, free_port
from store import layout

ROOT = Path(__file__).resolve().parents[2]
Pair = tuple[NodeProcess, NodeProcess]


@pytest.fixture(scope="module")
def pair(module_nodes: StartNode) -> Pair:
    first, second = (module_nodes(http_listen=f"http://127.0.0.1:{free_port()}") for _ in range(2))
    for node in (first, second):  # their dashboards' processes are the module's, not a test's
        wait_until(lambda node=node: get(node, "/healthz")[0] == 200, 10.0)  # type: ignore[misc]
    return first, second


def _equal(got: torch.Tensor | None, value: torch.Tensor) -> bool:
    return got is not None and torch.equal(got, value)


def test_the_reference_lists_exactly_the_metrics_of_a_node(pair: Pair) -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    section = text.partition("\n## Metrics of a node\n")[2].partition("\n## ")[0]
    explained = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            name, kind, labels, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            explained[name.strip("`")] = (kind, frozenset(re.findall(r"`([a-z_]+)`", labels)))
    exposed = {}
    for family in families(pair[0]).values():
        total = "_total" if family.type == "counter" else ""
        words: set[str] = set()
        for sample in family.samples:
            words |= sample.labels.keys() - {"le"}
            if "build_info" not in family.name:
                words |= {value for name, value in sample.labels.items() if name != "le"}
        exposed[family.name + total] = (family.type, frozenset(words))
    assert explained == exposed


def test_every_metric_keeps_to_the_conventions(pair: Pair) -> None:
    for family in families(pair[0]).values():
        assert family.documentation, family.name
        assert re.fullmatch(r"(lookup_buffer|process)_[a-z_]+", family.name)
        assert "ratio" not in family.name
        assert ("total" in family.name) is False, "the parser took it from a counter's name"


def test_every_series_has_a_source_of_its_own() -> None:
    sources = [name for family in FAMILIES for name in family.series.values()]
    assert len(sources) == len(set(sources))
    counters = {
        name for family in FAMILIES if family.kind == "counter" for name in family.series.values()
    }
    assert counters == COUNTERS


def test_both_formats_have_the_same_values(pair: Pair) -> None:
    status, headers, text = get(pair[0], "/metrics", {"Accept": "application/openmetrics-text"})
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "application/openmetrics-text")
    plain = {name for name, _ in samples(pair[0])}
    open_metrics = {re.split(r"[ {]", line)[0] for line in text.splitlines() if line[0] != "#"}
    assert plain == open_metrics
    strange = {"Accept": "application/openmetrics-text; version=abc"}
    assert get(pair[0], "/metrics", strange)[0] == 200


def test_each_event_is_counted(pair: Pair) -> None:
    first, second = pair
    shared = key()
    value = tensor_of("metrics", MIB)
    wait_until(lambda: number(second, "nodes_alive") >= 2, 10.0, "they see each other")
    with first.client() as here, second.client() as there:
        here.insert(shared, value)
        here.insert(shared, value)
        assert _equal(here.select(shared), value)
        assert _equal(there.select(shared, timeout=5.0), value)
        with pytest.raises(MissingTensor):
            there.select(key())
        taken = handoff()
        here.insert(taken, value)
        assert _equal(here.drop_select(taken, timeout=5.0), value)
        assert number(first, "sessions") == 1
        assert number(first, "arena_capacity_bytes") == first.settings.capacity_bytes
        assert number(first, "arena_used_bytes") >= MIB
        # Clients report reads by the local index a little later.
        wait_until(lambda: number(first, "hits_total", source="local") >= 2, 5.0)
    wait_until(lambda: number(second, "hits_total", source="remote") == 1, 5.0)
    assert number(first, "inserts_total", outcome="stored") == 2
    assert number(first, "inserts_total", outcome="exists") == 1
    assert number(first, "handoffs_total", outcome="taken") == 1
    assert number(first, "hit_bytes_total", source="local") == 2 * MIB
    assert number(second, "hit_bytes_total", source="remote") == MIB
    assert number(first, "transfer_bytes_total", direction="received", pipe="shm") == 2 * MIB
    assert number(first, "transfer_bytes_total", direction="sent", pipe="tcp") == MIB
    assert number(second, "transfer_bytes_total", direction="received", pipe="tcp") == MIB
    assert number(second, "fetch_seconds_count") == 1
    assert number(second, "fetch_seconds_sum") > 0
    assert number(second, "misses_total", reason="absent") == 1
    assert number(first, "publications_total", outcome="written") >= 1
    wait_until(lambda: number(first, "sessions") == 0, 5.0)
    assert number(first, "sessions_opened_total") == 1
    build = [dict(labels) for name, labels in samples(first) if name.endswith("build_info")]
    assert [labels["node"] for labels in build] == [first.node_id]


def test_claims_are_counted_by_their_answer(pair: Pair) -> None:
    first, second = pair
    wanted = key()
    with first.client() as here, second.client() as there:
        assert here.claim(wanted, lease_seconds=20.0).granted
        assert number(first, "claims_total", outcome="granted") == 1
        assert number(first, "claims_held") == 1
        assert here.claim(wanted, lease_seconds=20.0).granted
        assert number(first, "claims_total", outcome="renewed") == 1
        assert not there.claim(wanted, lease_seconds=20.0).granted
        assert number(second, "claims_total", outcome="held") == 1
        here.insert(wanted, torch.ones(3))
        assert not here.claim(wanted, lease_seconds=20.0).granted
        assert number(first, "claims_total", outcome="stored") == 1
        assert number(first, "claims_held") == 0


def test_a_full_arena_counts_evictions_and_refusals(start_node: StartNode) -> None:
    node = start_node(
        http_listen=f"http://127.0.0.1:{free_port()}", capacity_bytes=8 * MIB
    )  # fmt: skip
    with node.client() as client:
        for _ in range(12):
            client.insert(key(), tensor_of("fill", MIB))
        assert number(node, "removals_total", reason="evicted") >= 4
        with pytest.raises(BufferFull):  # hand-offs may have a half
            for _ in range(5):
                client.insert(handoff(), tensor_of("fill", MIB), timeout=0.05)
        assert number(node, "inserts_total", outcome="refused") == 1
        assert 3 * MIB <= number(node, "arena_handoff_bytes") <= 4 * MIB
        client.insert(key(), torch.ones(3), ttl_seconds=0.01)
        wait_until(lambda: number(node, "removals_total", reason="expired") == 1, 5.0)


def test_a_node_without_its_store_reports_it(
    start_node: StartNode, start_server: StartServer
) -> None:
    server = start_server()
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}", store_url=server.url)
    wait_until(lambda: get(node, "/healthz")[0] == 200, 10.0, "the node joins")
    assert number(node, "store_up") == 1
    server.close()
    wait_until(lambda: get(node, "/healthz")[0] == 503, 10.0, "it notices")
    status, _, text = get(node, "/healthz")
    assert (status, text.count("\n")) == (503, 1)
    assert "the store is not reached" in text
    assert number(node, "store_up") == 0
    wait_until(lambda: number(node, "store_breaker_open") == 1, 10.0, "it gives it a pause")
    assert number(node, "store_failures_total") >= 3


def test_a_node_that_has_not_joined_reports_it(start_node: StartNode) -> None:
    """A beat of another boot under its id is watched first: here another one each time, so
    that it watches until its page was asked."""
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}")
    wait_until(lambda: get(node, "/healthz")[0] == 200, 10.0, "the node joins")
    node.kill()
    over = threading.Event()

    def beat_by_ever_new_boots() -> None:
        for turn in itertools.count():
            beat = f"boot{turn}:1"
            command(node.config.store_url, "HSET", layout.NODES, node.node_id, beat)
            if over.wait(0.1):
                return

    beating = threading.Thread(target=beat_by_ever_new_boots)
    beating.start()
    try:
        node.start()
        wait_until(lambda: "not joined its fleet" in get(node, "/healthz")[2], 10.0)
    finally:
        over.set()
        beating.join()
    assert get(node, "/metrics")[0] == 200
    wait_until(lambda: get(node, "/healthz")[0] == 200, 20.0, "it takes its place")


def test_a_blocked_loop_is_counted_and_logged_at_debug_level(start_node: StartNode) -> None:
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}", log_level="debug")
    names, over = [key() for _ in range(4000)], threading.Event()

    def keep_busy() -> None:
        with node.client() as client:
            while not over.is_set():
                client.has_caches(names, timeout=5.0)

    def is_logged() -> bool:
        with node.frozen():  # often while it looks up
            over.wait(0.1)
        return "the loop was blocked for 0.1" in node.log_text()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        wait_until(is_logged, 30.0)
    finally:
        over.set()
        busy.join()
    assert number(node, "loop_blocked_seconds_count") >= 1
