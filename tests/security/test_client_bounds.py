"""Another process of the node's user at its socket: what of others it can end, and how much a node
keeps or does for it."""

import os
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lookup_buffer.client.buffer import EngineRank
from lookup_buffer.errors import BufferFull
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.node.arena import PINS_MAX
from lookup_buffer.node.connection import WAITS_MAX
from lookup_buffer.node.devices import OFFERS_MAX
from lookup_buffer.node.held_claims import CLAIMS_MAX
from lookup_buffer.node.insert import PART_BYTES
from lookup_buffer.node.items import pin_size
from lookup_buffer.node.reachability import REACHING_MAX
from lookup_buffer.node.shares import size_of
from lookup_buffer.protocol import messages
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Request
from lookup_buffer.shm.memory import Staging
from lookup_buffer.times import PEER_CONNECT_SECONDS
from nodes import (
    MIB,
    NodeProcess,
    StartNode,
    at_rest,
    handoff,
    key,
    tensor_of,
    wait_until,
    with_store,
)
from patience import scaled
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


# -- what one client makes a node hold


class Attack:
    """One client, whose replies a thread reads."""

    def __init__(self, node: NodeProcess, client: Raw) -> None:
        self.node, self.client = node, client
        self.replies: list[dict[str, Any]] = []
        self.before = resident_bytes(node)
        self._reading = threading.Thread(target=self._read)
        client.socket.settimeout(scaled(10.0))

    def send(self, requests: Iterable[Request]) -> None:
        self.client.socket.sendall(b"".join(encode_frame(each.to_wire()) for each in requests))

    def answered(self) -> None:
        """All that was sent before is handled."""
        number = 1 << 40
        self.send([messages.Stats(number)])
        wait_until(lambda: any(each.get("id") == number for each in self.replies), 10.0)

    def grown_bytes(self) -> int:
        return resident_bytes(self.node) - self.before

    def refused(self) -> int:
        return sum(each.get("error") == "BufferFull" for each in self.replies)

    def outcomes(self, outcome: str) -> int:
        return sum(each.get("outcome") == outcome for each in self.replies)

    def entries(self) -> list[dict[str, Any]]:
        return [entry for each in self.replies for _, entry in each.get("entries", ())]

    def _read(self) -> None:
        decoder = FrameDecoder()
        with suppress(OSError):
            while data := self.client.socket.recv(1 << 18):
                self.replies += [header for header, _ in decoder.feed(data)]

    def __enter__(self) -> "Attack":
        self._reading.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.send([messages.Goodbye(1)])  # else its pins stay as long as this process
        self._reading.join()


@pytest.fixture(scope="module")
def node(module_nodes: StartNode) -> NodeProcess:
    """It handles a request as a whole before the next one, so that `Attack.answered` is right."""
    prelude = "from lookup_buffer.node import insert\ninsert.STEP_SECONDS = 60.0"
    node = module_nodes(capacity_bytes=16 * MIB, prelude=prelude)
    with_store(node)
    return node


@pytest.fixture
def attack(node: NodeProcess) -> Iterator[Attack]:
    """On a node that serves others meanwhile, and afterwards has nothing of it."""
    with raw(node) as client, Attack(node, client) as attack:
        yield attack
        stats(node)
    at_rest(node)


def stats(node: NodeProcess) -> dict[str, int]:
    """What another client is told, however long it takes."""
    with raw(node) as client:
        client.socket.settimeout(scaled(10.0))
        told: dict[str, int] = client.ask(messages.Stats(1))["stats"]
        client.send(messages.Goodbye(2))
    return told


def resident_bytes(node: NodeProcess) -> int:
    return int(Path(f"/proc/{node.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_requests_that_wait(attack: Attack) -> None:
    bound = WAITS_MAX // 2
    attack.send(messages.Select(n, NAMESPACE, f"absent-{n}", 86_400.0) for n in range(bound + 1000))
    attack.answered()
    assert attack.refused() == 1000
    assert attack.grown_bytes() < 24_000 * bound


@pytest.mark.parametrize("claims", [False, True])
def test_keys_of_a_prefetch_count_as_often_as_they_are_named(attack: Attack, claims: bool) -> None:
    """One key, again and again: 1,800 such requests made a node grow by 2.7 GiB, and to answer 480
    of them held its loop for seconds."""
    held, most = key(), 100
    with attack.node.client() as holder:
        assert holder.claim(held, lease_seconds=600.0).granted
        attack.send(
            messages.Prefetch(n, NAMESPACE, [held.text] * 4096, 1000 + n if claims else 0, 600.0)
            for n in range(1, most + 1)
        )
        attack.answered()
        is_over = {"outcome": "refused"} if claims else {"event": "settled"}
        over = {each["id"] for each in attack.replies if is_over.items() <= each.items()}
        assert most - 40 < len(over) < most, "the others wait"
        attack.send(messages.EndPrefetch(n, n, list(range(4096))) for n in range(1, most + 1))
        attack.send(messages.Unclaim(n, NAMESPACE, [], 1000 + n) for n in range(1, most + 1))
        attack.answered()


def test_requests_that_wait_for_many_keys_each(attack: Attack) -> None:
    """Their keys are kept as long: 64 sets of 256 KiB, by a thousand sessions."""
    held = key().text
    keys = [held, *(f"{held}-{n:032}" for n in range(4000))]
    with attack.node.client() as holder:
        assert holder.claim(TensorKey(held), lease_seconds=600.0).granted
        attack.send(messages.ClaimAll(n, NAMESPACE, keys, 86_400.0) for n in range(64))
        attack.answered()
        outcomes = [each["outcome"] for each in attack.replies if "event" in each]
        assert 10 < outcomes.count("refused") < 54
        attack.send([messages.Unclaim(100, NAMESPACE, [], n) for n in range(64)])
        attack.send([messages.Prefetch(101, NAMESPACE, keys, 0, 86_400.0)])
        attack.answered()
        assert not attack.entries(), "the control: it may wait again"


def test_handoffs_without_room(attack: Attack) -> None:
    """An insert of each waits on every connection."""
    header = TensorHeader("uint8", (MIB,), MIB).to_fields()

    def insert(count: int) -> messages.Insert:
        keys = [handoff().text for _ in range(count)]
        return messages.Insert(7, NAMESPACE, keys, [header] * count, [0] * count, 5.0, 86_400.0)

    with raw(attack.node, session=False) as other:
        other.ask(messages.Join(2, attack.client.session))
        staging = Staging(MIB)
        staging.view[:] = bytes(MIB)
        socket.send_fds(
            attack.client.socket, [encode_frame(messages.Stage(3).to_wire())], [staging.fd]
        )
        attack.answered()
        other.ask(messages.Stage(3), [staging.fd])
        attack.send([insert(4096)])
        attack.answered()
        assert other.ask(insert(1))["results"][0]["error"] == "BufferFull"
        staging.close()


def test_inserts_of_which_one_part_waits(start_node: StartNode) -> None:
    """Each keeps its other parts, which have their results, until its answer."""
    node, staging = start_node(capacity_bytes=4 * MIB), Staging(MIB)
    staging.view[:] = bytes(MIB)
    large = TensorHeader("uint8", (MIB,), MIB).to_fields()
    others = [f"other-{n}" for n in range(4000)]
    nothing = [TensorHeader.of_none().to_fields()] * len(others)

    def insert(keys: list[str], seconds: float) -> messages.Insert:
        keys = [handoff().text, *keys]
        headers = [large, *nothing[: len(keys) - 1]]
        return messages.Insert(2, NAMESPACE, keys, headers, [0] * len(keys), 600.0, seconds)

    with closing(staging), raw(node) as main, ExitStack() as stack:
        main.ask(messages.Stage(1), [staging.fd])
        for _ in range(2):
            main.ask(insert([], 0.0))
        bound = WAITS_MAX // 2 // size_of(others, PART_BYTES)
        clients = []
        for _ in range(bound + 4):  # one by one: a connection has 5 s to join
            client = stack.enter_context(raw(node, session=False))
            clients.append(client)
            client.socket.settimeout(scaled(10.0))
            client.ask(messages.Join(1, main.session))
            client.ask(messages.Stage(1), [staging.fd])
            client.socket.sendall(encode_frame(insert(others, 86_400.0).to_wire()))
        sockets = [client.socket for client in clients]
        wait_until(lambda: len(select.select(sockets, [], [], 0.0)[0]) >= 4, 10.0)
        assert len(select.select(sockets, [], [], 0.0)[0]) <= 5
        for client in clients:
            client.socket.close()
        wait_until(lambda: "hand-offs" in main.ask(insert([], 0.01))["results"][0]["message"], 5.0)


def test_others_are_served_between_the_parts_of_one_request(start_node: StartNode) -> None:
    node = start_node(
        capacity_bytes=16 * MIB,
        prelude="from lookup_buffer.node import turns\nturns.TURN_SECONDS = 1e-9\n"
        "from lookup_buffer.node import insert\ninsert.STEP_SECONDS = 0.0",
    )
    keys = [f"k{n}" for n in range(4000)]
    nothing = [TensorHeader.of_none().to_fields()] * len(keys)
    request = messages.Insert(1, NAMESPACE, keys, nothing, [0] * len(keys), None, 0.0)
    seen = [0]
    with raw(node) as client, raw(node) as other:
        client.socket.settimeout(scaled(10.0))
        client.socket.sendall(encode_frame(request.to_wire()))
        until = time.monotonic() + scaled(10.0)
        while seen[-1] < len(keys) and time.monotonic() < until:
            seen.append(other.ask(messages.Stats(2))["stats"]["items"])
    assert seen[-1] == len(keys)
    assert set(seen) - {0, len(keys)}, "it was all done in one turn of the loop"


def test_others_are_served_between_the_requests_that_many_have_sent(start_node: StartNode) -> None:
    """All of them wait when the node looks: it does not handle first what was sent first."""
    prelude = "from lookup_buffer.node import turns\nturns.TURN_SECONDS = 1e-9"
    node = start_node(capacity_bytes=16 * MIB, prelude=prelude)
    nothing = [TensorHeader.of_none().to_fields()]
    with ExitStack() as stack, raw(node) as other:
        clients = [stack.enter_context(raw(node)) for _ in range(20)]
        with node.frozen():
            for client in clients:
                inserts = [
                    messages.Insert(2, NAMESPACE, [key().text], nothing, [0], None, 0.0)
                    for _ in range(100)
                ]
                client.socket.sendall(b"".join(encode_frame(each.to_wire()) for each in inserts))
            other.send(messages.Stats(3))
        ((answer, _),) = FrameDecoder().feed(other.socket.recv(1 << 16))
        assert answer["stats"]["items"] <= 2 * len(clients)
        wait_until(lambda: stats(node)["items"] == 100 * len(clients), 10.0)


def test_items_without_bytes(start_node: StartNode) -> None:
    """What the node notes of each exceeds its unit of the arena 80 times."""
    bound, long = 4 * MIB, "x" * 3900
    node = start_node(
        capacity_bytes=16 * MIB,
        prelude=f"from lookup_buffer.node import arena\narena.ENTRIES_BYTES_MIN = {bound}",
    )
    with raw(node) as client:
        client.socket.settimeout(scaled(10.0))

        def insert(keys: list[str], wait_seconds: float = 0.0) -> list[dict[str, Any]]:
            nothing = [TensorHeader.of_none().to_fields()] * len(keys)
            offsets = [0] * len(keys)
            request = messages.Insert(1, NAMESPACE, keys, nothing, offsets, None, wait_seconds)
            results: list[dict[str, Any]] = client.ask(request)["results"]
            return results

        def items() -> int:
            count: int = client.ask(messages.Stats(2))["stats"]["items"]
            return count

        for n in range(0, 2000, 20):
            results = insert([f"{long}-{each}" for each in range(n, n + 20)])
            assert all(each.get("outcome") == "stored" for each in results)
        assert 500 < items() < bound // len(long)
        handoffs = [insert([handoff(long).text])[0] for _ in range(500)]
        stored = [each.get("outcome") for each in handoffs].count("stored")
        assert 250 < stored < bound // 2 // len(long)
        assert handoffs[-1]["error"] == "BufferFull"
        assert insert(["more"])[0]["outcome"] == "stored", "the control: shared ones have the rest"


def test_descriptions_of_namespaces(attack: Attack) -> None:
    """Each was kept for the node's life."""
    parts = {"part": "x" * 8000}
    attack.send(messages.Describe(n, f"{n:064x}", parts) for n in range(6000))
    attack.send(messages.Describe(n, f"{n:064x}", {"p": "x" * 900_000}) for n in range(50))
    attack.answered()
    assert attack.grown_bytes() < 24 * MIB


def test_nodes_to_be_dialled(start_node: StartNode) -> None:
    there, here = start_node(), start_node()
    reach = messages.Reach(1, here.node_id, there.node_id)
    with raw(here) as client:
        wait_until(lambda: client.ask(reach)["outcome"] == "yes", 10.0)
    before, asked = stats(here)["open_files"], 500
    with there.frozen(), raw(here) as client, Attack(here, client) as attack:
        began = time.monotonic()
        attack.send(messages.Reach(n, here.node_id, there.node_id) for n in range(asked))
        attack.answered()
        times = 1 + (time.monotonic() - began) / PEER_CONNECT_SECONDS  # each frees its place
        assert stats(here)["open_files"] <= before + 2 * REACHING_MAX
        wait_until(lambda: attack.outcomes("busy") >= asked - REACHING_MAX * times, 10.0)
        assert attack.outcomes("busy") <= asked - REACHING_MAX


def test_pins(attack: Attack) -> None:
    """Each handle of a key has one of its own, also in one request."""
    name = key()
    with attack.node.client() as client:
        client.insert(name, tensor_of("x", 1000))
    bound = PINS_MAX // 2
    for n in range(bound // 4096 + 2):
        attack.send([messages.Prefetch(n, NAMESPACE, [name.text] * 4096, 0, 0.0)])
    attack.answered()
    assert stats(attack.node)["pins"] == bound
    with attack.node.client() as client, client.view(name):
        assert stats(attack.node)["pins"] == bound + 1, "the control: others may"


def test_pins_for_many_ranks(node: NodeProcess) -> None:
    """Each has a set of those that have not reported."""
    name, ranks = key(), 4096
    with node.client() as client:
        client.insert(name, tensor_of("x", 1000))
    with node.client(engine=EngineRank("many", 0, ranks)) as engine, ExitStack() as views:
        bound = PINS_MAX // 2 // pin_size(range(ranks))
        for _ in range(bound + 1):  # the last one begins within half of them
            views.enter_context(engine.view(name))
        with pytest.raises(BufferFull, match="pins"), engine.view(name):
            pass
    at_rest(node)


def test_claims(attack: Attack) -> None:
    bound = CLAIMS_MAX // 2
    for n in range(0, bound + 2000, 1000):
        keys = [f"claimed-{each}" for each in range(n, n + 1000)]
        attack.send([messages.Encoding(n, NAMESPACE, keys, 86_400.0)])
    wait_until(lambda: stats(attack.node)["claims"] >= bound, 10.0)
    attack.send([messages.Claim(1, NAMESPACE, "one-more", 60.0, "encoding", 0.0)])
    wait_until(attack.refused, 10.0)
    assert stats(attack.node)["claims"] == bound
    with attack.node.client() as client:
        assert client.claim(key(), lease_seconds=60.0).granted, "the control: others may"


def test_releases_of_what_it_does_not_have(attack: Attack) -> None:
    """Each key was a command to Redis, and garbage until the next full collection."""
    before = stats(attack.node)["claims"]
    for n in range(8):
        keys = [f"{n}-{each:04}".ljust(250, "x") for each in range(4000)]
        attack.send([messages.Unclaim(n, NAMESPACE, keys, 0)])
    attack.answered()
    assert attack.grown_bytes() < 40 * MIB
    assert stats(attack.node)["claims"] == before


def test_offers_of_a_device(attack: Attack) -> None:
    count, width = OFFERS_MAX, 4000
    pool = messages.OpenPool(1, "gloo", "0" * 8, 4321, "f" * 12, MIB, receives=True, offers=True)
    attack.send([pool])
    for start in range(0, count, 1024):
        numbers = range(start, start + 1024)
        attack.send(messages.Prepare(n, NAMESPACE, f"{n}".zfill(width), 1 + n) for n in numbers)
    attack.answered()
    assert attack.grown_bytes() < 1.4 * OFFERS_MAX // 2 * width


def test_replies_that_nobody_reads(start_node: StartNode) -> None:
    total_bytes = MIB
    node = start_node(
        prelude="from lookup_buffer.node import connection\n"
        f"connection.PENDING_TOTAL_BYTES = {total_bytes}"
    )
    with ExitStack() as stack:
        name = key()
        with node.client() as other:
            other.insert(name, tensor_of("x", 1000))
        clients = [stack.enter_context(raw(node)) for _ in range(8)]
        for number, client in enumerate(clients, 1):
            # Answered by about 0.9 MiB, of which its socket takes 0.2.
            client.send(messages.Prefetch(1, NAMESPACE, [name.text] * 4096, 0, 0.0))
            wait_until(lambda pins=4096 * number: stats(node)["pins"] == pins, 5.0)  # type: ignore[misc]
        has_ended = [client.ended(0.1) for client in clients]
        assert 0 < has_ended.count(False) * 350_000 <= total_bytes


def test_requests_that_are_half_sent(start_node: StartNode) -> None:
    total_bytes, sent_bytes = MIB, MIB // 2
    node = start_node(
        prelude="from lookup_buffer.node import connection\n"
        f"connection.PENDING_TOTAL_BYTES = {total_bytes}"
    )

    def request(keys: int) -> bytes:
        asked = messages.Prefetch(2, NAMESPACE, ["x" * 4000] * keys, 0, 0.0)
        return encode_frame(asked.to_wire())

    with raw(node) as main:
        with ExitStack() as stack:
            clients = [stack.enter_context(raw(node, session=False)) for _ in range(12)]
            for client in clients:
                client.socket.settimeout(scaled(10.0))
                client.ask(messages.Join(1, main.session))
                with suppress(ConnectionError):
                    client.socket.sendall(request(200)[:sent_bytes])
            sockets = [client.socket for client in clients]
            most = total_bytes // sent_bytes
            wait_until(lambda: len(select.select(sockets, [], [], 0.0)[0]) >= 12 - most, 10.0)
            assert len(select.select(sockets, [], [], 0.0)[0]) < 12
        main.socket.sendall(request(100))
        assert main.socket.recv(65536), "the control: there is room again"


def test_sessions_that_end_without_goodbye(start_node: StartNode) -> None:
    """Their pins stay while their process lives, each with a descriptor of the node."""
    node = start_node(prelude="from lookup_buffer.node import server\nserver.CONNECTIONS_MAX = 12")
    name = key()
    with node.client() as client:
        client.insert(name, tensor_of("x", 1000))
    with raw(node) as first:
        before = first.ask(messages.Stats(1))["stats"]["open_files"]
        with suppress(ConnectionError, AssertionError):
            for _ in range(30):
                with raw(node) as client:
                    own_ticket(client, name.text)
        after = first.ask(messages.Stats(2))["stats"]
        assert after["pins"] <= 12
        assert after["open_files"] < before + 24
