"""Another process of the node's user at its socket: what of others it can end, and how much a node
keeps or does for it."""

import torch

from lookup_buffer.client.buffer import EngineRank
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol import messages
from nodes import MIB, StartNode, key, tensor_of, wait_until
from raw_clients import Raw, raw

NAMESPACE = Namespace.named("tests").fingerprint
ITEM_BYTES = 2 * MIB


# -- what others hold


def own_ticket(client: Raw, name: str) -> int:
    answer = client.ask(messages.Select(5, NAMESPACE, name, 0.0))
    assert answer["state"] == "resident"
    ticket: int = answer["ticket"]
    return ticket


def near(ticket: int) -> list[int]:
    """As many as one request may have."""
    return list(range(max(0, ticket - 2000), ticket + 2000))


def test_nobody_ends_a_pin_that_he_was_not_told_of(start_node: StartNode) -> None:
    """A worker would copy the bytes of another item: its order names only where they lie."""
    node = start_node(capacity_bytes=16 * MIB)
    shared, evil = key("shared"), tensor_of("evil", ITEM_BYTES)
    with (
        node.client(engine=EngineRank("engine", None, 1)) as scheduler,
        node.client(engine=EngineRank("engine", 0, 1)) as worker,
        raw(node) as attacker,
        node.client() as other,
    ):
        scheduler.insert(shared, tensor_of("true", ITEM_BYTES))
        before = own_ticket(attacker, shared.text)
        (handle,) = scheduler.prefetch([shared], timeout=5.0)
        after = own_ticket(attacker, shared.text)
        attacker.send(messages.Release(6, [before, after]))
        assert handle.order is not None
        for tickets in (near(before), near(after), near(2000)):
            attacker.send(messages.Done(7, tickets, 0))
        attacker.send(messages.Release(8, [handle.order.ticket]))
        assert attacker.ask(messages.Stats(9))["stats"]["pins"] == 1
        for number in range(12):
            other.insert(key(f"evil{number}"), evil)
        found = worker.load(handle.order)
        assert found is not None
        assert torch.equal(found, tensor_of("true", ITEM_BYTES))
        worker.done([handle.order])
        wait_until(lambda: node.stats()["pins"] == 0, 5.0, "the control: who was told of it may")
