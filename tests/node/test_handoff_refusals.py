"""Hand-offs while the owner's port refuses connections, and resets those that there are.

A refused connection is no dead owner: takes and inserts are retried within their own timeout.
"""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import LookupBufferError, LookupTimeout, MissingTensor, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import InsertOutcome
from nodes import NodeProcess, StartNode, at_rest, handoff, wait_until, with_store
from proxies import STEPS, RefusingProxy, behind_refusals

NODES = 4
COUNT = 300
PRODUCERS, TAKERS = 8, 24
SIZES = (1, 600, 40_000)
TIMEOUTS_SECONDS = (0.0, 0.3, 1.0, 3.0)
PATIENCE_SECONDS = 30.0
HOPELESS_SECONDS = 3.0
"""Timeout of each take once the test has failed already."""
FALSE_DEATH = "MissingTensor owner_dead"
STORED, EXISTS = InsertOutcome.STORED, InsertOutcome.EXISTS
CONTESTED_EVERY = 3
"""Every so many keys are inserted on a second node as well."""


class Fleet:
    """Nodes that reach each other only through proxies, and what became of each hand-off."""

    def __init__(self, start_node: StartNode, stack: ExitStack, chance: random.Random) -> None:
        self.chance = chance
        self.proxies = [stack.enter_context(RefusingProxy()) for _ in range(NODES)]
        self.nodes = [
            behind_refusals(proxy, start_node, log_level="info") for proxy in self.proxies
        ]
        self.buffers = [stack.enter_context(node.client()) for node in self.nodes]
        self.keys = [handoff() for _ in range(COUNT)]
        self.inserted: dict[int, InsertOutcome | str] = {}
        """By the tensor's value: the key's number, or COUNT plus that for the second insert."""
        self.delivered: Counter[int] = Counter()
        self.missed: Counter[str] = Counter()
        self.premature: list[int] = []
        """Keys stored on a second node while the first still had them."""
        self._chosen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def produce(self, number: int) -> None:
        """Insert it, while its owner's port may refuse; some also on another node."""
        owner, contested = number % NODES, number % CONTESTED_EVERY == 0
        self._disturb(self.proxies[owner])
        self._insert(self.buffers[owner], number, number)
        if contested:
            outcome = self._insert(self.buffers[(owner + 1) % NODES], number, COUNT + number)
            if outcome is STORED and number not in self.acknowledged(owner):
                self.premature.append(number)

    def _disturb(self, proxy: RefusingProxy) -> None:
        """Refuse at one of the steps that were chosen least often."""
        if not proxy.is_ready:
            return
        with self._lock:
            step = min(
                ["insert", *STEPS], key=lambda one: (self._chosen[one], self.chance.random())
            )
            self._chosen[step] += 1
            resets = self.chance.random() < 0.7
        if step == "insert":
            proxy.refuse(step, resets)
        else:
            proxy.arm(step, resets)

    def _insert(self, buffer: LookupBuffer, number: int, value: int) -> InsertOutcome | str:
        tensor = torch.full((SIZES[number % len(SIZES)],), value)
        outcome: InsertOutcome | str
        try:
            outcome = buffer.insert(self.keys[number], tensor, timeout=PATIENCE_SECONDS)
        except LookupBufferError as error:
            outcome = f"{type(error).__name__}: {error}"
        self.inserted[value] = outcome
        return outcome

    def take(self, number: int, node: int, chance: random.Random) -> None:
        """Take the key of `number` through `node`, until a taker has what was stored."""
        started = time.monotonic()
        while not self.is_done(number):
            patience = HOPELESS_SECONDS if self.missed[FALSE_DEATH] else PATIENCE_SECONDS
            if time.monotonic() - started > patience:
                return
            self._take(number, node, chance.choice(TIMEOUTS_SECONDS))

    def _take(self, number: int, node: int, timeout: float) -> None:
        try:
            tensor = self.buffers[node].drop_select(self.keys[number], timeout=timeout)
        except LookupBufferError as error:
            reason = re.search(r"\((\w+)\)$|: (\w+)$", str(error))
            shown = (reason[1] or reason[2]) if reason else str(error)
            with self._lock:
                self.missed[f"{type(error).__name__} {shown}"] += 1
            return
        assert tensor is not None
        value = int(tensor[0])
        assert torch.equal(tensor, torch.full_like(tensor, value)), "wrong bytes"
        with self._lock:
            self.delivered[value] += 1

    def is_done(self, number: int) -> bool:
        values = (number, COUNT + number) if number % CONTESTED_EVERY == 0 else (number,)
        outcomes = [self.inserted.get(value) for value in values]
        return None not in outcomes and all(
            self.delivered[value]
            for value, outcome in zip(values, outcomes, strict=True)
            if outcome is STORED
        )

    def stored(self) -> set[int]:
        return {value for value, outcome in self.inserted.items() if outcome is STORED}

    def acknowledged(self, node: int) -> Counter[int]:
        """How often each key was, by what its owner logged."""
        texts = re.findall(r"taken: (\S+), generation", self.nodes[node].log_text())
        numbers = {key.text: number for number, key in enumerate(self.keys)}
        return Counter(numbers[text] for text in texts)

    def run(self) -> None:
        with ThreadPoolExecutor(PRODUCERS) as producers, ThreadPoolExecutor(TAKERS) as takers:
            work: list[Future[None]] = []
            for number in range(COUNT):
                work.append(producers.submit(self.produce, number))
                for node in (number + 2) % NODES, (number + 3) % NODES:
                    chance = random.Random(self.chance.random())
                    work.append(takers.submit(self.take, number, node, chance))
            for one in work:
                one.result()


def test_each_is_taken_exactly_once(start_node: StartNode, pytestconfig: pytest.Config) -> None:
    chance = random.Random(pytestconfig.getoption("--soak-seed"))
    with ExitStack() as stack:
        fleet = Fleet(start_node, stack, chance)
        with_store(*fleet.nodes)
        started = time.monotonic()
        fleet.run()
        struck = sum((proxy.struck for proxy in fleet.proxies), Counter[str]())
        second = Counter(str(fleet.inserted[value]) for value in fleet.inserted if value >= COUNT)
        print(f"{time.monotonic() - started:.1f} s; refused at {dict(struck)}")
        print(f"missed: {dict(fleet.missed)}; second inserts: {dict(second)}")
        twice = {value for value, times in fleet.delivered.items() if times > 1}
        lost = fleet.stored() - fleet.delivered.keys()
        strange = fleet.delivered.keys() - fleet.stored()
        false_deaths = fleet.missed[FALSE_DEATH]
        print(
            f"false deaths {false_deaths}, premature {len(fleet.premature)}, twice {len(twice)}, "
            f"lost {len(lost)}, strange {len(strange)}"
        )
        assert set(struck) == {"insert", *STEPS}, "it refused at every step"
        assert false_deaths == 0
        assert not fleet.premature, "stored on a second node while the first had it"
        assert (twice, lost, strange) == (set(), set(), set()), "each stored one is delivered once"
        assert all(fleet.inserted[number] is STORED for number in range(COUNT))
        for node in range(NODES):
            assert set(fleet.acknowledged(node).values()) <= {1}, "once for each key on a node"
            at_rest(fleet.nodes[node], seconds=30.0)
        wait_until(lambda: not any(n.stats()["handoff_bytes"] for n in fleet.nodes), 30.0)


@pytest.fixture
def proxy() -> Iterator[RefusingProxy]:
    with RefusingProxy(seconds=600.0) as proxy:
        yield proxy


@pytest.fixture
def pair(start_node: StartNode, proxy: RefusingProxy) -> tuple[NodeProcess, NodeProcess]:
    """An owner behind the proxy, and a node that is connected to it."""
    nodes = behind_refusals(proxy, start_node, log_level="info"), start_node()
    with_store(*nodes)
    return nodes


Pair = tuple[NodeProcess, NodeProcess]


def located(buffer: LookupBuffer, name: TensorKey) -> None:
    wait_until(lambda: buffer.has_caches([name], timeout=1.0)[0], PATIENCE_SECONDS)


@pytest.mark.parametrize("timeout", [0.0, 0.5])
def test_a_taker_without_time_to_wait_gets_that_the_owner_was_not_reached(
    pair: Pair, proxy: RefusingProxy, timeout: float
) -> None:
    owner, node = pair
    name = handoff()
    with owner.client() as producer, node.client() as taker:
        producer.insert(name, torch.ones(3))
        located(taker, name)
        proxy.refuse()
        expected = LookupTimeout if timeout else MissingTensor
        with pytest.raises(expected, match="peer_failed"):
            taker.drop_select(name, timeout=timeout)
        with pytest.raises(expected) as missed:
            taker.select(name, timeout=timeout)
        assert "owner_dead" not in str(missed.value)
        located(taker, name)
        proxy.relent()
        assert taker.drop_select(name, timeout=PATIENCE_SECONDS) is not None
    at_rest(owner)


def test_the_hand_off_of_an_unreachable_owner_is_not_stored_on_another_node(
    pair: Pair, proxy: RefusingProxy
) -> None:
    owner, node = pair
    name = handoff()
    with owner.client() as one, node.client() as other:
        assert one.insert(name, torch.full((9,), 1)) is STORED
        proxy.refuse()
        with pytest.raises(NodeUnavailable, match="does not answer"):
            other.insert(name, torch.full((9,), 2), timeout=0.5)
        proxy.relent()
        assert other.insert(name, torch.full((9,), 2), timeout=PATIENCE_SECONDS) is EXISTS
        taken = other.drop_select(name, timeout=PATIENCE_SECONDS)
        assert taken is not None
        assert int(taken[0]) == 1
        with pytest.raises(MissingTensor, match="absent"):
            one.drop_select(name)


def test_an_acknowledgement_whose_reply_is_lost_counts_once(
    pair: Pair, proxy: RefusingProxy
) -> None:
    owner, node = pair
    name = handoff()
    with owner.client() as producer, node.client() as taker:
        producer.insert(name, torch.full((9,), 3))
        proxy.seconds = 1.0
        proxy.arm("won")
        taken = taker.drop_select(name, timeout=PATIENCE_SECONDS)
        assert taken is not None
        assert int(taken[0]) == 3
        assert proxy.struck["won"] == 1
        with pytest.raises(MissingTensor):
            producer.drop_select(name)
    assert owner.log_text().count(f"taken: {name.text}") == 1
    at_rest(node)


def test_an_acknowledgement_is_settled_with_an_owner_that_refuses_in_a_rhythm(
    pair: Pair, proxy: RefusingProxy
) -> None:
    """It listens for 0.2 s of every 1.2: retries every 0.4 s may miss each of those windows."""
    owner, node = pair
    name = handoff()
    with (
        owner.client() as producer,
        node.client() as taker,
        ThreadPoolExecutor(1) as refusing,
    ):
        producer.insert(name, torch.full((9,), 4))
        proxy.seconds = 0.9
        proxy.arm("won")
        settled = threading.Event()
        rhythm = refusing.submit(_refuse_in_a_rhythm, proxy, settled)
        try:
            taken = taker.drop_select(name, timeout=PATIENCE_SECONDS)
        finally:
            settled.set()
            rhythm.result()
        assert taken is not None
        assert int(taken[0]) == 4
        assert proxy.struck["won"] == 1
    at_rest(node)


def _refuse_in_a_rhythm(proxy: RefusingProxy, settled: threading.Event) -> None:
    wait_until(lambda: proxy.struck["won"] == 1, PATIENCE_SECONDS)
    proxy.seconds = 1.0
    while not settled.wait(0.005):
        if proxy.is_ready:
            settled.wait(0.2)
            proxy.refuse()


def test_an_owner_that_was_replaced_is_dead(pair: Pair) -> None:
    """Though it listens where the old one did; waiting takers are answered before their timeout."""
    owner, node = pair
    name = handoff()
    with owner.client() as producer, node.client() as taker:
        producer.insert(name, torch.ones(3))
        located(taker, name)
        owner.kill()
        owner.start()
        with pytest.raises(MissingTensor, match="owner_dead"):
            taker.drop_select(name, timeout=10 * PATIENCE_SECONDS)
