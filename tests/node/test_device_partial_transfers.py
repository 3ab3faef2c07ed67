"""A process that is killed or stopped when some of a payload has come, and the rest has not.

The reader's process stops or kills it when its own memory changes; afterwards the rest of that
memory must be untouched. Over Gloo, between processes on different hosts.
"""

import os
import signal
import time
from itertools import count

import pytest

from device_ends import DeviceEnd, StartEnd, facts, put, start_end, warm
from nodes import MIB, StartNode, at_rest, start_node, tensor_of, wait_until
from patience import scaled

__all__ = ["start_end", "start_node"]
NBYTES = 48 * MIB
BOUND_SECONDS = scaled(10 * (1.0 + NBYTES / 100e6))
"""Several times the deadline of the lane, and the way over the hosts behind it."""
TRIES = 20
"""Of the signal that has to come while bytes do."""
_numbers = count()


def some(first: DeviceEnd) -> tuple[str, object]:
    """A key that the first one has just offered, and what has to be read under it."""
    key = f"some-{next(_numbers)}"
    put(first, key, f"tensor_of({key!r}, {NBYTES})")
    return f"read(TensorKey({key!r}))", facts(tensor_of(key, NBYTES))


@pytest.fixture
def pair(start_node: StartNode, start_end: StartEnd) -> tuple[DeviceEnd, DeviceEnd]:
    nodes = [start_node(capacity_bytes=256 * MIB) for _ in range(2)]
    first = start_end(nodes[0], receives=False)
    second = start_end(nodes[1], device="watched")
    warm(first, second)
    return first, second


def reads_all_the_same(second: DeviceEnd, read: str, expected: object) -> bool:
    """In the same call, in time, by another way; and nothing of what had come is kept. False where
    a busy machine sent the signal after the last byte, or gave up before the first: then nothing
    was seen.

    The node answers at its own deadline; the lane gives the transfer up later, at its own."""
    before = second.do("lane.gauges().used_bytes"), second.counted("lane_received_gloo")
    started = time.monotonic()
    assert second.do(read) == expected
    assert time.monotonic() - started < BOUND_SECONDS
    came = second.do("place.came_bytes()")
    if came in (0, NBYTES):
        return False
    assert second.counted("lane_received_gloo") == before[1]
    failed = second.counted("lane_fallbacks_timeout") + second.counted("lane_fallbacks_peer_failed")
    assert failed >= 1, second.node.stats()
    # Less than before where an earlier item has ended meanwhile.
    wait_until(lambda: second.do("lane.gauges().used_bytes") <= before[0], BOUND_SECONDS)
    at_rest(second.node)
    return True


def test_a_sender_killed_during_a_payload(
    pair: tuple[DeviceEnd, DeviceEnd], start_end: StartEnd
) -> None:
    first, second = pair
    for _ in range(TRIES):
        read, expected = some(first)
        second.do(f"place.strike({first.pid}, {int(signal.SIGKILL)})")
        in_the_middle = reads_all_the_same(second, read, expected)
        first.kill()  # it is dead already
        wait_until(lambda: second.do("lane.pairs()") == 0, 20.0)
        first = start_end(first.node)
        warm(first, second)
        if in_the_middle:
            return
    pytest.fail("no fault fell into the middle of a payload")


def test_a_sender_stopped_during_a_payload(pair: tuple[DeviceEnd, DeviceEnd]) -> None:
    first, second = pair
    struck = 0
    for _ in range(TRIES):
        read, expected = some(first)
        second.do(f"place.strike({first.pid}, {int(signal.SIGSTOP)})")
        try:
            in_the_middle = reads_all_the_same(second, read, expected)
            if in_the_middle:
                wait_until(
                    lambda: second.do("not lane.pairs() and 'lb-pipe-abort' not in threads()"),
                    BOUND_SECONDS,
                )
        finally:
            os.kill(first.pid, signal.SIGCONT)
        warm(first, second)  # meanwhile the rest of the bytes would come
        if in_the_middle:
            assert second.do("place.came_bytes()") < NBYTES, "it was not given up"
            struck += 1
        if struck == 2:
            return
    pytest.fail("fewer than two faults fell into the middle of a payload")


def test_a_reader_killed_during_a_payload(
    pair: tuple[DeviceEnd, DeviceEnd], start_end: StartEnd
) -> None:
    first, second = pair
    third = start_end()
    warm(first, third)
    before = first.do("(threads(), files())")
    for _ in range(TRIES):
        read, _ = some(first)
        second.do(f"place.strike({second.pid}, {int(signal.SIGKILL)})")
        second.begin(read)
        wait_until(second.has_sent, 20.0)
        try:
            second.receive()
        except EOFError:
            break
        second.kill()  # it had all of it before
        second = start_end(second.node)
        warm(first, second)
    else:
        pytest.fail("no fault fell into the middle of a payload")
    second.kill()
    at_rest(second.node, seconds=20.0)
    wait_until(lambda: first.do("lane.gauges().pinned_bytes") == 0, 20.0)
    again, expected = some(first)
    assert third.do(again) == expected
    warm(first, third)

    def has_let_go() -> bool:
        threads, files = first.do("(threads(), files())")
        return len(threads) < len(before[0]) and files < before[1]

    wait_until(has_let_go, 20.0, f"{before}")
