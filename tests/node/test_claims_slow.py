"""Claims on a store that answers later than a claim waits for it."""

from contextlib import closing

import pytest

from claiming import WAIT_SECONDS, ask, claim_in, keys
from lookup_buffer.client.buffer import EngineRank
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.node.claims import TOGETHER_MAX
from lookup_buffer.protocol.messages import ClaimOutcome
from nodes import NodeProcess, StartNode, wait_until
from proxies import Relay
from servers import StartServer, frozen
from store import EmbeddedServer

STORE_SECONDS = 5.0
"""How long the node waits for its store: longer than it lets a client wait for a claim."""


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    node = start_node(store_timeout_seconds=STORE_SECONDS)
    wait_until(lambda: node.stats()["store_up"], 15.0)
    return node


def test_a_claim_released_before_its_grant_is_not_held(
    node: NodeProcess, valkey_server: EmbeddedServer
) -> None:
    """Else the engine would wait for an encode of itself that never starts."""
    (name,) = keys(1)
    with node.client(engine=EngineRank("gives-back", None, 1)) as buffer:
        ask(buffer, keys(1))  # the node is connected
        with frozen(valkey_server):
            buffer.encoding([name], lease_seconds=60.0)
            # Behind that: answered when the encode was granted unasked.
            assert ask(buffer, keys(1)).state is ClaimOutcome.GRANTED
            buffer.unclaim([name])
            assert ask(buffer, keys(1)).state is ClaimOutcome.GRANTED
        wait_until(lambda: claim_in(valkey_server, name) == b"$-1", 5.0)
        assert ask(buffer, [name]).state is ClaimOutcome.GRANTED


def test_a_prefetch_does_not_wait_for_the_claims_of_many_keys(
    start_server: StartServer, start_node: StartNode
) -> None:
    """Not all claims are sent at once; the items to fetch are located meanwhile."""
    names = keys(20 * TOGETHER_MAX)
    with closing(Relay()) as relay:
        relay.connect_to(str(start_server().directory / "server.sock"))
        url = f"redis://127.0.0.1:{relay.port}"
        node = start_node(store_url=url, store_timeout_seconds=STORE_SECONDS)
        wait_until(lambda: node.stats()["store_up"], 15.0)
        with node.client() as buffer:
            ask(buffer, keys(1))  # the node is connected, the script known
            relay.delay(0.1)
            handles, claims = buffer.prefetch_and_claim(names, wait_seconds=WAIT_SECONDS)
            wait_until(lambda: all(h.state is PrefetchState.MISSING for h in handles), 2.5)
            assert claims.state is ClaimOutcome.PENDING
            relay.delay(0.0)
