"""Two of vLLM's OpenAI servers with Model Runner V2 share encoder outputs, over HTTP.

Its kernels run in Triton's interpreter (`support/triton_cpu`), so steps take several times as long
as with the V1 runner. V2 calls the connector at other points of a step: it saves after the step,
and collects the statistics of the workers. The tokens are those of an engine without a connector.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from engines import (
    NONE_KNOWN,
    START_SECONDS,
    TWICE,
    Album,
    Reference,
    TwoHosts,
    connector,
    engine_settings,
)
from examples.demo.engine import Question
from nodes import ROOT, at_rest
from openai_servers import OpenAIServer
from patience import scaled

pytestmark = pytest.mark.vllm
V2 = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": str(ROOT / "tests/support/triton_cpu"),
}
ANSWER_SECONDS = scaled(30.0)


class Pair:
    """The servers, and what they have to answer."""

    def __init__(
        self, a: OpenAIServer, b: OpenAIServer, hosts: TwoHosts, album: Album, reference: Reference
    ) -> None:
        self.a, self.b = a, b
        self.hosts, self.album = hosts, album
        self._reference = reference
        self._fresh = iter(reference.telling)

    def fresh(self) -> Question:
        return self.album.about(next(self._fresh))

    def ask(self, server: OpenAIServer, question: Question) -> tuple[str, ...]:
        """Where the images came from, after a comparison of the tokens; stored when it returns."""
        reply = server.ask_about(question)
        assert reply.tokens == self._reference.tokens(question), reply
        assert reply.seconds < ANSWER_SECONDS
        node = self.hosts.a if server is self.a else self.hosts.b
        for origin, item in server.schedule.images(reply.request):
            if origin == "encoded":
                self.hosts.wait_for_holder(item.identifier, node)
        return server.origins(reply)

    def encodes(self) -> int:
        return self.a.schedule.encoder_runs() + self.b.schedule.encoder_runs()


@pytest.fixture(scope="module")
def pair(
    places: TwoHosts,
    album: Album,
    model: Path,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    places.start()
    work = tmp_path_factory.mktemp("v2")
    settings = [
        engine_settings(node.node_id, model, work, core=core, ec_transfer_config=connector(node))
        for core, node in enumerate(places.nodes)
    ]
    a, b = (replace(each, environment={**each.environment, **V2}) for each in settings)
    with OpenAIServer(a) as server_a, OpenAIServer(b) as server_b:
        for server in (server_a, server_b):
            server.wait_ready(START_SECONDS)
        yield Pair(server_a, server_b, places, album, reference)
        for server in (server_a, server_b):
            assert server.is_healthy(), server.log_tail()
            assert "EngineDead" not in server.log_text(), server.log_tail()
            assert "Using V2 Model Runner" in server.log_text()
    places.stop()


@pytest.fixture(autouse=True)
def _at_rest(pair: Pair) -> Iterator[None]:
    yield
    for node in pair.hosts.nodes:
        at_rest(node, seconds=ANSWER_SECONDS)


def test_an_image_of_either_is_loaded_by_the_other(pair: Pair) -> None:
    for first, second in ((pair.a, pair.b), (pair.b, pair.a)):
        question = pair.fresh()
        assert pair.ask(first, question) == ("encoded",)
        assert pair.ask(second, question) == ("loaded",)


def test_an_image_that_left_vllms_own_cache_is_loaded(pair: Pair) -> None:
    question, other = pair.fresh(), pair.fresh()
    assert [pair.ask(pair.a, each) for each in (question, other, question)] == [
        ("encoded",), ("encoded",), ("loaded",),
    ]  # fmt: skip


def test_several_and_repeated_images_and_text_alone(pair: Pair) -> None:
    assert pair.ask(pair.a, pair.album.about(*NONE_KNOWN)) == ("encoded",) * 3
    assert pair.ask(pair.b, pair.album.about(*NONE_KNOWN)) == ("loaded",) * 3
    pair.ask(pair.b, pair.album.about(*TWICE))
    assert set(pair.ask(pair.a, pair.album.about(*TWICE))) == {"loaded"}
    assert pair.ask(pair.a, pair.album.about()) == ()


def test_an_image_asked_of_both_at_once_is_encoded_once(pair: Pair) -> None:
    question = pair.fresh()
    before = pair.encodes()
    with ThreadPoolExecutor(max_workers=4) as clients:
        list(clients.map(pair.ask, (pair.a, pair.b) * 2, (question,) * 4))
    assert pair.encodes() == before + 1
