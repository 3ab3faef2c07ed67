"""Transfers between hosts on slow, lossy and cut networks."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lookup_buffer import LookupTimeout, TensorKey
from lookup_buffer.node.holders import LINKS_MAX
from lookup_buffer.times import PEER_PROGRESS_SECONDS
from network import MakeNetwork, equal
from nodes import MIB, key, wait_until
from patience import scaled

pytestmark = pytest.mark.part(name="network")


@pytest.mark.parametrize(
    ("mebibytes", "way"),
    [
        pytest.param(24, {"rate": 20, "delay": 5}, id="slow"),
        pytest.param(8, {"loss": 1, "delay": 20}, id="lossy"),
    ],
)
def test_a_bad_network_delays_and_fails_nothing(
    make_network: MakeNetwork, mebibytes: int, way: dict[str, float]
) -> None:
    network = make_network("a", "b")
    a, b = network.node("a"), network.node("b")
    with a.client() as here, b.client() as there:
        ((one, tensor),) = network.put(here, 1, mebibytes * MIB)
        network.wait_for(there, [one])
        network.set_both("a", "b", **way)
        started = time.monotonic()
        assert equal(there.select(one, timeout=60.0), tensor)
        print(f"{time.monotonic() - started:.2f} s")


def test_a_hand_off_over_a_slow_network_takes_longer_than_its_lease(
    make_network: MakeNetwork,
) -> None:
    network = make_network("a", "b")
    a, b = network.node("a", handoff_lease_seconds=2.0), network.node("b")
    with a.client() as producer, b.client() as taker:
        one, tensor = TensorKey(key().mm_hash, "request"), torch.ones(16 * MIB, dtype=torch.uint8)
        network.set_both("a", "b", rate=20, delay=5)
        producer.insert(one, tensor)
        started = time.monotonic()
        assert equal(taker.drop_select(one, timeout=30.0), tensor)
        print(f"{time.monotonic() - started:.2f} s")
        assert not any(producer.has_caches([one]))


def test_many_tensors_over_a_long_way_share_few_connections(make_network: MakeNetwork) -> None:
    network = make_network("a", "b")
    a, b = network.node("a"), network.node("b")
    with a.client() as here, b.client() as there:
        items = network.put(here, 300, MIB // 16)
        keys = [one for one, _ in items]
        network.wait_for(there, keys)
        network.set_both("a", "b", delay=100)
        started = time.monotonic()
        found = there.select_many(keys, timeout=30.0)
        print(f"{time.monotonic() - started:.2f} s")
        assert all(
            isinstance(one, torch.Tensor) and torch.equal(one, tensor)
            for one, (_, tensor) in zip(found, items, strict=True)
        )
        assert 0 < network.kill("a", "b", "drop") <= LINKS_MAX


def test_a_large_tensor_over_a_long_way_comes_on_several_connections(
    make_network: MakeNetwork,
) -> None:
    network = make_network("a", "b")
    a, b = network.node("a"), network.node("b")
    with a.client() as here, b.client() as there:
        ((first, _), (large, tensor)) = [
            *network.put(here, 1, 1000),
            *network.put(here, 1, 24 * MIB),
        ]
        network.wait_for(there, [first, large])
        network.set_both("a", "b", delay=10)
        assert there.select(first, timeout=10.0) is not None, "so it is known how far the holder is"
        assert equal(there.select(large, timeout=30.0), tensor)
        assert 1 < network.kill("a", "b", "drop") < LINKS_MAX


def test_a_rate_that_falls_fails_nothing(make_network: MakeNetwork) -> None:
    """The holder's send buffer has grown by then, and takes nothing more for over 5 s."""
    network = make_network("a", "b")
    a, b = network.node("a"), network.node("b")
    with a.client() as here, b.client() as there:
        ((one, tensor),) = network.put(here, 1, 48 * MIB)
        network.wait_for(there, [one])
        network.set_both("a", "b", delay=40, rate=400)
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(there.select, one, timeout=60.0)
            network.wait_for_bytes("a", "b", 24 * MIB, 30.0)
            network.set("a", "b", rate=1.5, queue=1000)
            time.sleep(2 * PEER_PROGRESS_SECONDS)
            assert not begun.done()
            network.set("a", "b", rate=0)
            assert equal(begun.result(scaled(60.0)), tensor)
        assert not there.stats().get("fetches_failed_peer_failed", 0)


def test_a_hand_off_does_not_wait_for_slow_tensors(make_network: MakeNetwork) -> None:
    network = make_network("a", "b")
    a, b = (network.node(name, capacity_bytes=256 * MIB) for name in "ab")
    with a.client() as here, b.client() as there, ThreadPoolExecutor(1) as pool:
        items = network.put(here, 4 * LINKS_MAX, 4 * MIB)
        keys = [one for one, _ in items]
        network.wait_for(there, keys)
        network.set("a", "b", rate=40)
        reading = pool.submit(there.select_many, keys, timeout=60.0)
        before = network.sent_bytes("a", "b")
        network.wait_for_bytes("a", "b", MIB, 10.0)
        one, tensor = TensorKey(key().mm_hash, "request"), torch.ones(1000)
        here.insert(one, tensor)
        assert equal(there.drop_select(one, timeout=20.0), tensor)
        assert network.sent_bytes("a", "b") - before < 4 * MIB * len(items) // 2
        assert not reading.done()
        network.set("a", "b", rate=0)
        found = reading.result(scaled(60.0))
        assert all(isinstance(tensor, torch.Tensor) for tensor in found)


def test_a_reader_waits_for_its_turn_no_longer_than_its_time(make_network: MakeNetwork) -> None:
    network = make_network("a", "b")
    a, b = (network.node(name, capacity_bytes=256 * MIB) for name in "ab")
    with a.client() as here, b.client() as there, ThreadPoolExecutor(1) as pool:
        items = network.put(here, LINKS_MAX + 1, 8 * MIB)
        *keys, last = [one for one, _ in items]
        network.wait_for(there, [*keys, last])
        network.set("a", "b", rate=10)
        reading = pool.submit(there.select_many, keys, timeout=60.0)
        network.wait_for_bytes("a", "b", MIB, 10.0)
        with pytest.raises(LookupTimeout, match="busy"):
            there.select(last, timeout=1.0)
        assert not reading.done()
        network.set("a", "b", rate=0)
        assert all(isinstance(tensor, torch.Tensor) for tensor in reading.result(scaled(60.0)))
        assert equal(there.select(last, timeout=10.0), items[-1][1])


def test_another_holder_delivers_what_a_cut_interrupted(make_network: MakeNetwork) -> None:
    network = make_network("a", "b", "c")
    a, b, c = network.node("a"), network.node("b"), network.node("c")
    with a.client() as at_a, b.client() as at_b, c.client() as at_c:
        ((one, tensor),) = network.put(at_a, 1, 16 * MIB)
        network.wait_for(at_b, [one])
        assert equal(at_b.select(one, timeout=10.0), tensor)
        wait_until(lambda: at_b.stats()["unpublished"] == 0, 5.0)
        network.set_both("a", "c", rate=80)
        network.set_both("b", "c", rate=80)
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(at_c.select, one, timeout=30.0)
            wait_until(
                lambda: max(network.sent_bytes(x, "c") for x in "ab") > 2 * MIB, 10.0, "it begins"
            )
            source = max("ab", key=lambda x: network.sent_bytes(x, "c"))
            network.set_both("a", "c", rate=0)
            network.set_both("b", "c", rate=0)
            with network.cut(source, "c"):
                started = time.monotonic()
                assert equal(begun.result(scaled(30.0)), tensor)
                print(f"{time.monotonic() - started:.2f} s")


def test_of_two_holders_the_faster_one_is_asked(make_network: MakeNetwork) -> None:
    network = make_network("a", "b", "c")
    a, b, c = network.node("a"), network.node("b"), network.node("c")
    with a.client() as at_a, b.client() as at_b, c.client() as at_c:
        items = network.put(at_a, 24, MIB)
        keys = [one for one, _ in items]
        network.wait_for(at_b, keys)
        assert all(
            isinstance(found, torch.Tensor) for found in at_b.select_many(keys, timeout=10.0)
        )
        wait_until(lambda: at_b.stats()["unpublished"] == 0, 5.0)
        network.wait_for(at_c, keys)
        network.set_both("a", "c", rate=40)
        before = network.sent_bytes("a", "c")
        for one, tensor in items:
            assert equal(at_c.select(one, timeout=10.0), tensor)
        slow = network.sent_bytes("a", "c") - before
        assert MIB <= slow < 6 * MIB, "of 24, the first ones by chance"


@pytest.mark.parametrize("how", ["drop", "reject", "reset"])
def test_a_kept_connection_that_died(make_network: MakeNetwork, how: str) -> None:
    network = make_network("a", "b")
    a, b = network.node("a"), network.node("b")
    with a.client() as here, b.client() as there:
        items = network.put(here, 2, MIB)
        network.wait_for(there, [one for one, _ in items])
        (first, tensor), (second, other) = items
        assert equal(there.select(first, timeout=10.0), tensor)
        assert network.kill("a", "b", how) > 0
        started = time.monotonic()
        assert equal(there.select(second, timeout=10.0), other)
        print(f"{time.monotonic() - started:.2f} s")
