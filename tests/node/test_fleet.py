"""A fleet: four processes on two nodes insert and select at once; all is exact, nothing is left."""

import random

import torch

from lookup_buffer.key import TensorKey
from nodes import MIB, ClientProcess, NodeProcess, StartNode, at_rest, wait_until

TENSORS = 1000
PROCESSES = 4
KEYS = TENSORS // PROCESSES
READS = (2, 0, 3, 1)
"""Whose tensors each process selects: two read their own node's, two the other's."""

WORKER = """
import random
mine, others = receive()
wrong = []
where = random.Random(repr(mine))
seen = 0
for (name, nbytes), (other, other_nbytes) in zip(mine, others):
    tensor = tensor_of(name, nbytes)
    buffer.insert(TensorKey(name), tensor if nbytes % 7 else tensor.view(1, -1))
    out = torch.empty(other_nbytes, dtype=torch.uint8) if where.random() < 0.5 else None
    if out is not None and other_nbytes % 7 == 0:
        out = out.view(1, -1)
    found = buffer.select(TensorKey(other), timeout=60.0, out=out)
    seen += 1
    if not torch.equal(found.flatten(), tensor_of(other, other_nbytes)):
        wrong.append(other)
send((seen, wrong))
receive()
buffer.close()
"""


def size_of(dice: random.Random) -> int:
    """From nothing to 2 MB; as many small ones as large ones."""
    return dice.choice(
        (0, dice.randrange(1, 1000), dice.randrange(60_000), dice.randrange(2 * MIB))
    )


def hits_of(node: NodeProcess) -> int:
    stats = node.stats()
    return stats["hits_local"] + stats["hits_remote"]


def test_a_thousand_inserts_and_selects_from_four_processes_on_two_nodes(
    start_node: StartNode,
) -> None:
    nodes = [start_node(capacity_bytes=512 * MIB) for _ in range(2)]
    files = [node.open_files() for node in nodes]
    dice = random.Random(7)
    plans = [
        [(f"p{process}-{number}-{dice.random()}", size_of(dice)) for number in range(KEYS)]
        for process in range(PROCESSES)
    ]
    total_bytes = sum(nbytes for plan in plans for _, nbytes in plan)
    clients = [ClientProcess(nodes[number % 2].config, WORKER) for number in range(PROCESSES)]
    try:
        for number, client in enumerate(clients):
            client.send((plans[number], plans[READS[number]]))
        answers = [client.receive(60.0) for client in clients]
        assert answers == [(KEYS, [])] * PROCESSES
        for client in clients:
            client.send("end")
        assert [client.wait() for client in clients] == [0] * PROCESSES
    finally:
        for client in clients:
            client.__exit__()
    wait_until(
        lambda: sum(map(hits_of, nodes)) >= TENSORS, 5.0
    )  # the last are reported at the close
    stats = [node.stats() for node in nodes]
    assert sum(one["inserts_stored"] for one in stats) == TENSORS
    assert sum(one["bytes_inserted"] for one in stats) == total_bytes
    assert all(one.get("protocol_errors", 0) == 0 for one in stats)
    assert sum(one.get("bytes_fetched", 0) for one in stats) > 0
    for node, before in zip(nodes, files, strict=True):
        # Links between the two nodes are kept for the next transfer: four a direction.
        at_rest(node, open_files=before + 8)
        stats_after = node.stats()
        held = stats_after["bytes_inserted"] + stats_after["bytes_fetched"]
        padding = 64 * stats_after["items"]
        assert held <= stats_after["used_bytes"] <= held + padding
        assert stats_after.get("evicted", 0) == 0


def test_a_small_arena_under_pressure_from_both_sides(start_node: StartNode) -> None:
    """Ten times what the arenas hold goes through: evicted, fetched again, never wrong."""
    source = """
import random
from lookup_buffer.errors import BufferFull, MissingTensor
dice, wrong, done = random.Random(receive()), [], 0
while done < 150:
    name = f"pressure-{dice.randrange(60)}"
    nbytes = 100_000 + 7_000 * int(name.split("-")[1])
    try:
        found = buffer.select(TensorKey(name))
        if not torch.equal(found, tensor_of(name, nbytes)):
            wrong.append(name)
    except MissingTensor:
        try:
            buffer.insert(TensorKey(name), tensor_of(name, nbytes))
        except BufferFull:
            continue
    except BufferFull:
        continue
    done += 1
send(wrong)
receive()
"""
    nodes = [start_node(capacity_bytes=4 * MIB) for _ in range(2)]
    clients = [ClientProcess(nodes[number % 2].config, source) for number in range(PROCESSES)]
    try:
        for number, client in enumerate(clients):
            client.send(number)
        assert [client.receive(60.0) for client in clients] == [[]] * PROCESSES
        assert sum(node.stats()["evicted"] for node in nodes) > 20
        assert sum(node.stats().get("bytes_fetched", 0) for node in nodes) > 0
    finally:
        for client in clients:
            client.__exit__()
    for node in nodes:
        at_rest(node)
        with node.client() as client_after:
            client_after.insert(TensorKey("last"), torch.ones(MIB // 4))
            assert client_after.select(TensorKey("last")) is not None
