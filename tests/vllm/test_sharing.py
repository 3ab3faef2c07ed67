"""Two real vLLM engines on two nodes share what one of them encoded, and nothing else.

Engine a has its scheduler and its worker in two processes, engine b both in one; what holds from a
to b is asked from b to a as well. Each engine's own encoder cache has room for one image.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from command_line import run_json
from engines import (
    NONE_KNOWN,
    ONE_KNOWN,
    RETRAINED,
    SIZE,
    START_SECONDS,
    TWICE,
    Album,
    Engine,
    EnginePair,
    TwoHosts,
    connector,
    engine_settings,
    weights,
)
from examples.demo.engine import Answer, Question
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess, at_rest, wait_until
from servers import frozen

pytestmark = pytest.mark.vllm
ANSWER_SECONDS = 5.0
BOTH_WAYS = pytest.mark.parametrize("way", ["a to b", "b to a"])
STORE_SECONDS = 1.0


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
def retrained(
    hosts: TwoHosts, album: Album, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Answer:
    """From an engine on node a whose model has the same path, but other weights in it.

    It has ended when this returns: the machine need not carry three engines at once.
    """
    settings = engine_settings(
        "retrained",
        model,
        tmp_path_factory.mktemp("retrained"),
        ec_transfer_config=connector(hosts.a),
    )
    usual = model.readlink()
    model.unlink()
    model.symlink_to(weights(seed=1))
    try:
        with Engine(settings) as engine:
            engine.wait_ready(timeout_seconds=START_SECONDS)
            answer = engine.generate(album.about(RETRAINED))
            hosts.wait_for_holder(answer.identifiers[0], hosts.a)
    finally:
        model.unlink()
        model.symlink_to(usual)
    return answer


@pytest.fixture(scope="module")
def pair(hosts: TwoHosts, retrained: Answer, engine_pair: EnginePair) -> EnginePair:
    return engine_pair


@pytest.fixture(autouse=True)
def _at_rest(hosts: TwoHosts) -> Iterator[None]:
    yield
    for node in hosts.nodes:
        at_rest(node)


class Way:
    """One direction: who encodes, and who is to load."""

    def __init__(self, way: str, hosts: TwoHosts, pair: EnginePair) -> None:
        self.hosts = hosts
        self.pair = pair
        ends = ((pair.a, hosts.a), (pair.b, hosts.b))
        (self.first, self.first_node), (self.second, self.second_node) = (
            ends if way == "a to b" else reversed(ends)
        )

    def ask_first(self, question: Question) -> Answer:
        """Has the first engine encode it, and waits until the second can know."""
        answer = self.pair.ask(self.first, question, within_seconds=ANSWER_SECONDS)
        for identifier in answer.identifiers:
            self.hosts.wait_for_holder(identifier, self.first_node)
        return answer

    def ask_second(self, question: Question) -> Answer:
        return self.pair.ask(self.second, question, within_seconds=ANSWER_SECONDS)


@pytest.fixture
def direction(way: str, hosts: TwoHosts, pair: EnginePair) -> Way:
    return Way(way, hosts, pair)


def namespaces_of(hosts: TwoHosts, identifier: str) -> list[Namespace]:
    """Where the image is known, as anybody can read it in Redis."""
    parts = hosts.store.namespaces()
    fingerprints = {r.namespace for r in hosts.store.scan() if r.key == identifier}
    found = [Namespace(parts[fingerprint]) for fingerprint in fingerprints]
    assert {namespace.fingerprint for namespace in found} == fingerprints
    return found


def held(node: NodeProcess, namespace: Namespace, identifier: str) -> torch.Tensor:
    """A copy of what lies in this node's own arena."""
    with LookupBuffer(node.config, namespace) as client:
        tensor = client.select(TensorKey(identifier))
        assert tensor is not None
        return tensor


@BOTH_WAYS
def test_an_image_that_one_engine_encoded_is_loaded_by_the_other(direction: Way) -> None:
    question = direction.pair.fresh()
    before = direction.first.encoder_runs, direction.second.encoder_runs
    assert direction.ask_first(question).origins == ("encoded",)
    assert direction.ask_second(question).origins == ("loaded",)
    runs = direction.first.encoder_runs, direction.second.encoder_runs
    assert runs == (before[0] + 1, before[1])


@BOTH_WAYS
def test_an_image_driven_out_of_the_engines_own_cache_is_loaded(direction: Way) -> None:
    image, other = direction.pair.fresh(), direction.pair.fresh()
    assert direction.ask_first(image).origins == ("encoded",)
    assert direction.ask_first(other).origins == ("encoded",)
    again = direction.pair.ask(direction.first, image, within_seconds=ANSWER_SECONDS)
    assert again.origins == ("loaded",)


def test_both_nodes_hold_the_bytes_that_each_engine_would_make(
    hosts: TwoHosts, pair: EnginePair
) -> None:
    shared, unshared = pair.fresh(), pair.fresh()
    way = Way("a to b", hosts, pair)
    way.ask_first(shared)
    way.ask_second(shared)
    with frozen(hosts.server):  # neither can learn of the other's: each encodes for itself
        for engine in (pair.a, pair.b):
            answer = pair.ask(engine, unshared, within_seconds=ANSWER_SECONDS)
            assert answer.origins == ("encoded",)
    names = [pair.identifier(question) for question in (shared, unshared)]
    for name in names:
        for node in hosts.nodes:
            hosts.wait_for_holder(name, node)
    (namespace,) = namespaces_of(hosts, names[0])
    tensors = [[held(node, namespace, name) for node in hosts.nodes] for name in names]
    for on_a, on_b in tensors:
        assert on_a.shape == (SIZE.embeddings_per_image, SIZE.text.hidden)
        assert torch.equal(on_a.view(torch.int32), on_b.view(torch.int32))
    assert not torch.equal(tensors[0][0], tensors[1][0])
    records = {record.key: record for record in hosts.store.scan()}
    for name in names:
        assert len({location.checksum for location in records[name].locations}) == 1


@BOTH_WAYS
def test_other_bytes_under_the_key_change_the_tokens(direction: Way) -> None:
    """The control for all equal tokens: what is loaded is what the model sees."""
    known, victim = direction.pair.fresh(), direction.pair.fresh()
    direction.ask_first(known)
    name = direction.pair.identifier(known)
    (namespace,) = namespaces_of(direction.hosts, name)
    wrong = held(direction.first_node, namespace, name)
    victim_name = direction.pair.identifier(victim)
    with LookupBuffer(direction.first_node.config, namespace) as client:
        client.insert(TensorKey(victim_name), wrong)
    direction.hosts.wait_for_holder(victim_name, direction.first_node)
    answer = direction.second.generate(victim)
    assert answer.origins == ("loaded",)
    assert answer.tokens == direction.pair.tokens(known)
    assert answer.tokens != direction.pair.tokens(victim)


@BOTH_WAYS
def test_several_images_in_one_request(direction: Way, album: Album) -> None:
    """The first engine has encoded none of them before, or one."""
    numbers = NONE_KNOWN if direction.first is direction.pair.a else ONE_KNOWN
    runs = direction.first.encoder_runs, direction.second.encoder_runs
    if numbers is ONE_KNOWN:
        assert direction.ask_first(album.about(numbers[1])).origins == ("encoded",)
    direction.ask_first(album.about(*numbers))
    assert direction.ask_second(album.about(*numbers)).origins == ("loaded",) * 3
    assert (direction.first.encoder_runs, direction.second.encoder_runs) == (runs[0] + 3, runs[1])


def test_the_same_image_twice_in_one_request(
    hosts: TwoHosts, pair: EnginePair, album: Album
) -> None:
    way = Way("a to b", hosts, pair)
    runs = pair.a.encoder_runs, pair.b.encoder_runs
    way.ask_first(album.about(*TWICE))
    way.ask_second(album.about(*TWICE))
    assert pair.a.encoder_runs == runs[0] + 1
    assert pair.b.encoder_runs == runs[1]


def test_many_requests_at_once(hosts: TwoHosts, pair: EnginePair) -> None:
    """Four images, asked for twice each, of both engines at the same time."""
    questions = [pair.fresh() for _ in range(4)]
    order_a, order_b = [*questions, *reversed(questions)], [*reversed(questions), *questions]
    pair.a.submit(order_a)
    pair.b.submit(order_b)
    for engine, order in ((pair.a, order_a), (pair.b, order_b)):
        for question, answer in zip(order, engine.collect(), strict=True):
            assert answer.tokens == pair.tokens(question)
    for question in questions:
        assert hosts.holders(pair.identifier(question))


def test_a_new_image_asked_for_eight_times_at_once_is_encoded_once(pair: EnginePair) -> None:
    """Of both engines at the same time: one encodes, the other waits for it."""
    for _ in range(5):
        question = pair.fresh()
        runs = pair.a.encoder_runs + pair.b.encoder_runs
        for engine in (pair.a, pair.b):
            engine.submit([question] * 4)
        for engine in (pair.a, pair.b):
            for answer in engine.collect():
                assert answer.tokens == pair.tokens(question)
        assert pair.a.encoder_runs + pair.b.encoder_runs == runs + 1


def test_engines_with_other_weights_share_nothing(
    hosts: TwoHosts, pair: EnginePair, album: Album, retrained: Answer
) -> None:
    question = album.about(RETRAINED)
    assert retrained.identifiers == (pair.identifier(question),)  # vLLM itself sees no difference
    assert retrained.tokens != pair.tokens(question)
    found = run_json("why", *retrained.identifiers, "--store-url", hosts.a.settings.store_url)
    stored, *others = found["findings"]
    assert (stored["code"], stored["node"]) == ("stored", hosts.a.node_id)
    (apart,) = [one for one in others if list(one["differs"]) == ["weights"]]
    assert (apart["code"], apart["other_namespace"]) == ("other_namespace", stored["namespace"])
    answer = pair.ask(pair.a, question, within_seconds=ANSWER_SECONDS)
    assert answer.origins == ("encoded",)
    wait_until(lambda: len(namespaces_of(hosts, *answer.identifiers)) == 2, ANSWER_SECONDS)
    one, other = (dict(n.parts) for n in namespaces_of(hosts, *answer.identifiers))
    assert [name for name in one if one[name] != other[name]] == ["weights"]


@BOTH_WAYS
def test_vllms_own_statistics_tell_what_was_saved_and_loaded(direction: Way) -> None:
    """The workers' counts too, which vLLM does not ask for by itself."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    metrics = Path(vllm.origin).parent / "distributed/ec_transfer/ec_connector/metrics.py"
    if not metrics.exists():
        pytest.skip("vLLM before 0.31 has no statistics of EC connectors")
    question = direction.pair.fresh()
    direction.ask_first(question)
    direction.ask_second(question)
    for engine, count in ((direction.first, "saved="), (direction.second, "load_remote=")):
        lines = engine.settings.log_path.read_text().splitlines()
        assert any("EC Transfer metrics" in line and count in line for line in lines)
