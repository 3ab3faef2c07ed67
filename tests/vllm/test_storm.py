"""Two real vLLM engines with much to do at once: a pool of images, and faults that never end.

By hand, with other seeds and for longer:

    pytest -m vllm -o faulthandler_timeout=600 tests/vllm/test_storm.py -s \
        --soak-seed 7 --pool-rounds 5 --storm-requests 500
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from engine_plugins import Gauges, gauged
from engines import (
    CROSSED,
    FETCH_WAIT_SECONDS,
    PICTURES,
    PROMPT,
    SIZE,
    TELLING_MIN,
    TWICE,
    Album,
    Engine,
    EnginePair,
    TwoHosts,
)
from examples.demo.engine import Question
from nodes import NodeProcess, at_rest, wait_until
from patience import scaled
from servers import command, flush, frozen

Fault = Callable[[], None]
CALM_SECONDS = (1.0, 2.0)
"""From the end of a fault to the next."""
AWAY_SECONDS = (0.1, 1.0)
"""How long what was killed is away."""
STOPPED_SECONDS = (1.0, 3.0)


class Storm:
    """Every fault leaves all processes running; what it broke need not be whole again."""

    def __init__(self, hosts: TwoHosts, chance: random.Random) -> None:
        self._hosts = hosts
        self._chance = chance
        self.done: Counter[str] = Counter()
        """How often each fault was done."""
        self._faults: dict[str, Fault] = {
            "node a killed": lambda: self._kill(hosts.a),
            "node b killed": lambda: self._kill(hosts.b),
            "node a stopped": lambda: self._stop(hosts.a),
            "node b stopped": lambda: self._stop(hosts.b),
            "Redis stopped": self._stop_redis,
            "Redis flushed": lambda: flush(hosts.server.url),
            "Redis killed": self._kill_redis,
            "connections to Redis cut": self._cut_clients,
            "mirrors cut off from Redis": self._cut_mirrors,
            "connections between nodes cut": hosts.relay.cut,
            "a transfer cut": lambda: hosts.relay.cut_after(SIZE.nbytes_per_image // 2),
        }
        self._due: list[str] = []

    def strike(self) -> str:
        """One fault, and the calm after it; all have their turn before one comes again."""
        if not self._due:
            self._due = list(self._faults)
            self._chance.shuffle(self._due)
        name = self._due.pop()
        self._faults[name]()
        self.done[name] += 1
        time.sleep(self._chance.uniform(*CALM_SECONDS))
        return name

    def _kill(self, node: NodeProcess) -> None:
        node.kill()
        time.sleep(self._chance.uniform(*AWAY_SECONDS))
        node.start()

    def _stop(self, node: NodeProcess) -> None:
        with node.frozen():
            time.sleep(self._chance.uniform(*STOPPED_SECONDS))

    def _stop_redis(self) -> None:
        with frozen(self._hosts.server):
            time.sleep(self._chance.uniform(*STOPPED_SECONDS))

    def _kill_redis(self) -> None:
        os.kill(self._hosts.server.pid, signal.SIGKILL)
        time.sleep(self._chance.uniform(*AWAY_SECONDS))
        self._hosts.restart_server()

    def _cut_clients(self) -> None:
        command(self._hosts.server.url, "CLIENT", "KILL", "TYPE", "normal")

    def _cut_mirrors(self) -> None:
        """Only the connections that are told of changes."""
        for client in command(self._hosts.server.url, "CLIENT", "LIST").decode().splitlines():
            fields = dict(field.split("=", 1) for field in client.split())
            if "t" in fields["flags"]:
                command(self._hosts.server.url, "CLIENT", "KILL", "ID", fields["id"])


pytestmark = [pytest.mark.vllm, pytest.mark.part(name="storms")]
PREPARE = gauged

POOL = 20
POOL_REQUESTS = 100
CROSSED_TIMES = 4
POOL_SECONDS = scaled(120.0)

BATCH_MAX = 4
"""vLLM runs so many at once in these engines: none of a batch waits for a seat."""
PAUSE_SECONDS_MAX = 0.8
"""Between two batches, for each request of the last."""
CLAIM_WAIT_SECONDS = 10.0
STORE_SECONDS = 1.0


"""The connector's own defaults for an encode as quick as theirs."""
ANSWER_SECONDS = 2.0
"""A batch whose images are encoded or loaded at once, on a busy machine."""
HELD_SECONDS_MAX = scaled(FETCH_WAIT_SECONDS + CLAIM_WAIT_SECONDS + ANSWER_SECONDS)
LEASE_SECONDS = 20.0
"""A node that was killed cannot give back what its engine claimed."""
RECOVERY_SECONDS = 8.0
"""Until both nodes know again what either holds."""


@pytest.fixture
def hosts(places: TwoHosts, engine_pair: EnginePair) -> Iterator[TwoHosts]:
    places.start()
    places.wait_until_attached()
    try:
        yield places
    finally:
        places.stop()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    number: int = request.config.getoption("--soak-seed")
    return number


def engines_of(pair: EnginePair) -> tuple[Engine, Engine]:
    return pair.a, pair.b


def at_rest_again(hosts: TwoHosts, pair: EnginePair) -> None:
    """Nothing is held for anybody: in neither engine, on neither node, nor in Redis."""
    for engine in engines_of(pair):
        engine.generate(Question((), PROMPT))  # passes in which all that was held can end
        held = Gauges.of(engine.settings).held
        assert held == dict.fromkeys(held, 0), engine.settings.name
    for node in hosts.nodes:
        at_rest(node)
    wait_until(
        lambda: command(hosts.server.url, "KEYS", "lb:claim:*") == b"*0",
        LEASE_SECONDS,
        "all claims end",
    )


def counted(pair: EnginePair) -> Counter[str]:
    """What the schedulers of both engines have counted, together."""
    counts = Counter[str]()
    for engine in engines_of(pair):
        counts.update(Gauges.of(engine.settings).counted)
    return counts


# -- a pool of images ------------------------------------------------------------------------------


def pool_questions(album: Album, pair: EnginePair, chance: random.Random) -> list[list[Question]]:
    """For each engine: in all `POOL_REQUESTS`, about `POOL` pictures, each at least once."""
    crossed = [album.about(*numbers) for numbers in CROSSED]
    apart = {number for numbers in CROSSED for number in numbers}
    pool = [album.about(number) for number in sorted(apart)]
    pool += [pair.fresh() for _ in range(POOL - len(pool))]
    crowd = [*pool, *crossed * CROSSED_TIMES]
    crowd += chance.choices(pool, k=POOL_REQUESTS - len(crowd))
    chance.shuffle(crowd)
    dealt: list[list[Question]] = [[], []]
    for question in crowd:
        # Always one order here and the other there.
        to = crossed.index(question) % 2 if question in crossed else chance.randrange(2)
        dealt[to].append(question)
    return dealt


def ask_at_once(pair: EnginePair, batches: list[list[Question]]) -> None:
    asked = [each for each in zip(engines_of(pair), batches, strict=True) if each[1]]
    for engine, batch in asked:
        engine.submit(batch)
    for engine, batch in asked:
        answers = engine.collect(timeout_seconds=POOL_SECONDS)
        for question, answer in zip(batch, answers, strict=True):
            assert answer.tokens == pair.tokens(question)


def encoded_since(album: Album, pair: EnginePair, steps: list[int]) -> Counter[int]:
    """How often either engine encoded each picture, after so many steps of each."""
    numbers = {pair.identifier(album.about(number)): number for number in range(PICTURES)}
    return Counter(
        numbers[item.identifier]
        for engine, before in zip(engines_of(pair), steps, strict=True)
        for step in engine.schedule.steps()[before:]
        for item in step.encoded
    )


def test_a_pool_of_images_is_encoded_once_each(
    hosts: TwoHosts,
    engine_pair: EnginePair,
    album: Album,
    seed: int,
    request: pytest.FixtureRequest,
) -> None:
    """Asked for by 100 requests to both engines, as many at once as keep twice the seats of either
    busy; some need two images, in either order."""
    pair = engine_pair
    for number in range(seed, seed + request.config.getoption("--pool-rounds")):
        if number > seed:
            hosts.stop()
            hosts.start()
            hosts.wait_until_attached()
        for engine in engines_of(pair):  # drives what an earlier round left out of their caches
            engine.generate(album.about(*TWICE))
        dealt = pool_questions(album, pair, random.Random(number))
        steps = [len(engine.schedule.steps()) for engine in engines_of(pair)]
        before = counted(pair)
        started = time.monotonic()
        at_once = request.config.getoption("--pool-batch")
        while any(dealt):
            batches = [questions[:at_once] for questions in dealt]
            dealt = [questions[at_once:] for questions in dealt]
            ask_at_once(pair, batches)
        seconds = time.monotonic() - started
        encoded = encoded_since(album, pair, steps)
        grown = counted(pair)
        grown.subtract(before)
        print(f"seed {number}: {encoded.total()} encodes in {seconds:.1f} s, {dict(+grown)}")
        assert len(encoded) == POOL
        assert encoded.total() == POOL, f"seed {number}: {encoded.most_common(4)}, {+grown}"
        at_rest_again(hosts, pair)


# -- faults that never end -------------------------------------------------------------------------


@dataclass
class Traffic:
    """One engine, asked batch after batch by a thread of its own; every answer is looked at."""

    engine: Engine
    pair: EnginePair
    questions: list[Question]
    chance: random.Random
    origins: Counter[str] = field(default_factory=Counter)
    longest_seconds: float = 0.0
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            left = list(self.questions)
            while left:
                batch = [
                    left.pop() for _ in range(min(len(left), self.chance.randint(1, BATCH_MAX)))
                ]
                self._ask(batch)
                time.sleep(self.chance.uniform(0.0, len(batch) * PAUSE_SECONDS_MAX))
        except BaseException as failure:
            self.failure = failure

    def _ask(self, batch: list[Question]) -> None:
        started = time.monotonic()
        self.engine.submit(batch)
        answers = self.engine.collect(timeout_seconds=2 * HELD_SECONDS_MAX)
        seconds = time.monotonic() - started
        self.longest_seconds = max(self.longest_seconds, seconds)
        for question, answer in zip(batch, answers, strict=True):
            assert answer.tokens == self.pair.tokens(question), answer
            self.origins.update(answer.origins or ("cached",))
        assert seconds < HELD_SECONDS_MAX, f"{seconds:.2f} s, {answers}"


def is_published(node: NodeProcess) -> bool:
    return not node.stats()["unpublished"]


def shares_again(hosts: TwoHosts, pair: EnginePair, unknown: tuple[Question, Question]) -> None:
    """Each engine loads what the other one encodes."""
    ends = [(pair.a, hosts.a), (pair.b, hosts.b)]
    for question, order in zip(unknown, (ends, ends[::-1]), strict=True):
        (first, first_node), (second, second_node) = order
        answer = pair.ask(first, question, within_seconds=ANSWER_SECONDS)
        assert answer.origins == ("encoded",)
        name = pair.identifier(question)
        hosts.wait_for_holder(name, first_node)
        wait_until(partial(hosts.sees, second_node, name), RECOVERY_SECONDS)
        answer = pair.ask(second, question, within_seconds=ANSWER_SECONDS)
        assert answer.origins == ("loaded",)


def test_requests_under_faults_that_never_end(
    hosts: TwoHosts,
    engine_pair: EnginePair,
    album: Album,
    seed: int,
    request: pytest.FixtureRequest,
) -> None:
    pair, chance = engine_pair, random.Random(seed)
    unknown = (pair.fresh(), pair.fresh())
    pool = [pair.fresh() for _ in range(TELLING_MIN - len(unknown))]
    pool += [album.about(*numbers) for numbers in CROSSED]
    count = request.config.getoption("--storm-requests") // 2
    before, started = counted(pair), time.monotonic()
    storm = Storm(hosts, chance)
    traffic = [
        Traffic(engine, pair, chance.choices(pool, k=count), random.Random(chance.random()))
        for engine in engines_of(pair)
    ]
    while any(each.thread.is_alive() for each in traffic):
        storm.strike()
    seconds = time.monotonic() - started
    hosts.relay.let_go()
    origins = sum((each.origins for each in traffic), Counter[str]())
    grown = counted(pair)
    grown.subtract(before)
    longest = max(each.longest_seconds for each in traffic)
    print(f"seed {seed}: {2 * count} requests in {seconds:.0f} s, the longest {longest:.2f} s")
    print(f"{dict(origins)}\n{dict(storm.done)}\n{dict(+grown)}")
    for each in traffic:
        if each.failure is not None:
            raise each.failure
    assert min(origins["encoded"], origins["loaded"]) > 0
    for node in hosts.nodes:
        wait_until(partial(is_published, node), RECOVERY_SECONDS)
    shares_again(hosts, pair, unknown)
    at_rest_again(hosts, pair)
