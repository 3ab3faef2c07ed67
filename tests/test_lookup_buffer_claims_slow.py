"""Claims and a store that answers, but later than a claim waits for it."""

import pytest

from claiming import ask, claim_in, keys
from lookup_buffer.claimed import ClaimSetState
from lookup_buffer.client import EngineSeat
from nodes import NodeProcess, StartNode, wait_until
from servers import frozen
from store import EmbeddedServer

STORE_SECONDS = 5.0
"""How long the node waits for its store: longer than it lets a client wait for a claim."""


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    node = start_node(store_timeout_seconds=STORE_SECONDS)
    wait_until(lambda: node.stats()["store_up"], 15.0)
    return node


def test_what_was_given_back_before_the_store_granted_it_is_not_held(
    node: NodeProcess, valkey_server: EmbeddedServer
) -> None:
    """Else the engine would wait for an encode of its own that never comes."""
    (name,) = keys(1)
    with node.client(engine=EngineSeat("gives-back", None, 1)) as buffer:
        ask(buffer, keys(1))  # the node is connected
        with frozen(valkey_server):
            buffer.encoding([name], lease_seconds=60.0)
            # Behind that: answered when the encode was granted unasked.
            assert ask(buffer, keys(1)).state is ClaimSetState.GRANTED
            buffer.unclaim([name])
            assert ask(buffer, keys(1)).state is ClaimSetState.GRANTED
        wait_until(lambda: claim_in(valkey_server, name) == b"$-1", 5.0)
        assert ask(buffer, [name]).state is ClaimSetState.GRANTED
