"""The places of a node for readers of others, and the order of its answers; plain and by TLS."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

import peer_servers
from lookup_buffer.errors import PipeError
from lookup_buffer.node import connection, handoffs, peers
from lookup_buffer.node.links import HANDOFFS, Credentials, dial
from lookup_buffer.protocol.messages import Take
from node_certificates import Files
from patience import scaled
from peer_servers import MIB, NAMESPACE, TOKEN, Bench, Test, answered

Runs = Callable[[Test], None]


@pytest.fixture(params=["tcp", "tls"])
def on_a_loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    tls = None
    if request.param == "tls":
        tls = Files(tmp_path_factory.mktemp("tls") / "files").tls("node-b")
    return partial(peer_servers.on_a_loop, credentials=Credentials(TOKEN, tls))


def test_small_and_large_items_come_in_the_order_of_the_request(
    on_a_loop: Runs,
) -> None:
    async def test(bench: Bench) -> None:
        sizes = {"small": 1000, "large": 9 * MIB, "medium": 200_000, "empty": 0}
        items = [[NAMESPACE, key, "boot", bench.insert(key, n)] for key, n in sizes.items()]
        absent = [NAMESPACE, "absent", "boot", 1]
        link = await bench.reader()
        for _ in range(3):
            *found, last = await answered(link, *items, absent)
            assert [header["payload"]["key"] for header in found] == list(sizes)
            assert last == {"status": "stale"}
        await bench.until(lambda: bench.pins() == 0)
        link.close()

    on_a_loop(test)


def test_requests_are_answered_in_order_while_more_come(
    on_a_loop: Runs,
) -> None:
    """The loop receives while a thread sends on the same connection."""

    async def test(bench: Bench) -> None:
        names = [f"k{number}" for number in range(8)]
        items = [[NAMESPACE, name, "boot", bench.insert(name, 3 * MIB)] for name in names]
        link = await bench.reader()

        def ask() -> list[str]:
            for item in items:
                link.send({"op": "get", "items": [item]}, timeout=5.0)
            keys = []
            for number, _ in enumerate(items):
                header, nbytes = link.recv_header(timeout=scaled(5.0))
                link.recv_into(memory := memoryview(bytearray(nbytes)), timeout=scaled(5.0))
                assert bytes(memory) == bytes([number]) * nbytes
                keys.append(header["payload"]["key"])
                if number < 4:
                    link.send({"op": "get", "items": [items[number]]}, timeout=5.0)
            return keys

        for number, name in enumerate(names):
            bench.fill(name, number)
        assert await asyncio.to_thread(ask) == names
        link.close()

    on_a_loop(test)


def test_small_parts_pin_no_more_than_whole_items(on_a_loop: Runs) -> None:
    async def test(bench: Bench) -> None:
        large = [NAMESPACE, "large", "boot", bench.insert("large", 20 * MIB)]
        others = [[NAMESPACE, f"k{n}", "boot", bench.insert(f"k{n}", 2 * MIB)] for n in range(16)]
        link = await bench.reader()
        items = [large, *([*other, 0, 1] for other in others)]
        await asyncio.to_thread(link.send, {"op": "get", "items": items}, timeout=5.0)
        await bench.until(lambda: bench.pins() > 0)
        await asyncio.sleep(0.1)
        assert bench.pins() == 1, "the reader does not read: the large one is being sent"
        headers = []
        for _ in items:
            header, nbytes = await asyncio.to_thread(link.recv_header, 5.0)
            assert bench.pins() <= 2, "of 2 MiB each"
            await asyncio.to_thread(link.recv_into, memoryview(bytearray(nbytes)), timeout=5.0)
            headers.append((header["payload"]["key"], nbytes))
        assert headers == [("large", 20 * MIB), *((f"k{n}", 1) for n in range(16))]
        link.close()

    on_a_loop(test)


def test_a_reader_that_leaves_or_does_not_read_leaves_no_pin(
    monkeypatch: pytest.MonkeyPatch, on_a_loop: Runs
) -> None:
    monkeypatch.setattr(peers, "PEER_PROGRESS_SECONDS", 0.2)

    async def test(bench: Bench) -> None:
        items = [[NAMESPACE, "k", "boot", bench.insert("k", 16 * MIB)]]
        for leaves in (True, False):
            link = await bench.reader()
            link.send({"op": "get", "items": items}, timeout=5.0)
            await bench.until(lambda: bench.pins() == 1)
            if leaves:
                link.abort()
            await bench.until(lambda: bench.pins() == 0)
            await bench.until(lambda: not bench.server._readers)
            link.abort()

    on_a_loop(test)


def test_readers_that_do_not_read_delay_no_other(
    monkeypatch: pytest.MonkeyPatch, on_a_loop: Runs
) -> None:
    async def test(bench: Bench) -> None:
        large = [NAMESPACE, "large", "boot", bench.insert("large", 16 * MIB)]
        slow = [await bench.reader() for _ in range(peers.LINKS_PER_CLIENT - 1)]
        for link in slow:
            link.send({"op": "get", "items": [large]}, timeout=5.0)
        await bench.until(lambda: bench.pins() == len(slow))
        small = [NAMESPACE, "small", "boot", bench.insert("small", MIB)]
        link = await bench.reader()
        began = time.monotonic()
        assert (await answered(link, small))[0]["status"] == "ok"
        assert time.monotonic() - began < scaled(1.0)
        for one in [link, *slow]:
            one.abort()
        await bench.until(lambda: bench.pins() == 0)

    on_a_loop(test)


def test_the_longest_idle_connection_gives_its_place(
    monkeypatch: pytest.MonkeyPatch, on_a_loop: Runs
) -> None:
    monkeypatch.setattr(peers, "LINKS_MIN", 4)
    monkeypatch.setattr(peers, "LINKS_PER_NODE", 0)

    async def test(bench: Bench) -> None:
        item = [NAMESPACE, "k", "boot", bench.insert("k", 16 * MIB)]
        links = [await bench.reader() for _ in range(4)]
        await bench.until(lambda: len(bench.server._readers) == 4)
        links[0].send({"op": "get", "items": [item]}, timeout=5.0)  # busy: it does not read
        await bench.until(lambda: bench.pins() == 1)
        await answered(links[1], [NAMESPACE, "absent", "boot", 1])
        links.append(await bench.reader())
        await bench.until(lambda: links[2].wait_readable(0.0))  # it has ended
        assert not links[1].wait_readable(0.0)
        assert not links[3].wait_readable(0.0)
        assert (await answered(links[4], [NAMESPACE, "absent", "boot", 1]))[0]["status"] == "stale"
        for link in links:
            link.abort()
        await bench.until(lambda: bench.pins() == 0)

    on_a_loop(test)


def test_a_connection_without_requests_is_closed(
    monkeypatch: pytest.MonkeyPatch, on_a_loop: Runs
) -> None:
    monkeypatch.setattr(peers, "PEER_IDLE_SECONDS", 0.1)

    async def test(bench: Bench) -> None:
        link = await bench.reader()
        await bench.until(lambda: bool(bench.server._readers))
        bench.server.tick()
        assert not link.wait_readable(0.0)
        await asyncio.sleep(0.15)
        bench.server.tick()
        await bench.until(lambda: link.wait_readable(0.0))
        link.abort()

    on_a_loop(test)


@pytest.mark.parametrize("ids", [[1, 1], [1, 2, 3]], ids=["one id for all", "too many"])
def test_a_node_queues_no_more_takers_than_a_bound(
    monkeypatch: pytest.MonkeyPatch, on_a_loop: Runs, ids: list[int]
) -> None:
    """Its connection ends, and with it those that are queued."""
    monkeypatch.setattr(handoffs, "TAKES_MAX", 2)

    async def test(bench: Bench) -> None:
        bench.askers.handoffs.hold_back((NAMESPACE, "k@r"))
        dialled = await dial(
            bench.loop, bench.location, bench.endpoint, HANDOFFS, bench.credentials
        )
        link = dialled.framed()
        for number in ids:
            await bench.until(lambda: len(bench.askers) == 1)
            link.send(Take(number, NAMESPACE, "k@r", 1000.0).to_wire(), timeout=5.0)
        await bench.until(lambda: len(bench.askers) == 0)
        assert not bench.askers.handoffs._queues
        link.abort()

    on_a_loop(test)


LONG = "k" * 4000


def test_what_all_connections_have_asked_for_is_bounded(
    monkeypatch: pytest.MonkeyPatch, on_a_loop: Runs
) -> None:
    """Each may have 2 MiB of names in this node's memory; of those that exceed it some end."""
    monkeypatch.setattr(connection, "PEERS_TOTAL_BYTES", 4 * MIB)
    monkeypatch.setattr(connection, "PENDING_OWN_BYTES", 16 << 10)
    small = [NAMESPACE, "absent", "boot", 1]

    async def test(bench: Bench) -> None:
        big = [NAMESPACE, "big", "boot", bench.insert("big", 20 * MIB)]
        links = [await bench.reader() for _ in range(8)]

        def ask() -> None:  # of which no answer is read
            for link in links:
                with suppress(PipeError):
                    link.send({"op": "get", "items": [big]}, timeout=5.0)
                    link.send(
                        {"op": "get", "items": [[NAMESPACE, LONG, "boot", 1]] * 250}, timeout=5.0
                    )

        try:
            await asyncio.to_thread(ask)
            await bench.until(lambda: len(bench.server._readers) <= 4)
            assert bench.counters.totals()["protocol_errors"] >= 4
            assert len(bench.server._readers) >= 2
            pending = bench.askers.pending
            assert pending._used <= 4 * MIB + 8 * (16 << 10)
            links.append(await bench.reader())
            one = await answered(links[-1], small)
            assert one == [{"status": "stale"}], "the control: a little is"
        finally:
            for link in links:
                link.close()
        await bench.until(lambda: not bench.server._readers)
        assert pending._used == 0
        assert not pending._held

    on_a_loop(test)


def test_takers_of_all_nodes_are_bounded(monkeypatch: pytest.MonkeyPatch, on_a_loop: Runs) -> None:
    """One connection after the other, each with fewer than TAKES_MAX."""
    monkeypatch.setattr(connection, "PEERS_TOTAL_BYTES", 64 * handoffs.TAKE_BYTES)
    monkeypatch.setattr(connection, "PENDING_OWN_BYTES", 4 * handoffs.TAKE_BYTES)

    async def test(bench: Bench) -> None:
        bench.askers.handoffs.hold_back((NAMESPACE, "k@r"))
        pending, links = bench.askers.pending, []

        async def take(count: int) -> None:
            dialled = await dial(
                bench.loop, bench.location, bench.endpoint, HANDOFFS, bench.credentials
            )
            links.append(link := dialled.framed())
            with suppress(PipeError):
                for number in range(count):
                    link.send(Take(number, NAMESPACE, "k@r", 1000.0).to_wire(), timeout=5.0)

        await take(24)
        await bench.until(lambda: pending._used >= 24 * handoffs.TAKE_BYTES)
        await take(24)
        await bench.until(lambda: bench.counters.totals().get("protocol_errors", 0) == 1)
        await take(3)
        await bench.until(lambda: pending._used >= 27 * handoffs.TAKE_BYTES)
        assert len(bench.askers) == 2
        for link in links:
            link.abort()
        await bench.until(lambda: pending._used == 0)
        assert not bench.askers.handoffs._queues

    on_a_loop(test)
