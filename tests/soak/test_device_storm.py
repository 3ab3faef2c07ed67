"""A storm of joins and leaves among processes with pools on three hosts.

The processes join, store, read and leave, while some are killed and stopped. Each runs one command
at a time and returns the outcome. A read returns the right bytes or an honest miss, no call hangs,
and afterwards nothing is left in the remaining processes or in their nodes. The bytes under a key
are one of a few variants, as several devices encode one item to slightly different bytes: what is
read must be one of them, whole.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from device_ends import DeviceEnd, StartEnd, start_end
from lookup_buffer.device.buffer import DeviceBuffer
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.key import TensorKey
from nodes import MIB, NodeProcess, StartNode, at_rest, tensor_of, wait_until, with_store

pytestmark = pytest.mark.part(name="soaks")

HANG_SECONDS = 25.0
"""A process silent for this long hangs: a lane's deadline, a transfer, and a margin. Less than the
bound that a read has beyond all these."""
SIZES = (1_000, 200_000, 1 << 20, 6 << 20)
VARIANTS = 2
BLOCK_BYTES = 200
RECENT = 20
"""Of so many keys, the newest, one is read, or stored once more."""
AT_ONCE = 4
CALM_SECONDS = (0.1, 0.8)
STOPPED_SECONDS = (0.2, 2.5)


def value_of(number: int, variant: int) -> torch.Tensor:
    block = tensor_of(f"{number}-{variant}", BLOCK_BYTES)
    return block.repeat(SIZES[number % len(SIZES)] // BLOCK_BYTES + 1)


# -- in the processes


def store(buffer: DeviceBuffer, number: int, variant: int, ttl_seconds: float | None) -> str:
    value = value_of(number, variant)
    return _outcome(
        lambda: buffer.insert(TensorKey(f"storm-{number}"), value, ttl_seconds=ttl_seconds).name
    )


def read(buffer: DeviceBuffer, numbers: list[int]) -> list[str]:
    def one(number: int) -> str:
        return _outcome(partial(_read, buffer, number))

    with ThreadPoolExecutor(AT_ONCE) as many:
        return list(many.map(one, numbers))


def _read(buffer: DeviceBuffer, number: int) -> str:
    with buffer.view(TensorKey(f"storm-{number}")) as found:
        is_one = any(
            found is not None and torch.equal(found, value_of(number, variant))
            for variant in range(VARIANTS)
        )
        return "right" if is_one else "WRONG BYTES"


def _outcome(call: Callable[[], str]) -> str:
    try:
        return call()
    except LookupBufferError as error:
        return type(error).__name__


def used_bytes_amiss(buffer: DeviceBuffer) -> int:
    """The difference between what a pool at rest has charged and what its entries have."""
    pool = buffer.lane.pool
    return pool.gauges().used_bytes - sum(entry.nbytes for entry in pool._entries.values())


# -- in the test


@dataclass(eq=False)
class Member:
    end: DeviceEnd
    joined: bool = True
    busy_since: float | None = None
    stopped_until: float | None = None

    def files_alone(self) -> int:
        """How many it has open that are not of a pool or a client; it leaves, and joins again."""
        self.end.do("leave()")
        wait_until(lambda: not self.end.do("threads()"), HANG_SECONDS, "threads of who left")
        files = self.end.do("files()")
        assert isinstance(files, int)
        self.end.do("join()")
        return files


class DeviceStorm:
    """
    Args:
        start: a process with a pool on that node.
    """

    def __init__(
        self,
        nodes: list[NodeProcess],
        each: int,
        start: Callable[[NodeProcess], DeviceEnd],
        chance: random.Random,
    ) -> None:
        self._start = start
        self._chance = chance
        self._last = 0
        self.done: Counter[str] = Counter()
        """What was done, to them and by them."""
        self.outcomes: Counter[str] = Counter()
        self.members = [Member(start(node)) for node in nodes for _ in range(each)]
        self.lasting = {member: member.files_alone() for member in self.members[::each]}
        """One of each node, which is stopped, but not killed, and its files before all of it."""

    def run(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        strike_at = time.monotonic() + 1.0
        while time.monotonic() < ends_at:
            for member in self.members:
                self._attend(member)
            if time.monotonic() >= strike_at:
                self._strike()
                strike_at = time.monotonic() + self._chance.uniform(*CALM_SECONDS)
            time.sleep(0.005)
        for member in self.members:
            if member.stopped_until is not None:
                self._thaw(member)
        while any(member.busy_since is not None for member in self.members):
            for member in self.members:
                self._hear(member)
            time.sleep(0.005)

    def _attend(self, member: Member) -> None:
        if member.stopped_until is not None and time.monotonic() >= member.stopped_until:
            self._thaw(member)
        self._hear(member)
        if member.stopped_until is None and member.busy_since is None:
            what = self._next(member)
            self.done[what.partition("(")[0]] += 1
            member.end.begin(what)
            member.busy_since = time.monotonic()

    def _next(self, member: Member) -> str:
        if not member.joined:
            member.joined = True
            return "join()"
        drawn = self._chance.random()
        if drawn < 0.05:
            member.joined = False
            return "leave()"
        storm = "__import__('test_device_storm')"
        if drawn < 0.35 or self._last < AT_ONCE:
            self._last += self._chance.random() < 0.7
            variant = self._chance.randrange(VARIANTS)
            ttl = self._chance.choice((None, None, 1.0))
            return f"{storm}.store(buffer, {self._recent()}, {variant}, {ttl})"
        numbers = [self._recent() for _ in range(self._chance.randint(1, AT_ONCE))]
        return f"{storm}.read(buffer, {numbers})"

    def _recent(self) -> int:
        return max(0, self._last - int(self._chance.expovariate(3 / RECENT)))

    def _hear(self, member: Member) -> None:
        if member.busy_since is None or member.stopped_until is not None:
            return
        if member.end.has_sent():
            said = member.end.receive()
            self.outcomes.update([said] if isinstance(said, str) else said or [])
            member.busy_since = None
        else:
            assert time.monotonic() - member.busy_since < HANG_SECONDS, "a member hangs"

    def _strike(self) -> None:
        running = [one for one in self.members if one.stopped_until is None]
        if not running:  # on a busy machine the stopped ones are thawed late
            return
        member = self._chance.choice(running)
        if member in self.lasting or self._chance.random() < 0.5:
            self.done["stopped"] += 1
            os.kill(member.end.pid, signal.SIGSTOP)
            member.stopped_until = time.monotonic() + self._chance.uniform(*STOPPED_SECONDS)
        else:
            self.done["killed"] += 1
            member.end.kill()
            new = Member(self._start(member.end.node))
            self.members[self.members.index(member)] = new

    def _thaw(self, member: Member) -> None:
        os.kill(member.end.pid, signal.SIGCONT)
        member.stopped_until = None
        if member.busy_since is not None:
            member.busy_since = time.monotonic()


__all__ = ["start_end"]
NODES, EACH = 3, 2
ALLOWED = {"right", "STORED", "EXISTS", "MissingTensor", "BufferFull", "NodeUnavailable"}
POOL_BYTES = 14 * MIB
"""Little, so that pools evict what is read, and what is offered."""
SECONDS = 40.0


def test_many_joins_and_leaves_on_three_hosts_leak_nothing(
    start_node: StartNode, start_end: StartEnd, pytestconfig: pytest.Config
) -> None:
    chance = random.Random(pytestconfig.getoption("--soak-seed"))
    nodes = [start_node(capacity_bytes=48 * MIB) for _ in range(NODES)]
    with_store(*nodes)
    storm = DeviceStorm(nodes, EACH, lambda node: start_end(node, pool_bytes=POOL_BYTES), chance)
    storm.run(pytestconfig.getoption("--lane-seconds"))
    print(dict(storm.done), dict(storm.outcomes))
    print({name: count for name, count in _counted(nodes).items() if "lane" in name})
    assert storm.outcomes.keys() <= ALLOWED, storm.outcomes
    assert _counted(nodes)["lane_received_gloo"], "all came over the hosts"
    assert not _counted(nodes).get("lane_fallbacks_checksum")
    for member in storm.members:
        if not member.joined:
            member.end.do("join()")
    for node in nodes:
        at_rest(node, seconds=SECONDS)
    for member in storm.members:
        wait_until(lambda: member.end.do("lane.gauges().pinned_bytes") == 0, SECONDS)  # noqa: B023
        assert member.end.do("__import__('test_device_storm').used_bytes_amiss(buffer)") == 0
    # Whoever stays sees that the others are gone; then it is as it was before all of it.
    first, *others = storm.members
    for member in others:
        member.end.do("leave()")
    wait_until(lambda: first.end.do("lane.pairs()") == 0, SECONDS, "pairs with those who left")
    first.end.do("leave()")
    for member, before in storm.lasting.items():
        assert member.files_alone() <= before + 1


def _counted(nodes: list[NodeProcess]) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in nodes:
        for name, count in node.stats().items():
            found[name] = found.get(name, 0) + count
    return found
