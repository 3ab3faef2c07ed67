"""A fault of a lane costs no tensor and no process: the bytes come over the hosts.

Between processes on different hosts, over Gloo. A stand-in reports that a device has no memory or
has failed; all other faults are real.
"""

import re
import time
from itertools import count

import pytest

from device_ends import LARGE, DeviceEnd, StartEnd, facts, put, start_end, warm
from lookup_buffer.errors import MissingTensor
from nodes import MIB, StartNode, at_rest, start_node, tensor_of, wait_until, with_store
from patience import scaled
from store import open_store

__all__ = ["start_end", "start_node"]
HUGE = 24 * MIB
LANE_SECONDS = 1.0 + HUGE / 100e6
"""The deadline of a lane for so much."""
_numbers = count()


def some(first: DeviceEnd, nbytes: int = LARGE) -> tuple[str, object]:
    """A key that the first one has just offered, and what has to be read under it."""
    key = f"some-{next(_numbers)}"
    put(first, key, f"tensor_of({key!r}, {nbytes})")
    return f"read(TensorKey({key!r}))", facts(tensor_of(key, nbytes))


def fallbacks(end: DeviceEnd) -> dict[str, int]:
    named = end.node.stats().items()
    prefix = "lane_fallbacks_"
    return {name.removeprefix(prefix): n for name, n in named if name.startswith(prefix)}


@pytest.fixture
def pair(start_end: StartEnd) -> tuple[DeviceEnd, DeviceEnd]:
    first, second = start_end(), start_end()
    warm(first, second)
    return first, second


def test_a_peer_that_is_stopped_in_the_middle_costs_one_deadline(
    pair: tuple[DeviceEnd, DeviceEnd],
) -> None:
    first, second = pair
    for wait_seconds in (0.0, 0.005, 0.02):
        read, expected = some(first, HUGE)
        second.begin(read)
        time.sleep(wait_seconds)  # before its question, behind it, or in the middle of the bytes
        with first.stopped():
            started = time.monotonic()
            assert second.receive() == expected
            assert time.monotonic() - started < scaled(LANE_SECONDS)
        warm(first, second)
    assert {"timeout", "peer_failed"} & fallbacks(second).keys()
    at_rest(second.node)
    wait_until(lambda: second.do("lane.gauges().tickets") == 0, 5.0)  # by an event of its node


def test_a_process_killed_during_a_transfer_ends_no_other(
    pair: tuple[DeviceEnd, DeviceEnd], start_end: StartEnd
) -> None:
    first, second = pair
    (read, expected), (again, also), (third, rest) = some(first, HUGE), some(first), some(first)
    second.begin(read)
    time.sleep(0.01)
    first.kill()
    assert second.receive() == expected
    assert second.do(again) == also
    assert second.do(third) == rest
    with open_store(first.node.config.store_url, call_timeout_seconds=2.0) as store:
        # Of other files there may be records of nodes that were killed.
        ours = set(re.findall(r"some-\d+", read + again + third))
        assert len(ours) == 3

        def listed() -> list[str]:
            return [one.key for one in store.scan() if one.devices and one.key in ours]

        wait_until(lambda: not listed(), 10.0)
    wait_until(lambda: second.do("lane.pairs()") == 0, 20.0)
    other = start_end(first.node)  # another process of that host is another pool
    warm(other, second)


def test_a_reader_that_is_stopped_holds_up_no_other(start_end: StartEnd) -> None:
    first, second, third = (start_end() for _ in range(3))
    for reader in (second, third):
        warm(first, reader)
    read, expected = some(first, HUGE)
    second.begin(read)
    with second.stopped():
        for _ in range(2):
            other, also = some(first)
            assert third.do(other) == also
        assert third.counted("hits_lane") >= 3
    assert second.receive() == expected


def test_a_pool_of_another_version_gets_no_request(start_end: StartEnd) -> None:
    first, second = start_end(version="of torch 1.13.0"), start_end()
    for _ in range(3):
        read, expected = some(first)
        assert second.do(read) == expected
    assert fallbacks(second) == {"version": 3}
    assert second.do("lane.pairs()") == first.do("lane.pairs()") == 0
    assert len([line for line in second.do("logged") if "was not used" in line]) == 1


@pytest.mark.parametrize(
    "options",
    [{"host": "127.0.0.2"}, {"token": "that of another fleet"}],  # its node's address is 127.0.0.1
    ids=["no listener", "another token"],
)
def test_an_unreachable_pool_is_not_tried_again_for_a_while(
    start_end: StartEnd, options: dict[str, str]
) -> None:
    first, second = start_end(**options, receives=False), start_end()

    def is_left_alone() -> bool:
        read, expected = some(first)
        assert second.do(read) == expected
        return "abandoned" in fallbacks(second)

    def lines() -> int:
        return len([line for line in second.do("logged") if "(abandoned;" in line])

    wait_until(is_left_alone, 30.0)
    assert second.do("lane.pairs()") == 0
    wait_until(lines, 5.0, "the process logs what its node has counted")
    assert lines() == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "full"}, "device"),
        ({"device": "lost"}, "device"),
    ],
    ids=["no memory", "gone"],
)
def test_a_device_without_free_memory(
    start_end: StartEnd, options: dict[str, object], reason: str
) -> None:
    first, second = start_end(), start_end(**options)

    def is_tried() -> bool:
        read, expected = some(first)
        assert second.do(read) == expected
        return reason in fallbacks(second)

    wait_until(is_tried, 30.0)
    for _ in range(2):
        read, expected = some(first)
        assert second.do(read) == expected
    assert second.counted("lane_received_gloo") == 0
    assert len([line for line in second.do("logged") if f"({reason};" in line]) == 1
    assert second.do("lane.gauges().used_bytes") == 0


def test_a_pool_full_of_pinned_items(start_end: StartEnd) -> None:
    first, second = start_end(), start_end(pool_bytes=LARGE + MIB)
    warm(first, second)
    (held, _), (read, expected) = some(first), some(first)
    second.do(f"globals().update(held={held.replace('read', 'buffer.view')})")
    second.do("held.__enter__() is None")
    assert second.do("lane.gauges().pinned_bytes") == LARGE
    assert second.do(read) == expected
    assert fallbacks(second)["no_room"] == 1
    assert len([line for line in second.do("logged") if "(no_room;" in line]) == 1
    second.do("held.__exit__(None, None, None)")


def test_a_device_that_fails_while_others_read_from_it(start_end: StartEnd) -> None:
    first, second = start_end(device="dying"), start_end()
    warm(first, second)
    first.do("setattr(place, 'is_gone', True)")

    def is_tried() -> bool:
        read, expected = some(first)
        assert second.do(read) == expected
        return fallbacks(second).get("peer_failed", 0) >= 2

    wait_until(is_tried, 30.0)
    (line,) = first.do("logged")
    assert "lane was closed" in line
    assert "device-side assert" in line
    assert first.do("lane.gauges().pinned_bytes") == 0


def test_device_locations_end_with_their_node_and_return_after_its_restart(
    pair: tuple[DeviceEnd, DeviceEnd],
) -> None:
    first, second = pair
    read, _ = some(first)
    first.node.kill()

    def is_missing() -> bool:
        try:
            second.do(read)
        except MissingTensor:
            return True
        return False

    wait_until(is_missing, 15.0)
    first.node.start()
    with_store(first.node)
    wait_until(lambda: first.do("buffer.host.attached"), 15.0)
    warm(first, second)
    key = read.removeprefix("read(TensorKey('").removesuffix("'))")
    put(first, key, f"tensor_of({key!r}, {LARGE})")  # what the pool had is offered once more


def test_a_load_order_of_an_earlier_node_is_not_used_with_the_next_one(
    pair: tuple[DeviceEnd, DeviceEnd],
) -> None:
    first, second = pair
    second.do("globals().__setitem__('orders', [])")
    expected = []

    def is_promised() -> bool:
        read, bytes_of = some(first)
        key = read.removeprefix("read(").removesuffix(")")
        second.do(f"orders.append(buffer.host.prefetch([{key}], timeout=20.0)[0].order)")
        if second.do("orders[-1].lane"):
            expected.append(bytes_of)
        else:
            second.do("orders.pop()")
        return len(expected) % 3 == 0 and bool(expected)

    wait_until(is_promised, 20.0)
    second.node.kill()
    second.node.start()
    with_store(second.node)
    wait_until(lambda: second.do("buffer.host.attached"), 15.0)
    wait_until(lambda: is_promised() and len(expected) == 6, 20.0)
    assert second.do("[facts(buffer.host.load(order)) for order in orders]") == expected


def test_joins_and_leaves_leak_nothing(start_end: StartEnd, start_node: StartNode) -> None:
    first, host = start_end(), start_node()
    with_store(host)
    other = start_end(host)
    warm(first, other)
    other.do("lane.close()")
    wait_until(lambda: first.do("lane.pairs()") == 0, 20.0)
    for end in (first, other):  # a separate thread destroys a communicator
        wait_until(lambda end=end: "lb-pipe-abort" not in end.do("threads()"), 20.0)  # type: ignore[misc]
    before = first.do("(threads(), files())"), other.do("(threads(), files())")
    for _ in range(4):
        other.do("join()")
        warm(first, other)
        other.do("leave()")
        wait_until(lambda: first.do("lane.pairs()") == 0, 20.0)

    def is_as_before() -> bool:
        now = first.do("(threads(), files())"), other.do("(threads(), files())")
        return all(
            seen[0] == was[0] and seen[1] <= was[1] + 1
            for seen, was in zip(now, before, strict=True)
        )

    wait_until(is_as_before, 20.0, f"{before}")
