"""The store killed, frozen, flushed, full or garbled: local hits continue, the rest misses in
time."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from lookup_buffer.access import TIMEOUT_SECONDS, TIMEOUT_SECONDS_MAX
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import LookupTimeout, MissingTensor
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.messages import InsertOutcome
from lookup_buffer.runtime import to_json
from nodes import (
    MIB,
    ROOT,
    NodeProcess,
    StartNode,
    at_rest,
    key,
    tensor_of,
    wait_until,
    with_store,
)
from patience import quickest, scaled
from proxies import Blackhole
from server_clients import (
    Monitor,
    clients,
    cut_all,
    place_of,
    records_in_scripts,
    records_read,
    refusals,
)
from servers import StartServer, command, frozen
from store import EmbeddedServer, layout
from switchovers import Switchover

NAMESPACE = Namespace.named("tests").fingerprint
BACK_SECONDS = 5.0
"""The stated bound is about three seconds: a beat, a breaker's pause, a walk. The rest is noise."""


def seconds_of(use: Callable[[], object]) -> float:
    started = time.monotonic()
    use()
    return time.monotonic() - started


class Pair:
    """Two nodes on a separate store, with the default timeouts, and a client of each."""

    def __init__(self, server: EmbeddedServer, start_node: StartNode) -> None:
        self.server = server
        self.nodes: list[NodeProcess] = [
            start_node(store_url=server.url, store_timeout_seconds=TIMEOUT_SECONDS)
            for _ in range(2)
        ]
        self.here, self.there = (node.client() for node in self.nodes)
        for node in self.nodes:
            wait_until(lambda n=node: n.stats()["store_up"], 5.0)  # type: ignore[misc]

    def share(self) -> None:
        """Insert there, select here."""
        name, tensor = key("shared"), torch.randn(50)
        self.there.insert(name, tensor)
        self.expect(self.here, name, tensor, BACK_SECONDS)

    def expect(
        self, reader: LookupBuffer, name: object, tensor: torch.Tensor, seconds: float = 0.0
    ) -> None:
        timeout = scaled(seconds) if seconds else 0.0
        found = reader.select(name, timeout=timeout)  # type: ignore[arg-type]
        assert found is not None
        assert torch.equal(found, tensor)

    def end(self) -> None:
        self.here.close()
        self.there.close()
        for node in self.nodes:
            at_rest(node)


@pytest.fixture
def server(start_server: StartServer) -> EmbeddedServer:
    return start_server()


@pytest.fixture
def pair(server: EmbeddedServer, start_node: StartNode) -> Iterator[Pair]:
    pair = Pair(server, start_node)
    pair.share()
    yield pair
    pair.end()


def goes_on_locally(pair: Pair, name: object, tensor: torch.Tensor) -> None:
    """What this host can do without a store, in the times it takes with one."""
    assert quickest(lambda: pair.expect(pair.here, name, tensor), 0.3) < 0.3
    assert quickest(lambda: pair.here.insert(key("fresh"), tensor), 0.3) < 0.3
    fresh = key("fresh")
    pair.here.insert(fresh, tensor)
    assert quickest(lambda: pair.expect(pair.here, fresh, tensor), 0.3) < 0.3
    assert pair.here.insert(fresh, tensor) is InsertOutcome.EXISTS
    handle = pair.here.prefetch([fresh], timeout=scaled(1.0))[0]
    assert handle.state.value == "resident"
    pair.here.release(handle)


def misses_in_time(pair: Pair, remote: object) -> None:
    def select() -> None:
        with pytest.raises(MissingTensor):
            pair.here.select(remote)  # type: ignore[arg-type]

    def wait() -> None:
        with pytest.raises(LookupTimeout):
            pair.here.select(remote, timeout=0.5)  # type: ignore[arg-type]

    def ask_for_many() -> None:
        pair.here.has_caches([remote] * 20, timeout=0.05)  # type: ignore[list-item]

    for _ in range(5):
        assert quickest(select, 1.5) < 1.5
        assert quickest(ask_for_many, 0.4) < 0.4
    assert pair.here.has_caches([remote], timeout=0.05) == [False]  # type: ignore[list-item]
    assert quickest(wait, 2.0) < 2.0
    handle = pair.here.prefetch([remote], timeout=scaled(3.0))[0]  # type: ignore[list-item]
    assert (handle.state.value, handle.reason) == ("missing", "store_down")
    assert pair.here.stats()["misses_store_down"] > 0

    def claim_by_many() -> None:
        answers: list[bool] = []

        def claim() -> None:
            answers.append(pair.here.claim(key(), lease_seconds=9.0).granted)

        threads = [threading.Thread(target=claim) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [True] * 12, "by a store that is down"

    assert quickest(claim_by_many, 2.0) < 2.0


def test_the_store_is_frozen_and_resumed(pair: Pair) -> None:
    local, remote, tensor = key("local"), key("remote"), torch.randn(1000)
    known, known_too = key("known"), key("known too")
    pair.here.insert(local, tensor)
    for name in (remote, known, known_too):
        pair.there.insert(name, tensor)
    wait_until(lambda: all(pair.here.has_caches([known, known_too], timeout=1.0)), BACK_SECONDS)
    with frozen(pair.server):
        # Look-ups use the mirror's entries until the other node counts as dead.
        selected = pair.here.select(known)
        assert selected is not None
        assert torch.equal(selected, tensor)
        goes_on_locally(pair, local, tensor)
        misses_in_time(pair, remote)
        while_frozen = key("while frozen")
        pair.there.insert(while_frozen, tensor)
        time.sleep(6.5)  # longer than a node may be silent before it counts as dead
        goes_on_locally(pair, local, tensor)
        assert pair.here.has_caches([known_too], timeout=0.05) == [False]
    pair.expect(pair.here, while_frozen, tensor, BACK_SECONDS)
    pair.expect(pair.here, remote, tensor, BACK_SECONDS)
    pair.share()


@pytest.mark.parametrize("pause_ms", [700, 1500])
def test_a_late_answer_costs_nothing_that_was_known(pair: Pair, pause_ms: int) -> None:
    known = [key() for _ in range(300)]
    names = {layout.record(NAMESPACE, name.text) for name in known[1:]}
    for name in known:
        pair.there.insert(name, torch.ones(3))
    wait_until(lambda: all(pair.here.has_caches(known, timeout=1.0)), BACK_SECONDS)
    with Monitor(place_of(pair.server.url)) as monitor:

        def an_answer_is_late() -> bool:
            command(pair.server.url, "CLIENT", "PAUSE", pause_ms, "ALL")
            (new,) = pair.here.prefetch([key()], timeout=scaled(1.0))
            assert pair.here.has_caches(known, timeout=1.0) == [True] * len(known)
            return new.reason == "store_down"

        wait_until(an_answer_is_late, BACK_SECONDS)
        pair.expect(pair.here, known[0], torch.ones(3))
        wait_until(lambda: pair.here.prefetch([key()], timeout=1.0)[0].reason == "absent", 2.0)
        assert pair.here.has_caches(known, timeout=1.0) == [True] * len(known)
        assert not names & set(records_read(monitor.commands())), "read again"


def test_cut_connections_cost_no_publications(pair: Pair) -> None:
    names, place = [key() for _ in range(400)], place_of(pair.server.url)
    for name in names:
        pair.there.insert(name, torch.ones(3))
    with_all_written(*pair.nodes)
    with Monitor(place) as monitor:
        for _ in range(2):
            assert cut_all(place) >= len(pair.nodes)
            wait_for_beats(pair.server.url, pair.nodes, 2)
        assert records_in_scripts(monitor.commands()) == []
    wait_until(lambda: all(pair.here.has_caches(names, timeout=1.0)), BACK_SECONDS)


def test_a_demoted_server_is_left(switchover: Switchover, start_node: StartNode) -> None:
    nodes = [start_node(store_url=switchover.url) for _ in range(2)]
    before, during, after, claimed = (key() for _ in range(4))
    tensor = torch.randn(50)
    with nodes[0].client() as here, nodes[1].client() as there:
        with_store(*nodes)
        there.insert(before, tensor)
        wait_until(lambda: here.has_caches([before], timeout=1.0)[0], BACK_SECONDS)
        with_all_written(*nodes)
        switchover.demote()
        there.insert(during, tensor)
        wait_until(lambda: refusals(switchover.old.port, "READONLY") > 0, BACK_SECONDS)
        switchover.lead_to_the_new_one()
        waited = wait_until(lambda: not clients(switchover.old.port), BACK_SECONDS, "all left it")
        with_all_written(*nodes)
        print(f"the old server was left after {waited:.2f} s")
        there.insert(after, tensor)
        for name in (before, during, after):
            found = here.select(name, timeout=scaled(BACK_SECONDS))
            assert found is not None
            assert torch.equal(found, tensor)
        assert there.claim(claimed, lease_seconds=60.0).granted
        assert not here.claim(claimed, lease_seconds=60.0).granted
        records = [layout.record(NAMESPACE, name.text) for name in (before, during, after)]
        assert switchover.new.command("EXISTS", *records) == len(records)
        wait_until(lambda: all(node.stats()["store_up"] for node in nodes), BACK_SECONDS)


def with_all_written(*nodes: NodeProcess) -> None:
    for node in nodes:
        wait_until(lambda n=node: n.stats()["unpublished"] == 0, BACK_SECONDS)  # type: ignore[misc]


def wait_for_beats(url: str, nodes: Sequence[NodeProcess], count: int) -> None:
    """So many beats later: a node that noticed a loss with one has acted on it with the next."""

    def sequences() -> list[int]:
        beats = [command(url, "HGET", layout.NODES, node.node_id) for node in nodes]
        return [int(beat.rpartition(b":")[2]) for beat in beats]

    due = [sequence + count for sequence in sequences()]
    wait_until(
        lambda: all(now >= then for now, then in zip(sequences(), due, strict=True)), BACK_SECONDS
    )


@pytest.mark.alone
def test_no_call_waits_for_a_frozen_store(pair: Pair) -> None:
    wanted = [key() for _ in range(20)]
    budget = 0.05

    def slow_ones() -> int:
        """Of all requests within five seconds, in which the store is tried many times."""
        slow, until = 0, time.monotonic() + 5.0
        while time.monotonic() < until:
            slow += seconds_of(lambda: ask(pair.here, wanted, budget)) > 0.8 * budget
            time.sleep(0.005)
        return slow

    with frozen(pair.server):
        wait_until(lambda: seconds_of(lambda: ask(pair.here, wanted, budget)) < budget / 2, 2.0)
        # Other processes may have the processor for a while, not each time.
        assert any(slow_ones() <= 2 for _ in range(6))


def ask(client: LookupBuffer, wanted: list[TensorKey], budget: float) -> None:
    assert client.has_caches(wanted, timeout=budget) == [False] * len(wanted)


def test_a_frozen_store_is_a_miss_however_long_its_calls_may_take(
    server: EmbeddedServer, start_node: StartNode
) -> None:
    for settings in ({}, {"mirror": False}):
        node = start_node(store_url=server.url, store_timeout_seconds=3.0, **settings)
        with node.client() as client:
            wait_until(lambda: node.stats()["store_up"], 5.0)  # noqa: B023
            with frozen(server):
                for _ in range(2):
                    with pytest.raises(MissingTensor, match="store_down"):
                        client.select(key())
                with pytest.raises(LookupTimeout, match="store_down"):
                    client.select(key(), timeout=0.3)
        at_rest(node)


def test_the_store_is_killed_and_comes_back_empty(
    start_server: StartServer, start_node: StartNode, tmp_path: Path
) -> None:
    pair = Pair(start_server(), start_node)
    tensor, names = torch.randn(100), [key("before") for _ in range(50)]
    local, during = key("local"), key("during")
    pair.here.insert(local, tensor)
    for name in names:
        pair.there.insert(name, tensor)
    os.kill(pair.server.pid, signal.SIGKILL)
    wait_until(lambda: not pair.server.running, 5.0)
    goes_on_locally(pair, local, tensor)
    misses_in_time(pair, names[0])
    pair.there.insert(during, tensor)
    pair.server.close()
    with EmbeddedServer.start(pair.server.directory, timeout_seconds=scaled(10.0)):
        wanted = [*names, during]
        wait_until(lambda: all(pair.here.has_caches(wanted, timeout=1.0)), BACK_SECONDS)
        for name in wanted:
            pair.expect(pair.here, name, tensor)
        pair.share()
        pair.end()


def test_foreign_values_under_our_keys_are_misses(pair: Pair) -> None:
    name, healthy = key("poisoned"), key("healthy")
    pair.there.insert(name, torch.ones(3))
    wait_until(lambda: pair.here.has_caches([name], timeout=1.0)[0], BACK_SECONDS)
    record = next(
        line
        for line in command_keys(pair.server.url)
        if line.startswith("lb:rec:") and name.mm_hash in line
    )
    assert command(pair.server.url, "SET", record, "not a hash") == b"+OK"
    # Until the server's invalidation arrives, the entry that was read before is used.
    wait_until(lambda: not pair.here.has_caches([name], timeout=1.0)[0], BACK_SECONDS)
    with pytest.raises(MissingTensor):
        pair.here.select(name)
    pair.there.insert(healthy, torch.ones(2))
    pair.expect(pair.here, healthy, torch.ones(2), BACK_SECONDS)
    # Endpoints and beats of nodes that never were: passed over.
    assert command(pair.server.url, "DEL", record) == b":1"
    garbage = ("node", "ghost", "boot", "beef", "endpoint", "http://[no/address", "host", "x")
    command(pair.server.url, "HSET", "lb:nodes", "ghost", "beef:1", "worse", "no beat")
    command(pair.server.url, "HSET", "lb:node:ghost", *garbage)
    pair.share()


def test_foreign_values_under_the_nodes_keys_are_logged_and_harm_nothing_local(
    server: EmbeddedServer, start_node: StartNode
) -> None:
    node, tensor = start_node(store_url=server.url), torch.ones(3)
    wait_until(lambda: node.stats()["store_up"], BACK_SECONDS)
    described = f"lb:node:{node.node_id}"
    assert command(server.url, "DEL", described) == b":1"
    assert command(server.url, "SET", described, "x") == b"+OK"
    wait_until(lambda: f"{described} was not written by us" in node.log_text(), BACK_SECONDS)
    assert node.stats()["store_up"] == 1
    assert command(server.url, "SET", "lb:nodes", "x") == b"+OK"
    wait_until(lambda: "lb:nodes was not written by us" in node.log_text(), BACK_SECONDS)
    wait_until(lambda: not node.stats()["store_up"], BACK_SECONDS)
    with node.client() as client:
        name = key()
        client.insert(name, tensor)
        found = client.select(name)
        assert found is not None
        assert torch.equal(found, tensor)
    assert command(server.url, "DEL", "lb:nodes", described) == b":2"
    wait_until(lambda: node.stats()["store_up"], BACK_SECONDS)
    assert node.log_text().count("lb:nodes was not written by us") == 1


def command_keys(url: str) -> list[str]:
    """All keys of the server, by SCAN through a script: its reply is one text."""
    script = "return table.concat(redis.call('KEYS', 'lb:*'), '\\n')"
    return command(url, "EVAL", script, 0).decode().split("\n")


def test_a_full_store_costs_sharing_only(start_server: StartServer, start_node: StartNode) -> None:
    pair = Pair(start_server(policy="noeviction"), start_node)
    tensor = torch.randn(100)
    pair.share()
    assert command(pair.server.url, "CONFIG", "SET", "maxmemory", "1") == b"+OK"
    name = key("refused")
    pair.there.insert(name, tensor)
    pair.expect(pair.there, name, tensor)
    wait_until(lambda: pair.nodes[1].stats().get("publish_refused", 0) > 0, BACK_SECONDS)
    assert pair.here.has_caches([name], timeout=0.2) == [False]
    time.sleep(1.0)
    assert command(pair.server.url, "CONFIG", "SET", "maxmemory", "0") == b"+OK"
    pair.share()
    pair.end()


def test_a_full_store_grants_claims_and_takes_them_back(
    start_server: StartServer, start_node: StartNode
) -> None:
    pair = Pair(start_server(policy="noeviction"), start_node)
    name = key("claimed before")
    assert pair.here.claim(name, lease_seconds=60.0).granted
    assert command(pair.server.url, "CONFIG", "SET", "maxmemory", "1") == b"+OK"
    for _ in range(6):
        assert pair.here.claim(key(), lease_seconds=9.0).granted
    assert pair.here.release_claim(name), "no wait for a lease that could have ended"
    pair.end()


def test_a_full_store_makes_no_node_dead(start_server: StartServer, start_node: StartNode) -> None:
    """Descriptions and counters are refused then; beats are not, and are read on."""
    pair = Pair(start_server(policy="noeviction"), start_node)
    name = key("published before")
    pair.there.insert(name, torch.ones(3))
    wait_until(lambda: pair.here.has_caches([name], timeout=1.0)[0], BACK_SECONDS)
    assert command(pair.server.url, "CONFIG", "SET", "maxmemory", "1") == b"+OK"
    until = time.monotonic() + 7.0  # longer than a node may be silent before it counts as dead
    while time.monotonic() < until:
        assert pair.here.has_caches([name], timeout=5.0) == [True]
        time.sleep(0.05)
    pair.expect(pair.here, name, torch.ones(3))
    pair.end()


@pytest.mark.parametrize(("scheme", "mirror"), [("redis", True), ("redis-cluster", False)])
def test_a_node_that_ends_in_the_middle_of_a_dial(scheme: str, mirror: bool) -> None:
    """In Python's development mode: see test_shutdown.py."""
    directory = Path(tempfile.mkdtemp(prefix="lbt-"))  # short enough for a unix socket
    with Blackhole() as nobody:
        settings = BufferConfig.of(
            {
                "directory": directory,
                "store_url": f"{scheme}://127.0.0.1:{nobody.port}",
                "store_timeout_seconds": TIMEOUT_SECONDS_MAX,
                "capacity_bytes": 16 * MIB,
                "mirror": mirror,
            }
        )
        node = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", "-m", "lookup_buffer.node.main"],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert node.stdin is not None
        node.stdin.write(to_json(settings))
        node.stdin.close()
        node.stdin = None
        try:
            wait_until(lambda: settings.socket_path().exists() or node.poll() is not None, 20.0)
            time.sleep(0.5)  # its threads dial
            node.terminate()
            _, said = node.communicate(timeout=scaled(TIMEOUT_SECONDS_MAX))
        finally:
            node.kill()
            shutil.rmtree(directory)
    # A step of the loop that took 0.1 s, as on a busy machine, is reported too.
    lines = [line for line in said.splitlines() if "WARNING: Executing <" not in line]
    assert (node.returncode, lines) == (0, [])


def test_no_store_at_the_start(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node(store_url=f"unix://{tmp_path}/nobody.sock")
    with node.client() as client:
        name, tensor = key(), tensor_of("alone", MIB)
        client.insert(name, tensor)
        found = client.select(name)
        assert found is not None
        assert torch.equal(found, tensor)
        assert quickest(lambda: client.has_caches([key()], timeout=0.05), 0.4) < 0.4
        with pytest.raises(MissingTensor, match="store_down"):
            client.select(key())
        assert client.stats()["store_up"] == 0
    at_rest(node)
