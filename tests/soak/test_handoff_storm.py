"""Hand-offs under faults: each is taken at most once, what is lost has a reason, nobody hangs."""

import random
import time
from collections import Counter

import pytest

from handoff_storm import KILLED, HandoffStorm, Producer
from nodes import MIB, StartNode, at_rest, wait_until
from patience import scaled

NODES = 4
PRODUCERS = 8
PUBLISHED_SECONDS = scaled(1.0)
"""What was inserted longer ago is known to the store, busy as the machine may be. Of what is not,
nobody can tell who waits for it that it was lost."""
REJOINED_SECONDS = 6.0
"""A node that was killed publishes nothing before it has watched its id for three seconds."""


def test_exactly_one_takes_each(start_node: StartNode, pytestconfig: pytest.Config) -> None:
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
