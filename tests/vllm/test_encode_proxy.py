"""Encoder and consumers behind a proxy, as vLLM's examples arrange them, over HTTP.

The encoder instance (`ec_producer`) is on one host. On the other are two consumers
(`ec_consumer`): one with a single worker, and one with two tensor parallel workers. The proxy sends
each image to the encoder instance, and then the request to a consumer, by turns. All answers are
compared with those of an engine without a connector.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engines import (
    CROSSED,
    NONE_KNOWN,
    START_SECONDS,
    TWICE,
    Album,
    Reference,
    TwoHosts,
    connector,
    engine_settings,
)
from epd_proxy import Proxy
from examples.demo.engine import Question
from nodes import at_rest, wait_until
from openai_servers import COMPLETIONS, OpenAIServer, Reply, chat_of, parts_of, post
from patience import scaled
from servers import flush

pytestmark = pytest.mark.vllm
ANSWER_SECONDS = scaled(20.0)
FETCH_SECONDS = 10.0


class Fleet:
    """The instances, and the proxy before them."""

    def __init__(
        self,
        encoder: OpenAIServer,
        consumers: tuple[OpenAIServer, OpenAIServer],
        *,
        hosts: TwoHosts,
        album: Album,
        reference: Reference,
    ) -> None:
        self.encoder, self.consumers = encoder, consumers
        self.hosts, self.album = hosts, album
        self._reference = reference
        self._fresh = iter(reference.telling)
        self.port = 0

    def fresh(self) -> Question:
        """About a picture that no instance was asked about."""
        return self.album.about(next(self._fresh))

    def ask(self, question: Question) -> tuple[str, ...]:
        """Where the consumer got the images from, after a comparison of the tokens."""
        return self.origins(self.checked(self.post(question), question))

    def post(self, question: Question) -> Reply:
        return post(self.port, COMPLETIONS, chat_of(parts_of(question), question.tokens))

    def checked(self, reply: Reply, question: Question) -> Reply:
        assert reply.tokens == self._reference.tokens(question), reply
        return reply

    def origins(self, reply: Reply) -> tuple[str, ...]:
        return tuple(origin for server in self.consumers for origin in server.origins(reply))

    def encodes(self) -> tuple[int, int]:
        """Images that were encoded so far: by the encoder instance, by the consumers."""
        return (
            self.encoder.schedule.encoder_runs(),
            sum(server.schedule.encoder_runs() for server in self.consumers),
        )


@pytest.fixture(scope="module")
def fleet(
    places: TwoHosts,
    album: Album,
    model: Path,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    places.start()
    work = tmp_path_factory.mktemp("proxy")

    def settings(name: str, role: str, on_a: bool) -> OpenAIServer:
        transfer = connector(places.a if on_a else places.b, fetch_wait_seconds=FETCH_SECONDS)
        usual = engine_settings(
            name, model, work, core=not on_a, ec_transfer_config=transfer | {"ec_role": role}
        )
        if name != "two-workers":
            return OpenAIServer(usual)
        (core,) = usual.cores  # of both workers, which wait for each other
        bound = usual.environment | {"VLLM_CPU_OMP_THREADS_BIND": f"{core}|{core}"}
        parallel = usual.extra_arguments | {"tensor_parallel_size": 2}
        return OpenAIServer(replace(usual, cores=(), environment=bound, extra_arguments=parallel))

    with (
        settings("encoder", "ec_producer", True) as encoder,
        settings("one-worker", "ec_consumer", False) as one,
        settings("two-workers", "ec_consumer", False) as two,
        Proxy([encoder.port], [one.port, two.port]).listening() as proxy,
    ):
        for server in (encoder, one, two):
            server.wait_ready(START_SECONDS)
        fleet = Fleet(encoder, (one, two), hosts=places, album=album, reference=reference)
        fleet.port = proxy.port
        yield fleet
        for server in (encoder, one, two):
            assert server.is_healthy(), server.log_tail()
            assert "EngineDead" not in server.log_text(), server.log_tail()
    places.stop()


@pytest.fixture(autouse=True)
def _at_rest(fleet: Fleet) -> Iterator[None]:
    yield
    for node in fleet.hosts.nodes:
        at_rest(node, seconds=ANSWER_SECONDS)


def test_each_image_is_encoded_once_and_loaded_by_each_consumer(fleet: Fleet) -> None:
    encoder, consumers = fleet.encodes()
    questions = [fleet.fresh() for _ in range(4)]
    for question in questions:
        assert fleet.ask(question) == ("loaded",)
    assert fleet.encodes() == (encoder + 4, consumers)


def test_a_repeat_encodes_nothing(fleet: Fleet) -> None:
    question, other, third = (fleet.fresh() for _ in range(3))
    for each in (question, other, third):  # of two consumers, each gets each of the three
        fleet.ask(each)
    before = fleet.encodes()
    for each in (question, other, third):
        assert fleet.ask(each) in {("loaded",), ()}
    assert fleet.encodes() == before


def test_several_images_and_a_repeated_one_in_one_request(fleet: Fleet) -> None:
    encoder, consumers = fleet.encodes()
    assert fleet.ask(fleet.album.about(*NONE_KNOWN)) == ("loaded",) * 3
    assert set(fleet.ask(fleet.album.about(*TWICE))) == {"loaded"}
    assert fleet.encodes() == (encoder + 4, consumers)


def test_the_same_images_in_another_order(fleet: Fleet) -> None:
    for numbers in CROSSED[:2]:
        assert set(fleet.ask(fleet.album.about(*numbers))) <= {"loaded"}
    encoder, consumers = fleet.encodes()
    for numbers in CROSSED[:2]:  # to the consumer that had the other order
        assert set(fleet.ask(fleet.album.about(*reversed(numbers)))) <= {"loaded"}
    assert fleet.encodes() == (encoder, consumers)


def test_requests_without_images_among_others(fleet: Fleet) -> None:
    text_only = fleet.album.about()
    questions = [text_only, fleet.fresh(), text_only, fleet.fresh(), text_only, fleet.fresh()]
    encoder, consumers = fleet.encodes()
    with ThreadPoolExecutor(max_workers=len(questions)) as clients:
        replies = list(clients.map(fleet.post, questions))
    for reply, question in zip(replies, questions, strict=True):
        fleet.checked(reply, question)
        assert fleet.origins(reply) == ("loaded",) * len(question.images)
    assert fleet.encodes() == (encoder + 3, consumers)


@contextmanager
def flushed(url: str) -> Iterator[None]:
    """Nodes write their records again after a while."""
    flush(url)
    yield


def test_a_consumer_encodes_what_it_does_not_get(fleet: Fleet) -> None:
    """Because the encoder's node does not answer, or because the store has lost its records."""
    hosts = fleet.hosts
    losses = (
        (hosts.a.frozen(), {("encoded",)}),
        # A node may have written its records again.
        (flushed(hosts.server.url), {("encoded",), ("loaded",)}),
    )
    for loss, expected in losses:
        lost = fleet.fresh()
        reply = fleet.encoder.ask_about(lost, max_tokens=1)
        assert reply.status == 200
        (item,) = (item for _, item in fleet.encoder.schedule.images(reply.request))
        hosts.wait_for_holder(item.identifier, hosts.a)
        with loss:
            for number, consumer in enumerate(fleet.consumers):
                answer = fleet.checked(consumer.ask_about(lost), lost)
                assert answer.seconds < FETCH_SECONDS + ANSWER_SECONDS
                assert consumer.origins(answer) in expected, (number, hosts.b.stats())
    encoder, _ = fleet.encodes()
    wait_until(lambda: fleet.ask(fleet.fresh()) == ("loaded",), ANSWER_SECONDS)
    assert fleet.encodes()[0] > encoder


def test_without_an_encoder_instance_the_proxy_fails_and_consumers_answer(fleet: Fleet) -> None:
    question = fleet.fresh()
    with Proxy([1], [fleet.consumers[0].port]).listening() as broken:
        reply = post(broken.port, COMPLETIONS, chat_of(parts_of(question), question.tokens))
        assert reply.status == 502
        text_only = fleet.album.about()
        body = chat_of(parts_of(text_only), text_only.tokens)
        fleet.checked(post(broken.port, COMPLETIONS, body), text_only)
    answer = fleet.checked(fleet.consumers[1].ask_about(question), question)
    assert fleet.consumers[1].origins(answer) == ("encoded",)
