"""A process's end of a lane alone: what it pins for its node, with any event in between.

Two pools in one process, joined by Gloo; the node is a stand-in that sends what the test gives it.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from xxhash import xxh3_64_intdigest

from device_ends import LARGE, POOL_BYTES, files, threads
from lookup_buffer.codec import header_of, writable_bytes
from lookup_buffer.device.lane import SILENCE_SECONDS, DeviceLane
from lookup_buffer.device.memory import HostPoolMemory
from lookup_buffer.errors import ConfigError
from lookup_buffer.protocol.fields import KEYS_BYTES_MAX
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import OpenPool, Received, Retract
from nodes import tensor_of, wait_until

if TYPE_CHECKING:
    from lookup_buffer.protocol.messages import Request

ROUNDS, CROWD = 8, 9
SECONDS = 20.0
"""What the node gives a reception here: more than any test takes."""


class Gate(HostPoolMemory):
    """A memory that receives nothing until it is open, and fails once when a test sets it to."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.fails = 0
        self.has_memory = True

    def empty(self, header: TensorHeader) -> torch.Tensor:
        self.reached.set()
        assert self.open.wait(SECONDS)
        if not self.has_memory:
            raise MemoryError
        return super().empty(header)

    @contextmanager
    def working(self) -> Iterator[None]:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("CUDA error: unknown error")
        yield


class Ends:
    """A producer's pool, and a reader's with its node."""

    def __init__(self, stack: ExitStack) -> None:
        self.place = Gate()
        self.theirs = DeviceLane("gloo", pool_bytes=POOL_BYTES)
        self.ours = DeviceLane("gloo", pool_bytes=POOL_BYTES, memory=self.place)
        for lane in (self.theirs, self.ours):
            stack.callback(lane.close)
        self.said: list[Request] = []
        self.ours.attached(lambda request: self.said.append(request))
        assert isinstance(self.said.pop(), OpenPool)
        self.last = 0

    def ask(self, nbytes: int = LARGE, *, of: DeviceLane | None = None, **fields: Any) -> int:
        """As the node: have something received that the producer has just offered."""
        producer = of or self.theirs
        self.last += 1
        key, tensor = f"k{self.last}", tensor_of(f"k{self.last}", nbytes)
        kept = producer.prepare("n", key, tensor, immutable=True)
        assert kept is not None
        checksum, (lane, library) = xxh3_64_intdigest(writable_bytes(tensor)), self.dialect
        producer.settle(kept, checksum)
        source = ["127.0.0.1", kept.mark, lane, library, producer.port, producer.id]
        message = {
            "event": "receive", "id": self.last, "namespace": "n", "key": key, "seconds": SECONDS,
            "header": header_of(tensor).to_fields(), "checksums": [checksum],
            "sources": [[*source, checksum]],
        }  # fmt: skip
        self.ours.on_event(message | fields)
        return self.last

    @property
    def dialect(self) -> tuple[str, str]:
        return self.ours.version.lane, self.ours.version.library

    def settled(self, ticket: int) -> str:
        """Why the reader's pool did not receive it; "" where it did."""

        def answers() -> list[str]:
            said = [one for one in self.said if isinstance(one, Received)]
            return [one.reason for one in said if one.ticket == ticket]

        wait_until(answers, SECONDS)
        (reason,) = answers()
        return reason

    def warm(self) -> None:
        wait_until(lambda: self.settled(self.ask()) == "", SECONDS, "a lane")
        self.let_go()

    def let_go(self) -> None:
        """Release all requested tickets."""
        self.ours.on_event({"event": "let_go", "tickets": list(range(self.last + 1)), "keys": []})
        assert self.ours.gauges().tickets == 0


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack)


@contextmanager
def in_the_middle(ends: Ends) -> Iterator[int]:
    """A ticket that is just being received, until the end of the `with`."""
    ends.place.open.clear()
    ends.place.reached.clear()
    served = ends.theirs.stats()["served"]
    ticket = ends.ask()
    assert ends.place.reached.wait(SECONDS)
    yield ticket
    ends.place.open.set()
    wait_until(lambda: ends.theirs.stats()["served"] > served, SECONDS)
    wait_until(lambda: ends.ours.pool.has(("n", f"k{ticket}")), SECONDS)


def test_a_tensor_that_arrives_after_its_node_ended_stays_unpinned(ends: Ends) -> None:
    ends.warm()
    with in_the_middle(ends):
        ends.ours.lost()
    wait_until(lambda: ends.ours.gauges().pinned_bytes == 0, SECONDS)
    assert ends.ours.gauges().tickets == 0


def test_a_tensor_no_longer_wanted_stays_unpinned_and_costs_no_pair(ends: Ends) -> None:
    """Another rank's pool could not have it, or the requester has ended: the pair still works."""
    ends.warm()
    with in_the_middle(ends) as ticket:
        ends.ours.on_event({"event": "let_go", "tickets": [ticket], "keys": []})
    wait_until(lambda: ends.ours.gauges().pinned_bytes == 0, SECONDS)
    assert ends.ours.gauges().tickets == 0
    assert ends.settled(ends.ask()) == ""


def test_pools_that_do_not_answer_delay_no_other_request(ends: Ends) -> None:
    ends.warm()
    with ExitStack() as stack:
        for number in range(8):
            deaf = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port, pool = deaf.getsockname()[1], f"{number:012x}"
            source = ["127.0.0.1", 1, *ends.dialect, port, pool, 0]
            assert ends.settled(ends.ask(sources=[source])) == "cold"
        started = time.monotonic()
        assert ends.settled(ends.ask()) == ""
        assert time.monotonic() - started < SILENCE_SECONDS - 1.0, "it waited for them"


def test_after_a_fault_of_the_device_a_pair_is_made_later(ends: Ends) -> None:
    ends.place.fails = 1
    assert ends.settled(ends.ask()) == "cold"
    ends.warm()


def test_a_length_that_differs_from_the_record_is_a_fault_of_the_remote_end(ends: Ends) -> None:
    ends.warm()
    other = TensorHeader.for_tensor("uint8", (LARGE + 1,)).to_fields()
    assert ends.settled(ends.ask(header=other)) == "peer_failed"
    assert ends.ours.gauges().pinned_bytes == 0
    ends.warm()


def test_a_failed_receive_releases_its_reservation(ends: Ends) -> None:
    ends.warm()
    used = ends.ours.gauges().used_bytes
    assert ends.settled(ends.ask(checksums=[0], sources=[])) == "stale"
    ends.place.has_memory = False
    assert ends.settled(ends.ask()) == "device"
    assert ends.ours.gauges().used_bytes == used


def test_many_joins_and_leaves_leak_nothing(ends: Ends) -> None:
    """Some leave before their pair is made, some while it is used, some when it is over."""
    before = threads(), files()
    ends.warm()  # a pair that so many others will push out
    for _ in range(ROUNDS):
        crowd = [DeviceLane("gloo", pool_bytes=POOL_BYTES) for _ in range(CROWD)]
        soon, meanwhile, late = crowd[::3], crowd[1::3], crowd[2::3]
        asked = [ends.ask(of=lane) for lane in crowd]
        for lane in soon:
            lane.close()
        for lane in (*meanwhile, *late):
            wait_until(lambda lane=lane: ends.settled(ends.ask(of=lane)) == "", SECONDS)  # type: ignore[misc]
        for lane in meanwhile:
            asked.append(ends.ask(of=lane))
            lane.close()
        for ticket in asked:
            ends.settled(ticket)
        for lane in late:
            lane.close()
        ends.let_go()
    assert ends.ours.gauges().pinned_bytes == 0

    def is_as_before() -> bool:
        return threads() == before[0] and files() <= before[1] + 1

    wait_until(is_as_before, 3 * SECONDS, f"{before}")
    ends.warm()


def test_an_address_of_another_host_is_refused_and_leaves_no_thread() -> None:
    before = threads()
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1"):
        DeviceLane("gloo", pool_bytes=POOL_BYTES, host="192.0.2.1", token="of a fleet elsewhere")
    assert threads() == before


def test_an_offered_item_can_be_read_at_once(ends: Ends) -> None:
    """An item that was released or replaced meanwhile is not offered: its reads would fail."""
    pins: list[tuple[str, int]] = []

    def to_node(request: "Request") -> None:
        pins.append((request.op, ends.theirs.gauges().pinned_bytes))

    ends.theirs.attached(to_node)
    kept = ends.theirs.prepare("n", "kept", tensor_of("kept", LARGE), immutable=True)
    ends.theirs.settle(kept, 1)
    gone = ends.theirs.prepare("n", "gone", tensor_of("gone", LARGE), immutable=True)
    ends.theirs.on_event({"event": "let_go", "tickets": [], "keys": [["n", "gone"]]})
    ends.theirs.settle(gone, 2)
    assert [op for op, _ in pins] == ["open_pool", "prepare", "offer", "prepare", "retract"]
    assert dict(pins)["offer"] == LARGE
    assert (ends.theirs.gauges().pinned_bytes, ends.theirs.gauges().used_bytes) == (0, LARGE)


def test_many_items_with_long_keys_are_retracted_in_parts(ends: Ends) -> None:
    """One message of them would be longer than a node takes, and all of it would be lost."""
    keys = [f"{number:04000}" for number in range(400)]
    for key in keys:
        kept = ends.theirs.prepare("n", key, torch.zeros(16), immutable=True)
        ends.theirs.settle(kept, 1)
    said: list[Request] = []
    ends.theirs.attached(lambda request: said.append(request))
    ends.theirs.settle(
        ends.theirs.prepare("n", "all", torch.zeros(POOL_BYTES, dtype=torch.uint8), immutable=True),
        1,
    )
    parts = [request.keys for request in said if isinstance(request, Retract)]
    assert sorted(key for part in parts for key in part) == keys
    assert max(sum(map(len, part)) for part in parts) <= KEYS_BYTES_MAX
