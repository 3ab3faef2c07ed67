"""The buffer's contract on tensors that lie in pools, between three processes on three hosts.

Over Gloo, on the CPU. `first` has everything; the others read it from there, over the lane unless
a test does otherwise.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count

import pytest

from device_ends import LARGE, DeviceEnd, facts, put, start_end, warm
from lookup_buffer.errors import CodecError, LookupTimeout, MissingTensor
from nodes import StartNode, at_rest, tensor_of, wait_until, with_store
from store import open_store

__all__ = ["start_end"]
DTYPES = ["bool", "bfloat16", "float8_e4m3fn", "complex32", "uint4", "float64"]


@pytest.fixture(scope="module")
def ends(module_nodes: StartNode) -> Iterator[list[DeviceEnd]]:
    three = [module_nodes() for _ in range(3)]
    with_store(*three)
    with ExitStack() as stack:
        made = [DeviceEnd(node, "device") for node in three]
        for end in made:
            stack.callback(end.end)
        for reader in made[1:]:
            warm(made[0], reader)
        yield made
        for end in made:
            at_rest(end.node)
            wait_until(partial(end.do, "lane.gauges().tickets == 0"), 5.0)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def came_by_lane(end: DeviceEnd, source: str) -> object:
    """What `source` reads, and that it came so."""
    before = end.counted("hits_lane")
    found = end.do(source)
    assert end.counted("hits_lane") == before + 1, end.node.stats()
    return found


def test_two_others_read_the_same_bytes(ends: list[DeviceEnd], key: str) -> None:
    put(ends[0], key, f"tensor_of('x', {LARGE})")
    expected = facts(tensor_of("x", LARGE))
    for end in ends[1:]:
        assert came_by_lane(end, f"read(TensorKey({key!r}))") == expected
        assert came_by_lane(end, f"read(TensorKey({key!r}))") == expected  # its own pool's now
    received = sum(end.counted("bytes_lane_gloo") for end in ends[1:])
    assert received == sum(end.counted("lane_received_gloo") for end in ends[1:]) * LARGE


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_bit_for_bit(ends: list[DeviceEnd], key: str, dtype: str) -> None:
    value = f"tensor_of({dtype!r}, {LARGE}).bitwise_and(1).view(torch.{dtype}).reshape(4, -1)"
    put(ends[0], key, value)
    expected = ends[0].do(f"facts({value})")
    assert came_by_lane(ends[1], f"read(TensorKey({key!r}))") == expected


@pytest.mark.parametrize(
    "value",
    [
        "tensor_of('t', 1 << 20).reshape(512, -1).t()",
        "tensor_of('s', 1 << 20)[::2]",
        "torch.tensor(2.5)",
        "torch.arange(3)",
    ],
    ids=["transposed", "strided", "0-d", "small"],
)
def test_odd_tensors(ends: list[DeviceEnd], key: str, value: str) -> None:
    put(ends[0], key, value)
    expected = ends[0].do(f"facts({value})")
    assert came_by_lane(ends[2], f"read(TensorKey({key!r}))") == expected


def test_none_and_the_empty_come_over_the_hosts(ends: list[DeviceEnd], key: str) -> None:
    ends[0].do(f"insert(TensorKey({key!r}), None)")
    ends[0].do(f"insert(TensorKey({key!r} + '-e'), torch.zeros(0, 3))")
    assert ends[1].do(f"read(TensorKey({key!r}), timeout=5.0)") is None
    assert ends[1].do(f"read(TensorKey({key!r} + '-e'), timeout=5.0)")[1] == (0, 3)


def test_an_item_that_is_stored_already_stays(ends: list[DeviceEnd], key: str) -> None:
    put(ends[0], key, f"tensor_of('first', {LARGE})")
    again = f"insert(TensorKey({key!r}), tensor_of('second', {LARGE})).name"
    assert ends[0].do(again) == "EXISTS"
    found = came_by_lane(ends[1], f"read(TensorKey({key!r}))")
    assert found == facts(tensor_of("first", LARGE))


def test_inserted_and_read_tensors_may_be_changed(ends: list[DeviceEnd], key: str) -> None:
    ends[0].do(f"globals().__setitem__('mine', tensor_of('m', {LARGE}))")
    put(ends[0], key, "mine")
    ends[0].do("mine.zero_()")
    expected = facts(tensor_of("m", LARGE))
    assert came_by_lane(ends[1], f"read(TensorKey({key!r}))") == expected
    ends[1].do(f"buffer.select(TensorKey({key!r})).zero_()")
    assert came_by_lane(ends[1], f"read(TensorKey({key!r}))") == expected


def test_select_into_a_tensor_of_the_caller(ends: list[DeviceEnd], key: str) -> None:
    put(ends[0], key, f"tensor_of('o', {LARGE})")
    into = f"read(TensorKey({key!r}), out=torch.empty({LARGE}, dtype=torch.uint8))"
    assert came_by_lane(ends[1], into) == facts(tensor_of("o", LARGE))
    with pytest.raises(CodecError):
        ends[1].do(f"read(TensorKey({key!r}), out=torch.empty(3))")


def test_an_absent_key_is_missing_at_once_or_at_the_timeout(
    ends: list[DeviceEnd], key: str
) -> None:
    with pytest.raises(MissingTensor):
        ends[1].do(f"read(TensorKey({key!r}))")
    with pytest.raises(LookupTimeout):
        ends[1].do(f"read(TensorKey({key!r}), timeout=0.2)")


def test_an_item_inserted_during_the_wait_is_read(ends: list[DeviceEnd], key: str) -> None:
    import threading

    found = []
    waiting = threading.Thread(
        target=lambda: found.append(ends[1].do(f"read(TensorKey({key!r}), timeout=20.0)"))
    )
    waiting.start()
    ends[0].do(f"insert(TensorKey({key!r}), tensor_of('late', {LARGE})).name")
    waiting.join(30.0)
    assert found == [facts(tensor_of("late", LARGE))]


def test_an_expired_item_is_removed_from_the_devices_too(ends: list[DeviceEnd], key: str) -> None:
    put(ends[0], key, f"tensor_of('ttl', {LARGE})", ttl_seconds=1.5)
    address = f"(buffer._namespace.fingerprint, {key!r})"
    came_by_lane(ends[1], f"read(TensorKey({key!r}))")

    def is_gone() -> bool:
        try:
            ends[1].do(f"read(TensorKey({key!r}))")
        except MissingTensor:
            return True
        return False

    wait_until(is_gone, 10.0)
    wait_until(lambda: ends[0].do(f"not lane.pool.has({address})"), 10.0)


def test_an_item_that_the_host_evicts_is_no_longer_offered(ends: list[DeviceEnd], key: str) -> None:
    put(ends[0], key, f"tensor_of('e', {LARGE})")
    fillers = count()  # of its size, or they might only push out each other; and not for the pool
    with open_store(ends[0].node.config.store_url, call_timeout_seconds=2.0) as store:

        def is_evicted() -> bool:
            name = f"{key}-{next(fillers)}"
            ends[0].do(f"buffer.host.insert(TensorKey({name!r}), tensor_of('f', {LARGE})).name")
            return all(record.key != key for record in store.scan())

        wait_until(is_evicted, 30.0)
    address = f"(buffer._namespace.fingerprint, {key!r})"
    wait_until(lambda: ends[0].do(f"not lane.pool.has({address})"), 10.0)
    with pytest.raises(MissingTensor):
        ends[1].do(f"read(TensorKey({key!r}))")


def test_an_item_that_the_pool_evicted_comes_over_the_hosts(
    ends: list[DeviceEnd], key: str
) -> None:
    put(ends[0], key, f"tensor_of('p', {LARGE})")
    # What was offered is known to the reader's node; the pool loses it behind everybody's back.
    ends[0].do(f"lane.pool.forget([(buffer._namespace.fingerprint, {key!r})])")
    before = ends[1].counted("lane_fallbacks_stale")
    assert ends[1].do(f"read(TensorKey({key!r}))") == facts(tensor_of("p", LARGE))
    assert ends[1].counted("lane_fallbacks_stale") == before + 1


def test_a_view_is_pinned_in_the_pool(ends: list[DeviceEnd], key: str) -> None:
    put(ends[0], key, f"tensor_of('v', {LARGE})")
    view = f"scope.enter_context(buffer.view(TensorKey({key!r})))"
    held = f"[(facts(there), lane.gauges().tickets) for there in [{view}]]"
    ends[1].do("globals().__setitem__('scope', __import__('contextlib').ExitStack())")
    assert ends[1].do(held) == [(facts(tensor_of("v", LARGE)), 1)]
    ends[1].do("scope.close()")
    wait_until(lambda: ends[1].do("lane.gauges().tickets") == 0, 5.0)
