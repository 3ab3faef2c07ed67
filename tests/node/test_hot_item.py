"""One item that many want at once: none is refused, and who has it serves it too."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from lookup_buffer.key import TensorKey
from nodes import MIB, ClientProcess, NodeProcess, StartNode, key, tensor_of, wait_until
from store import BlockingStore, Record, open_store

NBYTES = 256 << 10
PROCESSES = 16
CONNECTIONS = 32
"""Of each process."""
READS = 2
"""Of each connection."""
READERS = 6

READER = """
import asyncio, hashlib
from lookup_buffer.access import user_token
from lookup_buffer.node.links import TENSORS, Credentials, dial
from store import Location

node, boot, generation, endpoint, namespace, key, connections, reads = receive()
location = Location(node, boot, generation, 0)

def read(link):
    found = []
    for _ in range(reads):
        link.send({"op": "get", "items": [[namespace, key, boot, generation]]}, timeout=30.0)
        header, nbytes = link.recv_header(timeout=30.0)
        memory = bytearray(nbytes)
        link.recv_into(memoryview(memory), timeout=30.0)
        found.append(header["status"] + " " + hashlib.sha256(memory).hexdigest())
    return found

async def run():
    loop = asyncio.get_running_loop()
    links = []
    for _ in range(connections):
        credentials = Credentials(user_token())
        links.append((await dial(loop, location, endpoint, TENSORS, credentials)).framed())
    send("connected")
    await asyncio.to_thread(receive)
    answers = await asyncio.gather(*(asyncio.to_thread(read, link) for link in links))
    for link in links:
        link.close()
    return answers

send([answer for answers in asyncio.run(run()) for answer in answers])
receive()
buffer.close()
"""


def _records(store: BlockingStore, name: TensorKey) -> list[Record]:
    return [record for record in store.scan() if record.key == name.text]


def test_five_hundred_connections_of_sixteen_processes_read_one_item(
    start_node: StartNode,
) -> None:
    holder, elsewhere = start_node(), start_node()
    name, tensor = key(), tensor_of("hot", NBYTES)
    with holder.client() as client, open_store(holder.config.store_url or "") as store:
        client.insert(name, tensor)
        wait_until(lambda: _records(store, name), 5.0, "it is published")
        (record,) = _records(store, name)
        (location,) = record.locations
        endpoint = store.node_infos([holder.node_id])[holder.node_id].endpoint
    asked = (location.node, location.boot, location.generation, endpoint)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(ClientProcess(elsewhere.config, READER)) for _ in range(PROCESSES)
        ]
        for reader in readers:
            reader.send((*asked, record.namespace, record.key, CONNECTIONS, READS))
        assert [reader.receive(60.0) for reader in readers] == ["connected"] * PROCESSES
        for reader in readers:
            reader.send("all are connected")
        answers = {answer for reader in readers for answer in reader.receive(60.0)}
        for reader in readers:
            reader.send("end")
            assert reader.wait() == 0
    assert len(answers) == 1
    assert answers.pop().startswith("ok ")
    stats = holder.stats()
    assert stats["bytes_served"] >= PROCESSES * CONNECTIONS * READS * NBYTES
    wait_until(lambda: holder.stats()["pins"] == 0, 5.0)


def test_who_has_it_serves_it(start_node: StartNode) -> None:
    holder, last, *readers = (start_node() for _ in range(2 + READERS))
    name, tensor = key(), tensor_of("hot", 8 * MIB)
    with holder.client() as client:
        client.insert(name, tensor)

    def read(node: NodeProcess) -> bool:
        with node.client() as client:
            found = client.select(name, timeout=20.0)
            return found is not None and torch.equal(found, tensor)

    with ThreadPoolExecutor(READERS) as threads:
        assert all(threads.map(read, readers))
    holder.kill()
    assert read(last)
    assert sum(reader.stats().get("bytes_served", 0) for reader in readers) >= 8 * MIB
