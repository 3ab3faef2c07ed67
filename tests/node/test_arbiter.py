"""Claims over the mirror's connections: their cost at the server, and shards without one."""

import time
from contextlib import ExitStack

import pytest
import torch

from claiming import NAMESPACE, ask, claim_in, keys, settled
from clusters import ValkeyCluster, slot_of
from lookup_buffer.client.buffer import EngineRank
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.protocol.messages import ClaimOutcome
from mirrors import kill_tracked
from nodes import NodeProcess, StartNode, key, wait_until, with_store
from servers import command
from store import EmbeddedServer, layout

Pair = tuple[NodeProcess, NodeProcess]


@pytest.fixture(scope="module")
def node_pair(node_pair: Pair) -> Pair:
    with_store(*node_pair)
    return node_pair


def calls(server: EmbeddedServer) -> dict[str, int]:
    """How often the server was given each command since it started."""
    lines = command(server.url, "INFO", "commandstats").decode().splitlines()
    counted = (line.removeprefix("cmdstat_").split(":calls=") for line in lines if "calls=" in line)
    return {name: int(rest.partition(",")[0]) for name, rest in counted}


def test_a_new_item_costs_one_request_to_the_server(
    node_pair: Pair, valkey_server: EmbeddedServer
) -> None:
    """The script's reply has the record, which answers the prefetch."""
    names = [key() for _ in range(100)]
    with node_pair[0].client() as buffer:
        ask(buffer, keys(1))  # the node is connected, the script known
        before = calls(valkey_server)
        for name in names:
            (handle,), claims = buffer.prefetch_and_claim([name], wait_seconds=5.0, timeout=5.0)
            assert handle.wait(5.0) is PrefetchState.MISSING
            assert settled(claims) is ClaimOutcome.GRANTED
        after = calls(valkey_server)
        buffer.unclaim(names)
    asked = {name: after[name] - before.get(name, 0) for name in after}
    assert asked["set"] == len(names)
    # Beats are scripts, too, and continue; each script that claims reads the record once.
    assert len(names) <= asked["evalsha"] < 1.5 * len(names)
    assert len(names) <= asked["hgetall"] < 1.5 * len(names)


def test_a_server_that_forgot_its_scripts_is_given_them_again(
    node_pair: Pair, valkey_server: EmbeddedServer
) -> None:
    (name,) = keys(1)
    with node_pair[0].client() as buffer, node_pair[1].client() as other:
        ask(buffer, keys(1))
        command(valkey_server.url, "SCRIPT", "FLUSH")
        assert buffer.claim(name, lease_seconds=60.0).remaining_seconds > 0, "granted unasked"
        assert other.claim(name, lease_seconds=60.0).outcome is ClaimOutcome.HELD
        command(valkey_server.url, "SCRIPT", "FLUSH")
        assert buffer.release_claim(name)
        assert claim_in(valkey_server, name) == b"$-1"


def test_a_connection_that_was_cut_neither_grants_nor_keeps_a_claim(
    node_pair: Pair, valkey_server: EmbeddedServer
) -> None:
    held, ours = keys(2)
    with node_pair[1].client() as holder, node_pair[0].client() as other:
        assert holder.claim(held, lease_seconds=60.0).granted
        assert other.claim(ours, lease_seconds=60.0).remaining_seconds > 0
        for _ in range(2):
            kill_tracked(valkey_server.url)
            assert other.claim(held, lease_seconds=60.0).outcome is ClaimOutcome.HELD
        kill_tracked(valkey_server.url)
        assert other.release_claim(ours)
        assert claim_in(valkey_server, ours) == b"$-1"


def test_a_claim_on_a_slot_that_has_moved_is_decided_where_it_is(
    valkey_cluster: ValkeyCluster, start_node: StartNode
) -> None:
    nodes = [start_node(store_url=valkey_cluster.url) for _ in range(2)]
    for node in nodes:
        wait_until(lambda node=node: node.stats()["store_up"], 5.0)  # type: ignore[misc]
    name = key()
    record = layout.record(NAMESPACE, name.text)
    source = valkey_cluster.owner(record)
    target = next(master for master in valkey_cluster.masters() if master is not source)
    with nodes[0].client() as first, nodes[1].client() as second:
        for buffer in (first, second):  # both know the owner of the slot
            assert not any(buffer.has_caches([name], timeout=1.0))
        valkey_cluster.move_slot(slot_of(record), target)
        try:
            answer = first.claim(name, lease_seconds=60.0)
            assert answer.granted
            assert answer.remaining_seconds > 0, "granted unasked"
            assert second.claim(name, lease_seconds=60.0).outcome is ClaimOutcome.HELD
            assert first.release_claim(name)
            assert second.claim(name, lease_seconds=60.0).granted
            assert second.release_claim(name)
        finally:
            valkey_cluster.move_slot(slot_of(record), source)


def test_waiting_engines_send_no_requests_to_the_server(
    node_pair: Pair, valkey_server: EmbeddedServer
) -> None:
    """Each takes the first key and gives it back, for the second is another's; and by that none
    wakes the others for ever."""
    first, second = keys(2)
    with ExitStack() as stack:
        holder = stack.enter_context(node_pair[1].client())
        assert holder.claim(second, lease_seconds=60.0).granted
        seats = [EngineRank(key("engine").text, None, 1) for _ in range(16)]
        buffers = [stack.enter_context(node_pair[0].client(engine=seat)) for seat in seats]
        waits = [ask(buffer, [first, second]) for buffer in buffers]
        before = calls(valkey_server)["evalsha"]
        time.sleep(2.0)
        # Each checks once a second; there are thousands of checks if they notify each other.
        assert calls(valkey_server)["evalsha"] - before < 1000
        holder.insert(second, torch.ones(3))
        assert [settled(one, 5.0) for one in waits] == [ClaimOutcome.STORED] * len(waits)
