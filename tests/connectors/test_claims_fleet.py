"""Two engines' schedulers on real nodes and a real server: one encode per fleet, and no fault more
than one encode more. No vLLM: `Engine` does what it does with the connector's scheduler side.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from connector_standins import EMBED_BYTES, EMBEDS, Request, make_request, step_output
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.settings import ConnectorSettings
from lookup_buffer.access import TIMEOUT_SECONDS
from lookup_buffer.client.buffer import EngineRank
from lookup_buffer.key import TensorKey
from lookup_buffer.runtime import to_json
from nodes import ClientProcess, NodeProcess, StartNode, key, wait_until
from patience import scaled
from servers import StartServer, frozen

ENCODE_SECONDS = 0.3
BOUND_SECONDS = 240.0
"""How long a request waits for others: nothing that ends sooner had to wait for that."""
WAKE_SECONDS = scaled(1.0)
Pair = tuple[NodeProcess, NodeProcess]
MakeEngine = Callable[..., "Engine"]


class Engine:
    """Polls its requests as vLLM does, encodes one step at a time, and saves from it.

    An encode takes `encode_seconds`, in which there are no passes.
    """

    def __init__(self, node: NodeProcess, name: str, produces: bool = True, **raw: Any) -> None:
        raw = {"claim_wait_seconds": BOUND_SECONDS, "capacity_bytes": "64MiB", **raw}
        seats = [EngineRank(name, rank, 1) for rank in (None, 0)]
        self.worker = node.client(engine=seats[1])
        self.scheduler = EcScheduler(
            node.client(engine=seats[0]),
            ConnectorSettings(**raw),
            EngineShape(produces, True, 1, EMBED_BYTES),
            metadata_fields=lambda _: set(),
        )
        self.encode_seconds = ENCODE_SECONDS
        self.requests: list[Request] = []
        self.encoded: list[str] = []
        self.loaded: list[str] = []
        self.finished_at: dict[str, float] = {}
        self._step_ends = 0.0
        self._saves: dict[str, str] = {}
        self._cache: set[str] = set()
        """vLLM's own encoder cache: what the last pass made room for."""

    def add(self, *items: TensorKey) -> Request:
        request = make_request(f"r{len(self.finished_at) + len(self.requests)}", *[
            item.mm_hash for item in items
        ])  # fmt: skip
        self.requests.append(request)
        return request

    def abort(self, request: Request) -> None:
        self.requests.remove(request)
        self.scheduler.gate.forget(request.request_id)

    def poll(self) -> None:
        """One pass of its loop."""
        if time.monotonic() < self._step_ends:
            return
        for text in self._saves:
            self.worker.insert(TensorKey.parse(text), torch.ones(EMBEDS, EMBED_BYTES // 4))
        finished: set[str] = set()
        encodes: list[str] = []
        allocated: set[str] = set()
        for request in list(self.requests):
            if not self.scheduler.gate.ensure_cache_available(request, 0):
                continue
            for index, feature in enumerate(request.mm_features):
                if feature.identifier in self._cache | allocated:
                    continue
                allocated.add(feature.identifier)
                hit = self.scheduler.has_cache_item(feature.identifier)
                self.scheduler.item_allocated(request, index, is_hit=hit)
                (self.loaded if hit else encodes).append(feature.identifier)
            self.requests.remove(request)
            finished.add(request.request_id)
            self.finished_at[request.request_id] = time.monotonic()
        output = step_output(len(finished), freed=sorted(self._cache), finished=finished)
        metadata = self.scheduler.build_metadata(output)
        self._cache = allocated
        self._saves = metadata.saves
        self.encoded += encodes
        self._step_ends = time.monotonic() + self.encode_seconds * bool(encodes)

    def counted(self, name: str) -> int:
        return self.scheduler.counters.totals().get(name, 0)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def run(*engines: Engine, until: Callable[[], object] | None = None, seconds: float = 30.0) -> None:
    """Run the engines until all their requests were scheduled."""
    deadline = time.monotonic() + scaled(seconds)
    until = until or (lambda: not any(engine.requests for engine in engines))
    while not until():
        assert time.monotonic() < deadline, "a request is stuck"
        for engine in engines:
            engine.poll()
        time.sleep(0.001)


@pytest.fixture(scope="module")
def node_pair(node_pair: Pair) -> Pair:
    for node in node_pair:
        wait_until(lambda node=node: node.stats()["store_up"], 15.0)  # type: ignore[misc]
    return node_pair


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    with ExitStack() as stack:

        def make(node: NodeProcess, **raw: Any) -> Engine:
            engine = Engine(node, key("engine").text, **raw)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def engines(node_pair: Pair, make_engine: MakeEngine) -> tuple[Engine, Engine]:
    return make_engine(node_pair[0]), make_engine(node_pair[1])


def test_eight_requests_with_one_new_image_over_two_engines_are_one_encode(
    engines: tuple[Engine, Engine],
) -> None:
    for _ in range(5):
        image = key()
        before = [len(engine.encoded) for engine in engines]
        for number in range(8):
            engines[number % 2].add(image)
        run(*engines)
        now = [len(engine.encoded) for engine in engines]
        assert sum(now) - sum(before) == 1
    assert sum(engine.counted("claim:published") for engine in engines) >= 5
    assert sum(engine.counted("encode:despite_holder") for engine in engines) == 0


def test_two_engines_of_one_node_share_an_encode_too(
    node_pair: Pair, make_engine: MakeEngine
) -> None:
    engines, image = [make_engine(node_pair[0]) for _ in range(2)], key()
    for number in range(4):
        engines[number % 2].add(image)
    run(*engines)
    assert sum(len(engine.encoded) for engine in engines) == 1


def test_consumers_that_encode_for_themselves_do_not_wait_for_each_other(
    node_pair: Pair, make_engine: MakeEngine
) -> None:
    """None of them stores what it encodes, and a step takes long."""
    consumers = [make_engine(node_pair[number % 2], produces=False) for number in range(6)]
    for consumer in consumers:
        consumer.encode_seconds = 3.0
    least = math.inf
    for _ in range(3):
        image, before = key(), [len(consumer.encoded) for consumer in consumers]
        started = time.monotonic()
        for consumer in consumers:
            consumer.add(image)
        run(*consumers)
        least = min(least, max(max(c.finished_at.values()) for c in consumers) - started)
        assert [len(consumer.encoded) for consumer in consumers] == [n + 1 for n in before]
        run(*consumers, until=lambda: all(c._step_ends < time.monotonic() for c in consumers))
    assert least < 3.0, "behind each other, the last waits for five steps"


def test_a_consumer_that_is_asked_while_a_producer_encodes_loads(
    node_pair: Pair, make_engine: MakeEngine
) -> None:
    producer, consumer = make_engine(node_pair[0]), make_engine(node_pair[1], produces=False)
    for _ in range(5):
        image = key()
        producer.add(image)
        run(producer, until=partial(producer.encoded.__contains__, image.mm_hash))
        consumer.add(image)
        run(producer, consumer)
        assert consumer.loaded[-1] == image.mm_hash
    assert consumer.encoded == []


def test_requests_with_items_in_crossed_order_do_not_deadlock(
    engines: tuple[Engine, Engine],
) -> None:
    for _ in range(5):
        images = [key() for _ in range(4)]
        engines[0].add(images[0], images[1])
        engines[1].add(images[1], images[0])
        engines[0].add(images[2], images[0], images[3])
        engines[1].add(images[3], images[1], images[2])
        run(*engines)
    encoded = engines[0].encoded + engines[1].encoded
    assert len(encoded) == len(set(encoded)) == 20
    assert sum(engine.counted("encode:despite_holder") for engine in engines) == 0


def test_an_aborted_request_lets_the_others_go_on_at_once(engines: tuple[Engine, Engine]) -> None:
    """Granted and then aborted, before vLLM had room for it."""
    holder, other = engines
    gate = holder.scheduler.gate

    def seconds_until_the_other_encodes() -> float:
        image = key()
        request = make_request(f"aborted {image.mm_hash}", image.mm_hash)
        wait_until(lambda: gate.ensure_cache_available(request, 0), 2.0)
        waited = other.counted("claim:waited")
        other.add(image)
        run(other, until=lambda: other.counted("claim:waited") > waited or not other.requests)
        if not other.requests:
            return math.inf  # the machine stood still for as long as an intent lasts
        gate.forget(request.request_id)
        aborted_at = time.monotonic()
        run(other)
        assert other.encoded[-1] == image.mm_hash
        return time.monotonic() - aborted_at

    least = min(seconds_until_the_other_encodes() for _ in range(5))
    assert least < 0.5, "it waits for the intent to lapse"


def test_waiters_continue_after_an_encode_that_is_not_stored(
    engines: tuple[Engine, Engine],
) -> None:
    holder, other = engines
    image = key()
    holder.add(image)
    run(holder)
    holder._saves = {}
    other.add(image)
    run(other, until=lambda: other.counted("claim:waited"))
    holder.worker.unclaim([image])  # as the worker does with what its queue does not take
    dropped_at = time.monotonic()
    run(other)
    assert time.monotonic() - dropped_at < WAKE_SECONDS
    assert other.encoded == [image.mm_hash]


HOLDER = """
from types import SimpleNamespace
from test_claims_fleet import Engine, run
config, tests = BufferConfig.of(json.loads(receive())), Namespace.named("tests")
node = SimpleNamespace(client=lambda **seat: LookupBuffer(config, tests, **seat))
engine = Engine(node, "holder", claim_lease_seconds=receive())
engine.encode_seconds = 3600.0
engine.add(TensorKey(receive()))
run(engine)
send(engine.encoded)
while True:
    engine.poll()
    time.sleep(0.001)
"""


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_holder_that_is_lost_in_the_middle_of_its_encode_is_replaced(
    node_pair: Pair, make_engine: MakeEngine, how: str
) -> None:
    image, other = key(), make_engine(node_pair[1])
    with ClientProcess(node_pair[0].config, HOLDER) as holder:
        holder.send(to_json(node_pair[0].config))
        holder.send(300.0 if how == "killed" else 3.0)
        holder.send(image.mm_hash)
        assert holder.receive() == [image.mm_hash]
        taken_at = time.monotonic()
        other.add(image)
        run(other, until=lambda: other.counted("claim:waited"))
        if how == "killed":
            holder.kill()
            lost_at = time.monotonic()
            run(other)
            assert time.monotonic() - lost_at < WAKE_SECONDS
        else:
            os.kill(holder.pid, signal.SIGSTOP)
            run(other)
            assert time.monotonic() - taken_at > 1.0
            os.kill(holder.pid, signal.SIGCONT)
    assert other.encoded == [image.mm_hash]
    assert other.counted("claim:granted") == 1


def test_the_wait_for_a_holder_that_is_too_slow_has_a_bound(
    node_pair: Pair, make_engine: MakeEngine
) -> None:
    holder = make_engine(node_pair[0])
    other = make_engine(node_pair[1], claim_wait_seconds=1.0)
    image = key()
    holder.encode_seconds = 3.0
    holder.add(image)
    run(holder)
    started = time.monotonic()
    other.add(image)
    run(other)
    assert time.monotonic() - started > 0.9
    assert other.encoded == [image.mm_hash], "it did not wait until the holder had encoded"
    assert other.counted("encode:despite_holder") == 1
    run(holder, other, until=lambda: not (holder._saves or other._saves))
    later = make_engine(node_pair[1])
    later.add(image)
    run(later)
    assert later.loaded == [image.mm_hash]


def test_a_preempted_request_keeps_the_rest_of_its_wait_budget(
    node_pair: Pair, make_engine: MakeEngine
) -> None:
    def waiting_request() -> Any:
        """One that has waited for 7 s of its 8, and its gate. None where the store, on a busy
        machine, did not decide the claim within `CLAIM_ANSWER_SECONDS`: then the node grants it."""
        holder = make_engine(node_pair[0])
        other = make_engine(node_pair[1], claim_wait_seconds=8.0)
        holder.encode_seconds = 3600.0
        image = key()
        holder.add(image)
        run(holder)
        request = other.add(image)
        until = time.monotonic() + 7.0
        while time.monotonic() < until:
            if other.scheduler.gate.ensure_cache_available(request, 0):
                return None
            time.sleep(0.01)
        return request, other.scheduler.gate

    waiting = waiting_request() or waiting_request() or waiting_request()
    assert waiting is not None, "it does not wait for the engine that encodes"
    request, gate = waiting
    until = time.monotonic()
    request.num_preemptions += 1
    wait_until(lambda: gate.ensure_cache_available(request, 0), 2.0)
    assert time.monotonic() < until + 7.5, "it waits for its whole time again"


def test_a_frozen_server_costs_an_encode_and_a_frozen_node_a_bounded_wait(
    start_server: StartServer, start_node: StartNode, make_engine: MakeEngine
) -> None:
    server = start_server()
    hasty = {"store_url": server.url, "store_timeout_seconds": TIMEOUT_SECONDS}
    nodes = [start_node(**hasty) for _ in range(2)]
    for node in nodes:
        wait_until(lambda node=node: node.stats()["store_up"], 15.0)  # type: ignore[misc]
    engines = [make_engine(node, fetch_wait_seconds=1.0) for node in nodes]
    image = key()
    with frozen(server):
        for engine in engines:
            engine.add(image)
        started = time.monotonic()
        run(*engines)
        assert time.monotonic() - started < scaled(3.0)
    assert [engine.encoded for engine in engines] == [[image.mm_hash]] * 2
    run(*engines, until=lambda: not any(engine._saves for engine in engines))
    image = key()
    with nodes[1].frozen():
        engines[1].add(image)
        started = time.monotonic()
        run(engines[1])
        assert time.monotonic() - started < scaled(2.0)
        assert engines[1].encoded[-1] == image.mm_hash
        engines[1]._saves = {}
