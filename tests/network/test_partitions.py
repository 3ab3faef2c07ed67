"""Nodes between which nothing passes, while each still reaches the store: no one is dead."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lookup_buffer import LookupBuffer, LookupTimeout, TensorKey
from lookup_buffer.errors import LookupBufferError
from network import MakeNetwork, Network, equal
from nodes import MIB, STORE_CONNECTIONS, NodeProcess, key, wait_until
from patience import scaled

HEALED_SECONDS = 2.0
PARTITION_SECONDS = 8.0
"""Longer than any pause or time-out between two nodes, and than a node may be silent."""

pytestmark = pytest.mark.part(name="network")


def timed(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_a_peer_that_cannot_be_reached_delays_no_other(make_network: MakeNetwork) -> None:
    network = make_network("a", "b", "c")
    a, b, c = (network.node(name) for name in "abc")
    with a.client() as here, b.client() as reader, c.client() as lost:
        healthy = network.put(here, 40, MIB)
        unreachable = network.put(lost, 16, MIB)
        network.wait_for(reader, [one for one, _ in healthy + unreachable])
        usual = [timed(lambda: reader.select(one)) for one, _ in healthy[:20]]  # noqa: B023
        with network.cut("b", "c"), ThreadPoolExecutor(len(unreachable)) as pool:

            def ask(one: TensorKey) -> None:
                with b.client() as client, pytest.raises(LookupTimeout):
                    client.select(one, timeout=PARTITION_SECONDS)

            asking = [pool.submit(ask, one) for one, _ in unreachable]
            time.sleep(0.3)
            took = [timed(lambda: reader.select(one)) for one, _ in healthy[20:]]  # noqa: B023
            for asked in asking:
                asked.result(scaled(3 * PARTITION_SECONDS))
        print(f"{statistics.median(usual):.4f} s, meanwhile {statistics.median(took):.4f} s")
        assert max(took) < scaled(1.0)


def test_a_select_that_waits_gets_it_after_the_partition(make_network: MakeNetwork) -> None:
    network = make_network("a", "b")
    a, b = network.node("a"), network.node("b")
    with a.client() as here, b.client() as there, ThreadPoolExecutor(1) as pool:
        ((one, tensor),) = network.put(here, 1, MIB)
        network.wait_for(there, [one])
        with network.cut("a", "b"):
            asking = pool.submit(there.select, one, timeout=30.0)
            wait_until(
                lambda: there.stats().get("fetches_failed_peer_failed", 0), 10.0, "it has failed"
            )
            assert not asking.done()
        healed = time.monotonic()
        assert equal(asking.result(scaled(30.0)), tensor)
        print(f"{time.monotonic() - healed:.2f} s")
        assert time.monotonic() - healed < scaled(2 * HEALED_SECONDS)


def test_hand_offs_after_a_partition(make_network: MakeNetwork) -> None:
    network = make_network("a", "b")
    a, b = network.node("a"), network.node("b")
    with a.client() as producer, b.client() as taker:
        hand_off(producer, taker, timeout=5.0)
        with network.cut("a", "b"):
            until = time.monotonic() + PARTITION_SECONDS
            reasons = set()
            while time.monotonic() < until:
                with pytest.raises(LookupBufferError) as failed:
                    hand_off(producer, taker, timeout=1.0)
                reasons.add(str(failed.value).rpartition("(")[2].rstrip(")"))
            assert reasons <= {"peer_failed"}, reasons
        healed = time.monotonic()
        hand_off(producer, taker, timeout=scaled(10.0))
        print(f"{time.monotonic() - healed:.2f} s")
        assert time.monotonic() - healed < scaled(HEALED_SECONDS)


def hand_off(producer: LookupBuffer, taker: LookupBuffer, *, timeout: float) -> None:
    one = TensorKey(key().mm_hash, "request")
    tensor = torch.ones(MIB, dtype=torch.uint8)
    producer.insert(one, tensor)
    assert equal(taker.drop_select(one, timeout=timeout), tensor)


SOON_IDLE = """
from lookup_buffer.node import links, transfer
links.THREADS_IDLE_SECONDS = transfer.LINK_IDLE_SECONDS = 2.0
"""


def test_faults_leave_nothing_behind(make_network: MakeNetwork) -> None:
    network = make_network("a", "b")
    a, b = network.node("a"), network.node("b", prelude=SOON_IDLE)
    with a.client() as here, b.client() as there:
        for _ in range(3):
            read_one(network, here, there)
        threads, files = used(b)
        before = threads, files + STORE_CONNECTIONS
        for fault in ("drop", "reject", "reset") * 3:
            network.set_both("a", "b", loss=2)
            items = network.put(here, 4, MIB)
            with ThreadPoolExecutor(4) as pool:
                reading = [pool.submit(try_to_read, there, one) for one, _ in items]
                network.kill("a", "b", fault)
                with network.cut("a", "b"):
                    time.sleep(0.3)
                for one in reading:
                    one.result(scaled(30.0))
        network.reset()
        wait_until(lambda: read_one(network, here, there), 10.0, "it works again")
        wait_until(
            lambda: all(now <= then for now, then in zip(used(b), before, strict=True)),
            20.0,
            f"as many threads and files as before, {before}",
        )


def used(node: NodeProcess) -> tuple[int, int]:
    """Its threads and its open files."""
    process = Path(f"/proc/{node.pid}")
    return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))


def try_to_read(client: LookupBuffer, one: TensorKey) -> None:
    with suppress(LookupBufferError):
        client.select(one, timeout=5.0)


def read_one(network: Network, here: LookupBuffer, there: LookupBuffer) -> bool:
    ((one, tensor),) = network.put(here, 1, MIB)
    network.wait_for(there, [one])
    return equal(there.select(one, timeout=10.0), tensor)


def test_a_node_that_listens_on_all_addresses(make_network: MakeNetwork) -> None:
    network = make_network("a", "b")
    address = network.hosts["a"].address
    a = network.node("a", listen="tcp://[::]:17000", advertise=f"tcp://{address}:17000")
    b = network.node("b")
    with a.client() as here, b.client() as there:
        assert read_one(network, here, there)
