"""Sets of claims: all or none, in one order for all, and no wait while holding a claim."""

import time
from contextlib import ExitStack

import pytest
import torch

from claiming import SOON_SECONDS, ask, claim_in, keys, settled
from lookup_buffer.access import TIMEOUT_SECONDS
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import ClaimOutcome
from nodes import ClientProcess, NodeProcess, StartNode, holds_within, wait_until, with_store
from patience import scaled
from servers import StartServer, frozen
from store import ClaimState, EmbeddedServer

Pair = tuple[NodeProcess, NodeProcess]


@pytest.fixture(scope="module")
def node_pair(node_pair: Pair) -> Pair:
    with_store(*node_pair)
    return node_pair


def test_free_keys_are_granted_as_intents(node_pair: Pair, valkey_server: EmbeddedServer) -> None:
    names = keys(3)
    with node_pair[0].client() as buffer:
        assert ask(buffer, names).state is ClaimOutcome.GRANTED
        assert [b":intent:" in claim_in(valkey_server, name) for name in names] == [True] * 3
        buffer.encoding(names, lease_seconds=20.0)
        wait_until(lambda: b":encoding:" in claim_in(valkey_server, names[2]), 2.0)
        buffer.unclaim(names)
        for name in names:
            wait_until(lambda name=name: claim_in(valkey_server, name) == b"$-1", 2.0)  # type: ignore[misc]
        assert ask(buffer, []).state is ClaimOutcome.GRANTED


def test_a_waiting_set_holds_no_claim(node_pair: Pair, valkey_server: EmbeddedServer) -> None:
    """If it kept its first claim, two sets with the same keys could block each other."""
    with node_pair[0].client() as holder, node_pair[1].client() as other:
        for _ in range(5):  # a busy machine may delay one or another
            first, second = keys(2)
            assert holder.claim(second, lease_seconds=600.0).granted
            waits = ask(other, [second, first])
            assert (waits.state, waits.key) == (ClaimOutcome.PENDING, second.text)
            assert waits.holder.startswith(node_pair[0].node_id)
            if holds_within(lambda: claim_in(valkey_server, first) == b"$-1", 0.5):  # noqa: B023
                break
        else:
            pytest.fail("it is kept until its intent lapses")
        # A late event of the second makes the waiter try again, which claims the first briefly.
        assert settled(ask(holder, [first])) is ClaimOutcome.GRANTED
        holder.unclaim([first])
        holder.insert(second, torch.ones(3))
        assert settled(waits) is ClaimOutcome.STORED
        assert waits.key == second.text


@pytest.mark.parametrize("way", ["release", "close", "lease", "kill"])
def test_the_end_of_the_blocking_claim_grants_the_whole_next_set(node_pair: Pair, way: str) -> None:
    names = keys(2)
    source = """
send(buffer.claim(receive(), lease_seconds=receive()).granted)
if receive() == "release":
    buffer.unclaim([receive()])
else:
    buffer.close()
receive()
"""
    with ClientProcess(node_pair[0].config, source) as holder, node_pair[1].client() as other:
        holder.send(names[1])
        holder.send(1.0 if way == "lease" else 600.0)
        assert holder.receive() is True
        waits = ask(other, names)
        assert waits.state is ClaimOutcome.PENDING
        if way == "kill":
            holder.kill()
        elif way != "lease":
            holder.send(way)
            holder.send(names[1])
        assert settled(waits) is ClaimOutcome.GRANTED
        with node_pair[0].client() as third:
            assert not third.claim(names[0], lease_seconds=1.0).granted


def test_an_unused_intent_blocks_others_for_a_second(node_pair: Pair) -> None:
    (name,) = keys(1)
    with node_pair[0].client() as holder, node_pair[1].client() as other:
        assert ask(holder, [name]).state is ClaimOutcome.GRANTED
        assert settled(ask(other, [name])) is ClaimOutcome.GRANTED


def test_a_wait_that_times_out_names_the_claimant(node_pair: Pair) -> None:
    names = keys(2)
    with node_pair[0].client() as holder, node_pair[1].client() as other:
        assert holder.claim(names[1], lease_seconds=30.0).granted
        started = time.monotonic()
        waits = ask(other, names, wait_seconds=0.5)
        assert settled(waits) is ClaimOutcome.HELD
        assert 0.4 < time.monotonic() - started < scaled(0.5)
        assert waits.holder.startswith(node_pair[0].node_id)


@pytest.mark.parametrize("way", ["unclaim", "close"])
def test_a_cancelled_set_is_granted_nothing(
    node_pair: Pair, valkey_server: EmbeddedServer, way: str
) -> None:
    names = keys(2)
    with node_pair[0].client() as holder, node_pair[1].client() as other:
        assert holder.claim(names[1], lease_seconds=30.0).granted
        waits = ask(other, names)
        if way == "unclaim":
            other.unclaim([], waits)
        else:
            other.close()
        time.sleep(0.2)
        assert holder.release_claim(names[1])
        time.sleep(0.3)
        assert [claim_in(valkey_server, name) for name in names] == [b"$-1"] * 2
        assert waits.state is not ClaimOutcome.GRANTED
        other.unclaim(names, waits)  # once more changes nothing


def test_crossing_pairs_of_many_engines_all_get_their_turn(node_pair: Pair) -> None:
    """Eight engines on two nodes want overlapping pairs, each again as soon as it had them."""
    names = keys(4)
    pairs = [[names[a], names[b]] for a, b in ((0, 1), (1, 2), (2, 3), (3, 0))] * 2
    rounds = dict.fromkeys(range(8), 0)
    with ExitStack() as stack:
        buffers = [stack.enter_context(node_pair[n % 2].client()) for n in range(8)]
        sets = {n: buffers[n].claim_all(pairs[n], wait_seconds=600.0) for n in range(8)}
        deadline = time.monotonic() + scaled(60.0)
        while min(rounds.values()) < 3:
            assert time.monotonic() < deadline, f"a set is never granted: {rounds}"
            granted = [n for n, one in sets.items() if one.state is ClaimOutcome.GRANTED]
            assert all(sets[n].state in (ClaimOutcome.GRANTED, ClaimOutcome.PENDING) for n in sets)
            for n in granted:
                rounds[n] += 1
                buffers[n].unclaim(pairs[n])
                sets[n] = buffers[n].claim_all(pairs[n], wait_seconds=600.0)
            time.sleep(0.002)


def test_a_store_that_freezes_grants_the_waiting_sets(
    start_server: StartServer, start_node: StartNode
) -> None:
    server = start_server()
    hasty = {"store_url": server.url, "store_timeout_seconds": TIMEOUT_SECONDS}
    nodes, names = [start_node(**hasty) for _ in range(2)], keys(2)
    for node in nodes:
        wait_until(lambda node=node: node.stats()["store_up"], 15.0)  # type: ignore[misc]
    with nodes[0].client() as holder, nodes[1].client() as other:
        assert holder.claim(names[1], lease_seconds=30.0).granted
        waits = ask(other, names)
        assert waits.state is ClaimOutcome.PENDING
        with frozen(server):
            assert settled(waits, 3.0) is ClaimOutcome.GRANTED


def test_a_node_that_dies_fails_the_waiting_sets(start_node: StartNode, node_pair: Pair) -> None:
    names, node = keys(2), start_node()
    wait_until(lambda: node.stats()["store_up"], 15.0)
    with node_pair[0].client() as holder, node.client() as other:
        assert holder.claim(names[1], lease_seconds=30.0).granted
        waits = ask(other, names)
        node.kill()
        assert settled(waits, 2.0) is ClaimOutcome.FAILED
        assert ask(other, names).state is ClaimOutcome.FAILED
        other.encoding(names, lease_seconds=1.0)
        other.unclaim(names)


def test_a_key_that_is_stored_on_any_host_is_not_granted(node_pair: Pair) -> None:
    names = keys(2)
    with node_pair[0].client() as here, node_pair[1].client() as there:
        here.insert(names[1], torch.ones(3))
        wait_until(lambda: there.has_caches([names[1]], timeout=1.0)[0], 10.0)
        for buffer in (here, there):
            one = ask(buffer, names)
            assert (one.state, one.key) == (ClaimOutcome.STORED, names[1].text)
        free = here.claim(
            names[0], lease_seconds=1.0, state=ClaimState.INTENT, timeout=SOON_SECONDS
        )
        assert free.outcome is ClaimOutcome.GRANTED


def test_prefetched_and_claimed_in_one_message(node_pair: Pair) -> None:
    nowhere, here, there = keys(3)
    with node_pair[0].client() as mine, node_pair[1].client() as other:
        handles, claims = mine.prefetch_and_claim([nowhere], wait_seconds=5.0, timeout=5.0)
        assert handles[0].state is PrefetchState.MISSING
        assert settled(claims) is ClaimOutcome.GRANTED
        _, held = other.prefetch_and_claim([nowhere], wait_seconds=0.0, timeout=5.0)
        assert settled(held) is ClaimOutcome.HELD
        mine.insert(here, torch.ones(3))
        other.insert(there, torch.ones(3))
        wait_until(lambda: mine.has_caches([there], timeout=1.0)[0], 10.0)
        for name in (here, there):
            (handle,), claims = mine.prefetch_and_claim([name], wait_seconds=5.0, timeout=5.0)
            assert handle.state is PrefetchState.RESIDENT
            assert settled(claims) is ClaimOutcome.STORED
            mine.release(handle)


def test_prefetch_and_claim_fail_for_too_many_keys_and_without_a_node(
    start_node: StartNode,
) -> None:
    node = start_node()
    with node.client() as buffer:
        many = [TensorKey(f"{number}-{'k' * 200}") for number in range(2000)]
        handles, claims = buffer.prefetch_and_claim(many, wait_seconds=5.0, timeout=5.0)
        assert claims.state is ClaimOutcome.FAILED, "more than one message takes"
        assert {handle.state for handle in handles} == {PrefetchState.MISSING}
        node.kill()
        wait_until(lambda: not buffer.boot, 10.0)
        handles, claims = buffer.prefetch_and_claim(keys(2), wait_seconds=5.0, timeout=5.0)
        assert {handle.state for handle in handles} == {PrefetchState.FAILED}
        assert claims.state is ClaimOutcome.FAILED
