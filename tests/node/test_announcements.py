"""Hand-offs from their insert until the store names their owner: one owner, found by all nodes."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import LookupBufferError, LookupTimeout, MissingTensor, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import InsertOutcome
from nodes import STORE_SECONDS, NodeProcess, StartNode, at_rest, handoff, wait_until
from servers import StartServer, frozen

DEAD_SECONDS = 7.0
"""Takers get the miss this long after their node was killed or stopped, on an idle machine: 6 s
until every node has detected the death, and a second for the replies."""
SLACK = 3.0
"""The factor for a machine that is not idle."""
SOON_SECONDS = 10.0
STORED, EXISTS = InsertOutcome.STORED, InsertOutcome.EXISTS


def holding(node: NodeProcess) -> bool:
    return node.stats()["handoff_bytes"] > 0


def nothing_held(*nodes: NodeProcess) -> None:
    for node in nodes:
        at_rest(node)
    wait_until(lambda: not any(map(holding, nodes)), SOON_SECONDS)


def outcome_of(taker: LookupBuffer, name: TensorKey, timeout: float) -> str:
    """What was taken, or why nothing was."""
    try:
        tensor = taker.drop_select(name, timeout=timeout)
    except LookupBufferError as error:
        return type(error).__name__
    assert tensor is not None
    return f"{int(tensor[0])}"


@pytest.mark.parametrize("nbytes", [9, 300_000], ids=["alike", "another shape"])
def test_an_insert_of_another_nodes_hand_off_is_refused(start_node: StartNode, nbytes: int) -> None:
    first, second, name = start_node(), start_node(), handoff()
    with first.client() as one, second.client() as other:
        assert one.insert(name, torch.full((9,), 1, dtype=torch.uint8)) is STORED
        assert other.insert(name, torch.full((nbytes,), 2, dtype=torch.uint8)) is EXISTS
        stats = second.stats()
        assert (stats["handoffs_elsewhere"], stats["inserts_exists"]) == (1, 1)
        assert f"dropped: {name.text}, generation" in second.log_text()
        nothing_held(second)
        assert outcome_of(other, name, SOON_SECONDS) == "1"
        assert outcome_of(other, name, 0.0) == "MissingTensor", "there was one, and it was taken"
        assert other.insert(name, torch.full((nbytes,), 3, dtype=torch.uint8)) is STORED
        assert one.insert(name, torch.full((9,), 4)) is EXISTS
        assert outcome_of(one, name, SOON_SECONDS) == "3"
        assert one.insert(name, torch.full((9,), 5), ttl_seconds=0.0) is STORED
    nothing_held(first, second)


def insert(
    together: threading.Barrier, buffer: LookupBuffer, value: int, name: TensorKey
) -> tuple[InsertOutcome, int]:
    together.wait()
    return buffer.insert(name, torch.full((9,), value)), value


def take(together: threading.Barrier, buffer: LookupBuffer, name: TensorKey) -> str:
    together.wait()
    return outcome_of(buffer, name, 0.3)


def test_of_two_concurrent_inserts_one_is_stored_and_one_taker_gets_it(
    start_node: StartNode,
) -> None:
    nodes = start_node(), start_node()
    names = [handoff() for _ in range(40)]
    with nodes[0].client() as one, nodes[1].client() as other, ThreadPoolExecutor(4) as pool:
        for name in names:
            together = threading.Barrier(4)
            inserts = [pool.submit(insert, together, *at, name) for at in ((one, 1), (other, 2))]
            takes = [pool.submit(take, together, buffer, name) for buffer in (one, other)]
            stored = [
                value for outcome, value in (i.result() for i in inserts) if outcome is STORED
            ]
            taken = [value for value in (t.result() for t in takes) if value.isdigit()]
            while len(taken) < len(stored):  # their time was up too early
                taken.append(outcome_of(one, name, SOON_SECONDS))
            # Two are stored where the first was taken before the second came.
            assert stored, "one always is"
            assert sorted(taken) == sorted(map(str, stored)), "what was stored is taken, once"
    nothing_held(*nodes)


def test_a_name_that_was_just_taken_can_be_inserted_again(start_node: StartNode) -> None:
    """Its owner records that at once, the store a little later."""
    first, second = start_node(), start_node()
    with first.client() as one, second.client() as other:
        for round_number in range(30):
            name = handoff()
            assert one.insert(name, torch.full((9,), 1)) is STORED
            assert one.drop_select(name) is not None
            assert other.insert(name, torch.full((9,), 2)) is STORED, round_number
            assert outcome_of(one, name, SOON_SECONDS) == "2"
    nothing_held(first, second)


def test_a_name_of_a_dead_owner_can_be_inserted_again(start_node: StartNode) -> None:
    first, second, name = start_node(), start_node(), handoff()
    with first.client() as one, second.client() as other:
        assert one.insert(name, torch.full((9,), 1)) is STORED
        first.kill()
        patient = DEAD_SECONDS * SLACK
        assert other.insert(name, torch.full((9,), 2), timeout=patient) is STORED
        assert outcome_of(other, name, SOON_SECONDS) == "2"
    nothing_held(second)


def test_an_owner_that_does_not_answer_is_waited_for_until_it_is_dead(
    start_node: StartNode,
) -> None:
    first, second, name = start_node(), start_node(), handoff()
    with first.client() as one, second.client() as other:
        assert one.insert(name, torch.full((9,), 1)) is STORED
        with first.frozen(), ThreadPoolExecutor(1) as pool:
            inserting = pool.submit(other.insert, name, torch.full((9,), 2), timeout=1.0)
            assert outcome_of(other, name, 0.3) == "LookupTimeout", "no taker gets it meanwhile"
            with pytest.raises(NodeUnavailable, match="does not answer"):
                inserting.result()
            nothing_held(second)
            assert other.insert(name, torch.full((9,), 2), timeout=DEAD_SECONDS * SLACK) is STORED
            assert outcome_of(other, name, SOON_SECONDS) == "2"
        nothing_held(second)


def test_of_two_equal_hand_offs_one_remains_when_the_store_is_back(
    start_node: StartNode, start_server: StartServer
) -> None:
    server = start_server()
    nodes = [start_node(store_url=server.url) for _ in range(2)]
    name = handoff()
    with nodes[0].client() as one, nodes[1].client() as other:
        wait_until(lambda: all(n.stats()["store_up"] for n in nodes), SOON_SECONDS)
        with frozen(server):
            wait_until(lambda: not any(n.stats()["store_up"] for n in nodes), SOON_SECONDS)
            started = time.monotonic()
            assert one.insert(name, torch.full((9,), 1)) is STORED
            assert other.insert(name, torch.full((9,), 2)) is STORED
            assert time.monotonic() - started < STORE_SECONDS, (
                "no wait for a store that is known to be down"
            )
        wait_until(lambda: sum(map(holding, nodes)) == 1, SOON_SECONDS)
        taken = Counter(outcome_of(buffer, name, 1.0) for buffer in (one, other))
        assert sum(n for value, n in taken.items() if value.isdigit()) == 1, taken
    nothing_held(*nodes)


def test_a_take_of_a_dead_owners_hand_off_returns_owner_dead(start_node: StartNode) -> None:
    """However soon after the insert its owner dies, a waiting taker gets a miss."""
    owner, node = start_node(), start_node()
    inserted: list[TensorKey] = []

    def produce() -> None:
        with owner.client() as producer:
            while True:
                name = handoff()
                try:
                    producer.insert(name, torch.ones(9))
                except LookupBufferError:
                    return
                inserted.append(name)

    producers = [threading.Thread(target=produce) for _ in range(3)]
    for producer in producers:
        producer.start()
    wait_until(lambda: len(inserted) > 100, SOON_SECONDS)
    owner.kill()
    killed = time.monotonic()
    for producer in producers:
        producer.join(SOON_SECONDS)
    with node.client() as taker:
        for name in inserted[-30:]:
            with pytest.raises(MissingTensor):
                taker.drop_select(name, timeout=60.0)
    assert time.monotonic() - killed < DEAD_SECONDS * SLACK
    nothing_held(node)


def test_a_hand_off_without_a_record_is_a_timeout_after_its_owners_death(
    start_node: StartNode, start_server: StartServer
) -> None:
    """Only the owner knows of an insert that was made while the store was away."""
    server = start_server()
    owner, node = (start_node(store_url=server.url) for _ in range(2))
    name = handoff()
    with owner.client() as producer, node.client() as taker:
        wait_until(lambda: owner.stats()["store_up"] == 1, SOON_SECONDS)
        with frozen(server):
            wait_until(lambda: owner.stats()["store_up"] == 0, SOON_SECONDS)
            assert producer.insert(name, torch.ones(9)) is STORED
            owner.kill()
        with pytest.raises(LookupTimeout):
            taker.drop_select(name, timeout=1.0)
    nothing_held(node)
