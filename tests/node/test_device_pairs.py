"""Pairs that exist before a read needs them: made when a pool is seen, ended when it is gone.

Between processes with different nodes; and for one end alone, with a stand-in for its node.
"""

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from device_ends import LARGE, POOL_BYTES, DeviceEnd, StartEnd, facts, put, start_end
from lookup_buffer.device.lane import SILENCE_SECONDS, DeviceLane
from lookup_buffer.device.memory import HostPoolMemory
from lookup_buffer.device.pairs import WARM_MAX
from lookup_buffer.device.server import DISCOVERED_PAIRS_MAX
from nodes import start_node, tensor_of, wait_until
from test_device_tickets import Ends

__all__ = ["start_end", "start_node"]
SECONDS = 30.0
READ = "read(TensorKey('first'))"


def fallbacks(end: DeviceEnd) -> int:
    named = end.node.stats().items()
    return sum(n for name, n in named if name.startswith("lane_fallbacks_"))


def test_the_first_request_comes_by_the_lane_and_a_pool_that_dies_leaves_no_pair(
    start_end: StartEnd,
) -> None:
    producer, reader = start_end(receives=False), start_end(offers=False)
    wait_until(lambda: reader.do("lane.pairs()") == producer.do("lane.pairs()") == 1, SECONDS)
    put(producer, "first", f"tensor_of('first', {LARGE})")
    assert reader.do(READ) == facts(tensor_of("first", LARGE))
    assert (reader.counted("lane_received_gloo"), fallbacks(reader)) == (1, 0)
    producer.kill()
    wait_until(lambda: reader.do("lane.pairs()") == 0, SECONDS)
    assert fallbacks(reader) == 0, "no request failed"


def test_a_pool_is_found_again_after_its_nodes_restart(start_end: StartEnd) -> None:
    ends = start_end(), start_end()
    wait_until(lambda: all(end.do("lane.pairs()") == 2 for end in ends), SECONDS)
    ends[0].node.terminate()
    wait_until(lambda: ends[1].do("lane._pairs.open_pairs()") == 0, SECONDS)
    ends[0].node.start()
    wait_until(lambda: all(end.do("lane.pairs()") == 2 for end in ends), SECONDS)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack)


def tell(ends: Ends, *there: DeviceLane, gone: tuple[DeviceLane, ...] = (), **seen: object) -> None:
    """As the node: these pools are seen, and these are gone."""
    ends.ours.on_event(news(ends, *there, gone=gone, **seen))


def news(
    ends: Ends, *there: DeviceLane, gone: tuple[DeviceLane, ...] = (), **seen: object
) -> dict[str, object]:
    fields = [list(({**place_of(ends, lane), **seen}).values()) for lane in there]
    return {"event": "pools", "there": fields, "gone": [lane.id for lane in gone]}


def place_of(ends: Ends, lane: DeviceLane) -> dict[str, object]:
    kind, library = ends.dialect
    where = {"host": "127.0.0.1", "lane": kind, "library": library}
    return {**where, "port": lane.port, "pool": lane.id}


def test_a_discovered_pool_gets_the_first_request_at_once(ends: Ends) -> None:
    tell(ends, ends.theirs)
    wait_until(lambda: ends.ours.pairs() == 1, SECONDS)
    assert ends.settled(ends.ask()) == ""
    tell(ends, gone=(ends.theirs,))
    assert ends.ours.pairs() == 0
    wait_until(lambda: ends.theirs.pairs() == 0, SECONDS)


class Slow(HostPoolMemory):
    """Where nothing is sent until it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.reached = threading.Event(), threading.Event()

    def wait(self, ready: object) -> None:
        self.reached.set()
        assert self.open.wait(SECONDS)


def test_a_used_pair_outlives_the_report_that_its_pool_is_gone(ends: Ends) -> None:
    """A node that was killed counts as gone with its processes' pools, and these live."""
    place = Slow()
    with closing(DeviceLane("gloo", pool_bytes=POOL_BYTES, memory=place)) as slow:
        tell(ends, slow)
        wait_until(lambda: ends.ours.pairs() == 1, SECONDS)
        ticket = ends.ask(of=slow)
        assert place.reached.wait(SECONDS)
        tell(ends, gone=(slow,))
        place.open.set()
        assert ends.settled(ticket) == ""
        assert ends.ours.pairs() == 1
        ends.let_go()


def test_pairs_made_on_discovery_stay_within_their_limit(ends: Ends) -> None:
    with ExitStack() as stack:
        crowd = [DeviceLane("gloo", pool_bytes=POOL_BYTES) for _ in range(WARM_MAX + 2)]
        for lane in crowd:
            stack.callback(lane.close)
        ends.warm()
        tell(ends, *crowd)
        wait_until(lambda: ends.ours.pairs() == WARM_MAX, SECONDS)
        asked, last = crowd[0], crowd[-1]
        assert ends.settled(ends.ask(of=asked)) == ""
        assert ends.settled(ends.ask(of=last)) == "cold", "there was no room for it at sight"
        wait_until(lambda: ends.settled(ends.ask(of=last)) == "", SECONDS)
        assert ends.ours.pairs() == WARM_MAX + 1
        ends.let_go()


def test_pairs_without_a_remote_end_do_not_count_towards_the_limit(ends: Ends) -> None:
    with ExitStack() as stack:
        crowd = [DeviceLane("gloo", pool_bytes=POOL_BYTES) for _ in range(WARM_MAX)]
        for lane in crowd:
            stack.callback(lane.close)
        tell(ends, *crowd)
        wait_until(lambda: ends.ours.pairs() == WARM_MAX, SECONDS)
    wait_until(lambda: ends.ours.pairs() == 0, SECONDS, "closed pools are not counted")
    tell(ends, ends.theirs)
    wait_until(lambda: ends.ours.pairs() == 1, SECONDS)


def test_a_requested_pair_does_not_wait_for_pairs_made_on_discovery(ends: Ends) -> None:
    """Those connect, and are then silent until their deadline."""
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        for number, server in enumerate(silent):
            tell(ends, ends.theirs, port=server.getsockname()[1], pool=f"{number:012x}")
        tell(ends, ends.theirs)
        started = time.monotonic()
        wait_until(lambda: ends.settled(ends.ask()) == "", SECONDS)
        assert time.monotonic() - started < len(silent) * SILENCE_SECONDS / 2
        ends.let_go()


def test_a_pool_that_many_discovered_accepts_requested_pairs(ends: Ends) -> None:
    with ExitStack() as stack:
        readers = [DeviceLane("gloo", pool_bytes=POOL_BYTES) for _ in range(DISCOVERED_PAIRS_MAX)]
        for reader in readers:
            stack.callback(reader.close)
            reader.on_event(news(ends, ends.theirs))
        wait_until(lambda: all(reader.pairs() == 1 for reader in readers), SECONDS)
        tell(ends, ends.theirs)
        made = ends.ours._pairs._pairs[ends.theirs.id]
        wait_until(lambda: not made.is_making, SECONDS)
        assert ends.ours.pairs() == 0
        ends.warm()
        assert ends.theirs.pairs() == DISCOVERED_PAIRS_MAX + 1
    assert "warned:abandoned" not in ends.ours.stats()


def test_pools_of_another_protocol_version_are_ignored(ends: Ends) -> None:
    tell(ends, ends.theirs, pool=secrets.token_hex(6), lane="nccl")
    tell(ends, ends.theirs, pool=secrets.token_hex(6), library="0" * 8)
    ends.warm()  # and what is begun later is done later
    assert (ends.ours.pairs(), ends.theirs.pairs()) == (1, 1)


def test_a_pool_that_cannot_be_reached_is_tried_once_and_by_a_record(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ends.place.fails = 2
    tell(ends, ends.theirs)
    wait_until(lambda: ends.place.fails == 1, SECONDS)
    for _ in range(3):
        tell(ends, ends.theirs)
    assert ends.settled(ends.ask()) == "abandoned", "it rests"
    assert ends.place.fails == 1, "news are no reason to try again"
    wait_until(lambda: ends.settled(ends.ask()) == "cold", SECONDS)
    ends.warm()
    said = [record for record in caplog.records if "no pair with" in record.getMessage()]
    assert len(said) == 1
