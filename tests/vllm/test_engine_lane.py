"""Two real vLLM engines whose workers take encoder outputs from each other's pools, over Gloo; on a
GPU over NCCL, which takes processes with ids of hosts of their own for two hosts' and so lets them
share it.

The tokens are held against an engine without any connector. The tests run in their order: the last
one ends an engine.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from engines import ON_GPU, Engine, EnginePair, TwoHosts
from examples.demo.engine_settings import EngineSettings
from nodes import NodeProcess, at_rest, wait_until

pytestmark = pytest.mark.vllm
ANSWER_SECONDS = 20.0
"""A stopped peer may cost the lane's deadline; a busy machine its own."""
NAME = "nccl" if ON_GPU else "gloo"
LANE = {"device_lane": NAME, "device_pool_bytes": "32MiB", "fetch_wait_seconds": 15.0}


def PREPARE(settings: EngineSettings) -> EngineSettings:
    config = dict(settings.ec_transfer_config or {})
    config["ec_connector_extra_config"] = {**config["ec_connector_extra_config"], **LANE}
    environment = settings.environment | {"NCCL_HOSTID": settings.name}
    return replace(settings, ec_transfer_config=config, environment=environment)


@pytest.fixture(scope="module")
def hosts(places: TwoHosts) -> Iterator[TwoHosts]:
    places.start()
    try:
        yield places
        for node in places.nodes:
            at_rest(node)
    finally:
        places.stop()


@pytest.fixture(scope="module")
def pair(hosts: TwoHosts, engine_pair: EnginePair) -> EnginePair:
    hosts.wait_until_attached()
    return engine_pair


def counted(node: NodeProcess, prefix: str) -> int:
    return sum(count for name, count in node.stats().items() if name.startswith(prefix))


def offered(hosts: TwoHosts, identifier: str) -> bool:
    return any(record.devices for record in hosts.store.scan() if record.key == identifier)


def shared(hosts: TwoHosts, pair: EnginePair, first: Engine, second: Engine) -> None:
    """A fresh image is encoded by the one engine and loaded by the other."""
    question = pair.fresh()
    assert pair.ask(first, question, within_seconds=ANSWER_SECONDS).origins == ("encoded",)
    wait_until(lambda: offered(hosts, pair.identifier(question)), 10.0, "it is offered on a device")
    assert pair.ask(second, question, within_seconds=ANSWER_SECONDS).origins == ("loaded",)


@contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    os.killpg(engine.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(engine.pid, signal.SIGCONT)


@pytest.mark.parametrize("way", ["a to b", "b to a"])
def test_outputs_go_from_worker_to_worker(hosts: TwoHosts, pair: EnginePair, way: str) -> None:
    ends = [(pair.a, hosts.a), (pair.b, hosts.b)]
    (first, _), (second, node) = ends if way == "a to b" else ends[::-1]
    came = 0
    for _ in range(
        8
    ):  # over the hosts until they have seen each other, and where a core stands still
        shared(hosts, pair, first, second)
        came = counted(node, f"lane_received_{NAME}")
        assert counted(node, "hits_lane") == came
        if came == 2:
            break
    else:
        pytest.fail(f"{came} of 8 came by the lane: {node.stats()}")
    wait_until(lambda: "load_lane=" in second.settings.log_path.read_text(), 10.0)


def test_a_worker_that_is_stopped_costs_a_deadline_and_no_encode(
    hosts: TwoHosts, pair: EnginePair
) -> None:
    for _ in range(5):  # until the reader's node knows in time that the image is offered
        question = pair.fresh()
        pair.ask(pair.a, question, within_seconds=ANSWER_SECONDS)
        wait_until(partial(offered, hosts, pair.identifier(question)), 10.0)
        with stopped(pair.a):
            answer = pair.ask(pair.b, question, within_seconds=ANSWER_SECONDS)
        assert answer.origins == ("loaded",)
        if counted(hosts.b, "lane_fallbacks_timeout"):
            break
    else:
        pytest.fail(f"no transfer from the stopped worker was begun: {hosts.b.stats()}")
    assert "was not used, and the bytes came over the hosts" in pair.b.settings.log_path.read_text()
    shared(hosts, pair, pair.a, pair.b)  # by whichever way


def test_a_worker_that_is_killed_costs_no_encode_and_no_engine(
    hosts: TwoHosts, pair: EnginePair
) -> None:
    questions = [pair.fresh(), pair.fresh()]
    for question in questions:
        pair.ask(pair.a, question, within_seconds=ANSWER_SECONDS)
        hosts.wait_for_holder(pair.identifier(question), hosts.a)
    os.killpg(pair.a.pid, signal.SIGKILL)
    for question in questions:
        answer = pair.ask(pair.b, question, within_seconds=ANSWER_SECONDS)
        assert answer.origins == ("loaded",)
    gone = [pair.identifier(question) for question in questions]
    wait_until(lambda: not any(offered(hosts, each) for each in gone), 20.0)
    fresh = pair.fresh()
    assert pair.ask(pair.b, fresh, within_seconds=ANSWER_SECONDS).origins == ("encoded",)
