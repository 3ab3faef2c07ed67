"""Claims of engines that encode: what other engines and their own other requests see."""

import pytest
import torch

from claiming import ask, claim_in, keys, settled
from lookup_buffer.client.buffer import EngineRank
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import ClaimOutcome
from nodes import NodeProcess, holds_within, wait_until, with_store
from store import ClaimState, EmbeddedServer

Pair = tuple[NodeProcess, NodeProcess]


@pytest.fixture(scope="module")
def node_pair(node_pair: Pair) -> Pair:
    with_store(*node_pair)
    return node_pair


def test_an_encode_is_reported_before_its_intent_expires(
    node_pair: Pair, valkey_server: EmbeddedServer
) -> None:
    """And not at once, for most are published sooner, which ends the claim anyway."""
    with node_pair[0].client() as holder, node_pair[1].client() as other:

        def is_reported_in_time(name: TensorKey) -> bool:
            assert ask(holder, [name]).state is ClaimOutcome.GRANTED
            holder.encoding([name], lease_seconds=600.0)
            waits = ask(other, [name])
            # For an intent and a half.
            if holds_within(lambda: claim_in(valkey_server, name) == b"$-1", 1.5):
                other.unclaim([name], waits)
                return False
            assert (waits.state, waits.holder != "") == (ClaimOutcome.PENDING, True)
            assert b":encoding:" in claim_in(valkey_server, name)
            holder.insert(name, torch.ones(3))
            assert settled(waits) is ClaimOutcome.STORED
            return True

        # A node that gets no processor for half a second is late.
        assert any(is_reported_in_time(name) for name in keys(5))


@pytest.mark.parametrize("way", ["insert", "unclaim"])
def test_an_encode_that_ends_early_is_never_reported(
    node_pair: Pair, valkey_server: EmbeddedServer, way: str
) -> None:
    with node_pair[0].client() as holder:

        def ends_before_its_intent_lapses(name: TensorKey) -> bool:
            assert ask(holder, [name]).state is ClaimOutcome.GRANTED
            holder.encoding([name], lease_seconds=600.0)
            if way == "insert":
                holder.insert(name, torch.ones(3))
            else:
                holder.unclaim([name])
            return holds_within(lambda: claim_in(valkey_server, name) == b"$-1", 0.5)

        name = next(name for name in keys(5) if ends_before_its_intent_lapses(name))
        assert not holds_within(lambda: claim_in(valkey_server, name) != b"$-1", 0.8)


def test_a_request_waits_for_its_own_engines_encode(node_pair: Pair) -> None:
    """Its output may have left the engine's own cache before it is stored."""
    first, second = keys(2)
    seat = EngineRank("encodes", None, 1)
    with node_pair[0].client(engine=seat) as buffer:
        buffer.encoding([first, second], lease_seconds=20.0)
        waits, given_back = ask(buffer, [first]), ask(buffer, [second])
        assert (waits.state, given_back.state) == (ClaimOutcome.PENDING, ClaimOutcome.PENDING)
        buffer.insert(first, torch.ones(3))
        assert settled(waits) is ClaimOutcome.STORED
        buffer.unclaim([second])
        assert settled(given_back, 2.0) is ClaimOutcome.GRANTED


def test_an_older_claim_of_the_engine_is_not_released(
    node_pair: Pair, valkey_server: EmbeddedServer
) -> None:
    first, second = keys(2)
    seat = EngineRank("claims-a-set", None, 1)
    with node_pair[0].client() as holder, node_pair[1].client(engine=seat) as other:
        assert holder.claim(second, lease_seconds=30.0).granted
        assert ask(other, [first]).state is ClaimOutcome.GRANTED
        other.encoding([first], lease_seconds=30.0)
        waits = ask(other, [first, second], wait_seconds=0.5)
        assert settled(waits, 2.0) is ClaimOutcome.HELD
        assert claim_in(valkey_server, first) != b"$-1"
        wait_until(lambda: b":encoding:" in claim_in(valkey_server, first), 2.0)


def test_an_encode_belongs_to_the_session_that_reported_it(
    node_pair: Pair, valkey_server: EmbeddedServer
) -> None:
    """An engine that attached again: the end of its last session is noticed only afterwards."""
    (name,) = keys(1)
    seat = EngineRank("attaches-again", None, 1)
    with node_pair[0].client(engine=seat) as buffer:
        with node_pair[0].client(engine=seat) as last:
            assert ask(last, [name]).state is ClaimOutcome.GRANTED
            buffer.encoding([name], lease_seconds=20.0)
            ask(buffer, keys(1))  # the node has received it
        wait_until(lambda: b":encoding:" in claim_in(valkey_server, name), 2.0)
        buffer.unclaim([name])


def test_an_encode_is_reported_for_the_session_that_continues_it(
    node_pair: Pair, valkey_server: EmbeddedServer
) -> None:
    (name,) = keys(1)
    seat = EngineRank("goes-on", None, 1)
    with node_pair[0].client(engine=seat) as buffer:
        with node_pair[0].client(engine=seat) as last:
            assert ask(last, [name]).state is ClaimOutcome.GRANTED
            last.encoding([name], lease_seconds=20.0)
            ask(last, keys(1))  # the node has received it
            assert buffer.claim(name, lease_seconds=20.0, state=ClaimState.INTENT).granted
        wait_until(lambda: b":encoding:" in claim_in(valkey_server, name), 2.0)
        buffer.unclaim([name])
