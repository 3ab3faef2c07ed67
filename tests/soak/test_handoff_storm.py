"""Hand-offs under faults: each is taken at most once, each loss has a reason, no call hangs.

Many producers and consumers work on several nodes, while some are killed and stopped. Consumers are
threads of processes. Each is given one key at a time and reports the outcome. A key whose consumer
was killed, stopped, or lost its node is given to another one as well.
"""

import os
import random
import re
import signal
import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import BufferFull, NodeUnavailable
from lookup_buffer.key import TensorKey
from nodes import MIB, ClientProcess, NodeProcess, StartNode, at_rest, wait_until
from patience import scaled

pytestmark = pytest.mark.part(name="soaks")

CONSUMERS_PER_PROCESS = 8
TIMEOUT_SECONDS = scaled(20.0)
"""For what may be inserted only meanwhile, and whose owner's death is reported within 7 s."""
HANG_SECONDS = TIMEOUT_SECONDS + 15.0
"""A take silent for this long hangs: its timeout, a lease, a transfer, and a margin."""
AWAY_SECONDS = 0.3
SIZES = (0, 100, 5_000, 60_000, 300_000)
KILLED = "killed"

CONSUMERS = """
import queue, threading
from test_handoff_storm import is_value, key_of

def consume(consumer):
    while True:
        number, timeout = work[consumer].get()
        try:
            tensor = buffer.drop_select(key_of(number), timeout=timeout)
            outcome = "won" if is_value(number, tensor) else "wrong bytes"
        except Exception as error:
            outcome = type(error).__name__
        with speaking:
            send((consumer, number, outcome))

speaking, work = threading.Lock(), [queue.Queue() for _ in range(receive())]
for consumer in range(len(work)):
    threading.Thread(target=consume, args=(consumer,), daemon=True).start()
while True:
    consumer, number, timeout = receive()
    work[consumer].put((number, timeout))
"""


def key_of(number: int) -> TensorKey:
    return TensorKey("storm", request_id=str(number))


def value_of(number: int) -> torch.Tensor:
    return torch.full((SIZES[number % len(SIZES)],), number % 251, dtype=torch.uint8)


def is_value(number: int, tensor: torch.Tensor | None) -> bool:
    return tensor is not None and torch.equal(tensor, value_of(number))


@dataclass(eq=False)
class Producer:
    """A thread that inserts its keys, each once."""

    node: NodeProcess
    numbers: list[int]
    inserted: dict[int, float] = field(default_factory=dict)
    """When each was stored, by the monotonic clock."""
    uncertain: set[int] = field(default_factory=set)
    """The node was lost while it was being inserted."""
    ending: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with self.node.client(required=False) as buffer:
            for number in self.numbers:
                while not (buffer.attached or self.ending.wait(0.02)):
                    pass
                if self.ending.is_set():
                    return
                self._insert(buffer, number)

    def _insert(self, buffer: LookupBuffer, number: int) -> None:
        while not self.ending.is_set():
            try:
                buffer.insert(key_of(number), value_of(number), timeout=5.0)
                self.inserted[number] = time.monotonic()
                return
            except BufferFull:
                continue  # the takers of the hand-offs that fill it are stopped or dead
            except NodeUnavailable:
                self.uncertain.add(number)
                return


@dataclass(eq=False)
class Consumers:
    """A process of them."""

    process: ClientProcess
    node: NodeProcess
    busy: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Consumer → its key, and since when."""
    rests_until: float = 0.0
    """Its node was lost a moment ago."""

    def idle(self) -> list[int]:
        return [one for one in range(CONSUMERS_PER_PROCESS) if one not in self.busy]


class HandoffStorm:
    def __init__(self, nodes: list[NodeProcess], processes: int, chance: random.Random) -> None:
        self.nodes = nodes
        self.outcomes: dict[int, list[str]] = defaultdict(list)
        """The outcome of each take of a key."""
        self.killed_at: dict[NodeProcess, list[float]] = defaultdict(list)
        self.done: Counter[str] = Counter()
        self._log_starts = {node: [0] for node in nodes}
        self._chance = chance
        self._due: deque[int] = deque()
        self._ended = 0
        self._consumers = [self._start(nodes[i % len(nodes)]) for i in range(processes)]
        self._frozen: dict[Consumers, float] = {}
        self._producers: list[Producer] = []

    # -- the run

    def run(self, producers: list[Producer], faults: list[str]) -> None:
        """Until each key has been requested and settled."""
        count = sum(len(producer.numbers) for producer in producers)
        self._due.extend(range(count))
        self._producers = producers
        for producer in producers:
            producer.start()
        due = deque(sorted(self._chance.randrange(count // 20, count) for _ in faults))
        while self._due or any(one.busy for one in self._consumers):
            self._give()
            self._hear()
            if due and self._ended >= due[0]:
                due.popleft()
                self._strike(faults.pop())
            self._thaw()
        for producer in producers:
            producer.thread.join(60.0)
            assert not producer.thread.is_alive(), "a producer hangs"

    def end(self) -> None:
        for producer in self._producers:
            producer.ending.set()
        for one in self._consumers:
            one.process.kill()
            one.process.__exit__()

    def _start(self, node: NodeProcess) -> Consumers:
        process = ClientProcess(node.config, CONSUMERS)
        process.send(CONSUMERS_PER_PROCESS)
        return Consumers(process, node)

    def _give(self) -> None:
        places = [(one, who) for one in self._consumers for who in one.idle()]
        self._chance.shuffle(places)
        for one, who in places:
            if not self._due:
                return
            if one in self._frozen or time.monotonic() < one.rests_until:
                continue
            number = self._due.popleft()
            one.process.send((who, number, TIMEOUT_SECONDS))
            one.busy[who] = (number, time.monotonic())

    def _hear(self) -> None:
        pipes = {one.process.pipe: one for one in self._consumers}
        for pipe in wait(list(pipes), timeout=0.05):
            one = pipes[pipe]  # type: ignore[index]
            who, number, outcome = one.process.receive()
            del one.busy[who]
            self._told(one, number, outcome)
        now = time.monotonic()
        for one in self._consumers:
            for number, since in one.busy.values():
                assert now - since < HANG_SECONDS, f"the take of {number} hangs"

    def _told(self, one: Consumers, number: int, outcome: str) -> None:
        self._ended += 1
        self.outcomes[number].append(outcome)
        if outcome == "NodeUnavailable":
            one.rests_until = time.monotonic() + AWAY_SECONDS
            if "won" not in self.outcomes[number]:
                self._due.appendleft(
                    number
                )  # not at the end: a key that is not due is not requested

    # -- faults

    def _strike(self, fault: str) -> None:
        self.done[fault] += 1
        if fault == "owner killed":
            self._kill_node(self._chance.choice(self.nodes))
            return
        one = self._chance.choice([one for one in self._consumers if one not in self._frozen])
        if fault == "consumers stopped":
            os.kill(one.process.pid, signal.SIGSTOP)
            self._frozen[one] = time.monotonic() + self._chance.uniform(0.5, 3.0)
            # Others may have its items; the second taker times out.
            self._due.extendleft(number for number, _ in list(one.busy.values())[:2])
        else:
            one.process.kill()
            one.process.__exit__()
            for number, _ in one.busy.values():
                self.outcomes[number].append(KILLED)
                self._due.appendleft(number)
            self._consumers[self._consumers.index(one)] = self._start(one.node)

    def _kill_node(self, node: NodeProcess) -> None:
        node.kill()
        self.killed_at[node].append(time.monotonic())
        self._log_starts[node].append(len(node.log_text()))
        time.sleep(AWAY_SECONDS)
        node.start()

    def _thaw(self) -> None:
        for one, until in list(self._frozen.items()):
            if time.monotonic() >= until:
                del self._frozen[one]
                os.kill(one.process.pid, signal.SIGCONT)
                for who, (number, _) in one.busy.items():
                    one.busy[who] = (number, time.monotonic())

    # -- the owners' logs

    def acknowledged(self) -> Counter[tuple[Any, ...]]:
        """How often each generation was: (node, its start, key's number, generation)."""
        found: Counter[tuple[Any, ...]] = Counter()
        for node in self.nodes:
            text, starts = node.log_text(), self._log_starts[node]
            for boot, (start, end) in enumerate(zip(starts, [*starts[1:], None], strict=True)):
                pattern = r"taken: storm@(\d+), generation (\d+),"
                for number, generation in re.findall(pattern, text[start:end]):
                    found[node.node_id, boot, int(number), int(generation)] += 1
        return found


NODES = 4
PRODUCERS = 8
PUBLISHED_SECONDS = scaled(1.0)
"""An item that was inserted longer ago is in the store, even on a busy machine. The loss of an item
that is not in the store cannot be reported to its takers."""
REJOINED_SECONDS = 6.0
"""A node that was killed publishes nothing before it has watched its id for three seconds."""


def test_each_hand_off_is_taken_exactly_once(
    start_node: StartNode, pytestconfig: pytest.Config
) -> None:
    count: int = pytestconfig.getoption("--handoffs")
    processes = 8 if count > 1000 else 4
    kills = 10 if count > 1000 else 2
    chance = random.Random(pytestconfig.getoption("--soak-seed"))
    nodes = [
        start_node(capacity_bytes=24 * MIB, log_level="info", handoff_lease_seconds=1.5)
        for _ in range(NODES)
    ]
    faults = ["consumers killed", "consumers stopped"] * kills
    faults += ["owner killed"] * (2 if count > 1000 else 1)
    chance.shuffle(faults)
    producers = [
        Producer(nodes[index % NODES], list(range(index, count, PRODUCERS)))
        for index in range(PRODUCERS)
    ]
    storm = HandoffStorm(nodes, processes, chance)
    started = time.monotonic()
    try:
        storm.run(producers, list(faults))
    finally:
        storm.end()
    print(f"{count} in {time.monotonic() - started:.1f} s, {dict(storm.done)}")
    _judge(storm, producers, count)
    for node in nodes:
        wait_until(lambda: node.stats()["store_up"], 5.0)  # noqa: B023
        at_rest(node)


def _judge(storm: HandoffStorm, producers: list[Producer], count: int) -> None:
    acknowledged = storm.acknowledged()
    twice = {what: times for what, times in acknowledged.items() if times > 1}
    assert not twice, "a generation is acknowledged once"
    by_number = Counter(number for _, _, number, _ in acknowledged)
    assert max(by_number.values()) == 1, "each was inserted once"
    tally: Counter[str] = Counter()
    for producer in producers:
        for number in producer.numbers:
            outcomes = storm.outcomes[number]
            assert outcomes, "each was asked for"
            assert "wrong bytes" not in outcomes
            fate = _fate(storm, producer, number, outcomes, by_number[number])
            tally[fate] += 1
    print(dict(tally), dict(Counter(one for of in storm.outcomes.values() for one in of)))
    assert tally["taken"] > count / 2


def _fate(
    storm: HandoffStorm, producer: Producer, number: int, outcomes: list[str], acknowledged: int
) -> str:
    """What became of one hand-off, each of which has its one reason."""
    wins = outcomes.count("won")
    kills = [at for at in storm.killed_at[producer.node] if at > producer.inserted.get(number, 0)]
    if wins:
        assert (wins, acknowledged) == (1, 1)
        return "taken"
    if acknowledged:
        # Between its acknowledgement and its return its consumer, or a node on the way, was killed.
        died = outcomes.count(KILLED) + outcomes.count("NodeUnavailable")
        assert died or (kills and "MissingTensor" in outcomes), outcomes
        return "lost on return"
    if number in producer.uncertain:
        return "never inserted"
    assert kills, f"{number} was lost though its owner lives: {outcomes}"
    if set(outcomes) <= {"MissingTensor", "NodeUnavailable", KILLED}:
        return "lost with its owner"
    before = [at for at in storm.killed_at[producer.node] if at < producer.inserted[number]]
    since = max([producer.inserted[number], *(at + REJOINED_SECONDS for at in before)])
    assert kills[0] - since < PUBLISHED_SECONDS, outcomes
    return "lost before the store knew of it"
