"""One encode-only server (`ec_producer`) feeds servers that answer (`ec_consumer`), with audio.

One consumer is on another host; a second one, in the last tests, on the producer's own. Requests to
a consumer carry the media, or only what the producer reported in
`ec_transfer_params`, as a router of vLLM's own connectors sends them. What the consumer answers is
held against a server without a connector. Some tests are hostile.
"""

import base64
import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import START_SECONDS, TwoHosts, connector, engine_settings, kv_connector
from examples.demo.engine_settings import EngineSettings
from models import CLIP_TOKENS_MAX, EMBEDDING_WIDTH, MODEL_TOKENS_MAX, clip, ensure_audio_model
from nodes import ROOT, at_rest
from openai_servers import OpenAIServer, Part, Reply, text
from patience import scaled

pytestmark = pytest.mark.vllm
AT_ONCE_SECONDS = scaled(5.0)
FETCH_SECONDS = 2.0
"""`fetch_wait_seconds` of the consumers."""
WAIT_SECONDS = 10.0
"""`metadata_wait_seconds` of the consumers."""
WAITS = {"fetch_wait_seconds": FETCH_SECONDS, "metadata_wait_seconds": WAIT_SECONDS}
CLIPS = 10
QUESTION = text("What do you hear?")
STEP_TOKENS = 64
"""Two clips take several steps."""


class Pair:
    """Producer and consumer, and what a server without a connector answered."""

    def __init__(
        self,
        producer: OpenAIServer,
        consumer: OpenAIServer,
        hosts: TwoHosts,
        answers: dict[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        self.producer, self.consumer = producer, consumer
        self.hosts = hosts
        self.answers = answers

    def encode(self, *parts: Part) -> dict[str, Any]:
        """What the producer reports of the items, when they can be had on every host."""
        reply = self.producer.ask(*parts, QUESTION, tokens=1)
        assert reply.status == 200, reply
        reported: dict[str, Any] = reply.body["ec_transfer_params"]
        for identifier in reported:
            self.hosts.wait_for_holder(identifier, self.hosts.a)
        return reported

    def loaded(self, reply: Reply, *numbers: int, by: OpenAIServer | None = None) -> None:
        assert reply.tokens == self.answers[numbers]
        assert (by or self.consumer).origins(reply) == ("loaded",) * len(set(numbers))
        assert reply.seconds < AT_ONCE_SECONDS


def named(identifier: str, metadata: dict[str, Any]) -> Part:
    """An item without its media."""
    return {"type": "audio_embeds", "audio_embeds": metadata, "uuid": identifier}


def of_tokens(identifier: str, count: int) -> Part:
    return named(identifier, {"audio_num_tokens": [count]})


@pytest.fixture(scope="module")
def audio_model() -> Path:
    return ensure_audio_model(ROOT / "build" / "models").resolve()


def audio_settings(name: str, model: Path, work: Path, core: int, **more: Any) -> EngineSettings:
    arguments = {
        "limit_mm_per_prompt": {"audio": 3},
        "enable_mm_embeds": True,  # consumers have it on by themselves
        "max_model_len": MODEL_TOKENS_MAX,
        "max_num_batched_tokens": STEP_TOKENS,
    }
    return engine_settings(name, model, work, core=core, extra_arguments=arguments, **more)


@pytest.fixture(scope="module")
def hosts(places: TwoHosts) -> Iterator[TwoHosts]:
    places.start()
    try:
        yield places
    finally:
        places.stop()


@pytest.fixture(scope="module")
def pair(
    hosts: TwoHosts, audio_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Two servers at a time: the one without a connector has ended when the consumer starts."""
    work = tmp_path_factory.mktemp("pair")
    to_produce = connector(hosts.a) | {"ec_role": "ec_producer"}
    to_consume = connector(hosts.b, **WAITS) | {"ec_role": "ec_consumer"}
    producer = OpenAIServer(
        audio_settings("producer", audio_model, work, 0, ec_transfer_config=to_produce)
    )
    with producer:
        with OpenAIServer(audio_settings("plain", audio_model, work, 1)) as plain:
            plain.wait_ready(START_SECONDS)
            asked: list[tuple[int, ...]] = [(number,) for number in range(CLIPS)]
            asked += [(0, 1), (2, 2)]
            answers = {numbers: plain.ask(*clips(*numbers), QUESTION).tokens for numbers in asked}
        assert len(set(answers.values())) == len(answers), answers  # or tokens would prove nothing
        consumer = OpenAIServer(
            audio_settings("consumer", audio_model, work, 1, ec_transfer_config=to_consume)
        )
        with consumer:
            for server in (producer, consumer):
                server.wait_ready(START_SECONDS)
            yield Pair(producer, consumer, hosts, answers)
            for server in (producer, consumer):
                assert server.is_healthy(), server.log_tail()
                assert "EngineDead" not in server.log_text(), server.log_tail()


@pytest.fixture(autouse=True)
def _at_rest(hosts: TwoHosts) -> Iterator[None]:
    yield
    for node in hosts.nodes:
        at_rest(node)


def clips(*numbers: int) -> list[Part]:
    """The higher the number, the longer the clip."""
    return [clip(number, seconds=1.0 + 0.2 * number) for number in numbers]


def test_kv_alone_delivers_no_item(
    hosts: TwoHosts, audio_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What the KV connector lacks is computed, so an item has to come with its media. Stands before
    the tests of `pair`, so that no other server runs."""
    work = tmp_path_factory.mktemp("kv-alone")
    settings = audio_settings("kv-alone", audio_model, work, 1)
    with_kv = settings.extra_arguments | {"kv_transfer_config": kv_connector(hosts.b)}
    with OpenAIServer(replace(settings, extra_arguments=with_kv)) as server:
        server.wait_ready(START_SECONDS)
        expected = server.ask(*clips(0), QUESTION).tokens
        refused = server.ask(of_tokens("nobody-has-it", 20), QUESTION)
        assert 400 <= refused.status < 500, refused
        assert server.ask(*clips(0), QUESTION).tokens == expected
        assert server.is_healthy(), server.log_tail()
        assert "EngineDead" not in server.log_text(), server.log_tail()


def test_requests_with_media(pair: Pair) -> None:
    reported = pair.encode(*clips(0))
    assert [item["item_indices"] for item in reported.values()] == [[0]]
    pair.loaded(pair.consumer.ask(*clips(0), QUESTION), 0)


def test_several_and_repeated_items_in_one_request(pair: Pair) -> None:
    pair.encode(*clips(1, 2))
    reply = pair.consumer.ask(*clips(0, 1), QUESTION)
    assert reply.tokens == pair.answers[0, 1]
    pair.loaded(pair.consumer.ask(*clips(2, 2), QUESTION), 2, 2)


def test_media_that_nobody_encoded_are_encoded_here(pair: Pair) -> None:
    reply = pair.consumer.ask(*clips(3), QUESTION)
    assert reply.tokens == pair.answers[3,]
    assert pair.consumer.origins(reply) == ("encoded",)
    assert reply.seconds < AT_ONCE_SECONDS


@pytest.mark.parametrize("number", [4, 5])
def test_requests_with_metadata_alone(pair: Pair, number: int) -> None:
    """With the producer's report handed on, and without."""
    reported = pair.encode(*clips(number))
    (named_part,) = (named(key, item["metadata"]) for key, item in reported.items())
    fields: dict[str, Any] = {"ec_transfer_params": reported} if number == 4 else {}
    pair.loaded(pair.consumer.ask(named_part, QUESTION, **fields), number)


def test_the_consumer_is_asked_before_the_producer_has_encoded(pair: Pair) -> None:
    """And waits for longer than for bytes on their way; for how long depends on the claim, which
    the producer has as soon as it comes to the item."""
    count = pair.encode(*clips(6)).popitem()[1]["metadata"]["audio_num_tokens"][0]
    with ThreadPoolExecutor(max_workers=1) as client:
        early = client.submit(pair.consumer.ask, of_tokens("early", count), QUESTION)
        time.sleep(2 * FETCH_SECONDS)
        assert not early.done()
        assert set(pair.encode(clips(6)[0] | {"uuid": "early"})) == {"early"}
        reply = early.result()
    assert reply.tokens == pair.answers[6,]
    assert pair.consumer.origins(reply) == ("loaded",)


HOSTILE: dict[str, tuple[list[Part], dict[str, Any] | None]] = {
    "undelivered": ([of_tokens("nobody-has-it", 20)], None),
    "undelivered, with params": (
        [of_tokens("nobody-has-it-either", 20)],
        {"nobody-has-it-either": {"item_indices": [0], "metadata": {"audio_num_tokens": [20]}}},
    ),
    "undelivered, with garbage for params": ([of_tokens("nor-this", 20)], {"": [None, 1e300]}),
    "one delivered, one not": ([of_tokens("delivered", 25), of_tokens("not", 20)], None),
    "another number of tokens": ([of_tokens("delivered", 24)], None),
    "an empty name": ([of_tokens("", 20)], None),
    "no name": ([{"type": "audio_embeds", "audio_embeds": {"audio_num_tokens": [20]}}], None),
    "a name of a megabyte": ([of_tokens("x" * (1 << 20), 20)], None),
    "no tokens": ([of_tokens("none", 0)], None),
    "more tokens than fit": ([of_tokens("many", MODEL_TOKENS_MAX)], None),
    "more tokens than an item may have": ([of_tokens("much", CLIP_TOKENS_MAX + 1)], None),
    "nothing but a name": ([named("bare", {})], None),
    "not even that": ([{"type": "audio_embeds", "audio_embeds": None, "uuid": "none"}], None),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_item_that_nobody_delivers_fails_its_request_alone(pair: Pair, what: str) -> None:
    """The consumer answers others meanwhile and afterwards."""
    pair.encode(clips(0)[0] | {"uuid": "delivered"})
    parts, params = HOSTILE[what]
    fields: dict[str, Any] = {} if params is None else {"ec_transfer_params": params}
    with ThreadPoolExecutor(max_workers=1) as client:
        hostile = client.submit(pair.consumer.ask, *parts, QUESTION, **fields)
        for _ in range(2):
            honest = pair.consumer.ask(*clips(0), QUESTION)
            assert honest.tokens == pair.answers[0,]
            assert honest.seconds < AT_ONCE_SECONDS
        reply = hostile.result()
    assert reply.status >= 400, reply
    assert reply.error
    assert reply.seconds < WAIT_SECONDS + AT_ONCE_SECONDS
    assert pair.consumer.is_healthy()
    assert pair.consumer.ask(*clips(0), QUESTION).tokens == pair.answers[0,]


def test_many_hostile_requests_hold_up_nobody(pair: Pair) -> None:
    """More of them than the engine has places for requests."""
    stop = threading.Event()

    def besiege(number: int) -> None:
        while not stop.is_set():
            reply = pair.consumer.ask(of_tokens(f"siege-{number}", 20), QUESTION)
            assert reply.status >= 400

    with ThreadPoolExecutor(max_workers=12) as besiegers:
        sieges = [besiegers.submit(besiege, number) for number in range(12)]
        try:
            for _ in range(5):
                honest = pair.consumer.ask(*clips(0), QUESTION)
                assert honest.tokens == pair.answers[0,]
                assert honest.seconds < AT_ONCE_SECONDS
        finally:
            stop.set()
        for siege in sieges:
            siege.result()


def test_a_uuid_that_was_used_for_another_shape(pair: Pair) -> None:
    """The bytes that the fleet has under the name do not fit, so they are no hit."""
    pair.encode(clips(0)[0] | {"uuid": "reused"})
    reply = pair.consumer.ask(clips(7)[0] | {"uuid": "reused"}, QUESTION)
    assert reply.tokens == pair.answers[7,]
    assert pair.consumer.origins(reply) == ("encoded",)


def test_embeddings_that_a_client_supplies_are_not_stored(pair: Pair) -> None:
    given = io.BytesIO()
    torch.save(torch.randn(20, EMBEDDING_WIDTH), given)
    supplied = base64.b64encode(given.getvalue()).decode()
    part = {"type": "audio_embeds", "audio_embeds": supplied, "uuid": "supplied"}
    for server in (pair.producer, pair.consumer):
        assert server.ask(part, QUESTION, tokens=1).status == 200
    pair.encode(clips(2)[0] | {"uuid": "encoded"})  # what comes later is stored by now
    assert pair.hosts.holders("supplied") == set()
    assert pair.hosts.holders("encoded")
    assert pair.producer.metric("vllm:lookup_buffer_ec_items_not_shared_total") >= 1


def test_a_uuid_that_is_used_for_several_shapes_at_once(pair: Pair) -> None:
    """vLLM asks for all of them by that one name: what fits one would be loaded for the others."""
    for turn in range(3):
        name = f"both-{turn}"
        (reported,) = pair.encode(clips(0)[0] | {"uuid": name}).values()
        honest = named(name, reported["metadata"])
        parts = [honest, of_tokens(name, 2), of_tokens(name, 60)] * 2
        with ThreadPoolExecutor(max_workers=len(parts)) as clients:
            replies = list(clients.map(lambda part: pair.consumer.ask(part, QUESTION), parts))
        assert pair.consumer.is_healthy(), pair.consumer.log_tail()
        for part, reply in zip(parts, replies, strict=True):
            if part == honest:
                assert reply.tokens == pair.answers[0,]
            else:
                assert reply.status == 500


@pytest.mark.parametrize("length", [341, 342, 1300, 5000])
def test_a_uuid_of_any_length_and_spelling(pair: Pair, length: int) -> None:
    reply = pair.consumer.ask(clips(1)[0] | {"uuid": "\N{CAT FACE}" * length}, QUESTION)
    assert reply.tokens == pair.answers[1,]


@pytest.fixture(scope="module")
def neighbour(
    pair: Pair, audio_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    """A second consumer, on the producer's host; for the last tests only, so it starts late."""
    work = tmp_path_factory.mktemp("neighbour")
    to_consume = connector(pair.hosts.a, **WAITS)
    settings = audio_settings(
        "neighbour",
        audio_model,
        work,
        0,
        ec_transfer_config=to_consume | {"ec_role": "ec_consumer"},
    )
    with OpenAIServer(settings) as server:
        server.wait_ready(START_SECONDS)
        yield server
        assert server.is_healthy(), server.log_tail()


@pytest.mark.parametrize(("number", "carried"), [(8, "media"), (9, "metadata")])
def test_one_producer_feeds_two_consumers(
    pair: Pair, neighbour: OpenAIServer, number: int, carried: str
) -> None:
    """Which are asked at the same time."""
    encodes = pair.producer.schedule.encoder_runs()
    reported = pair.encode(*clips(number))
    without_media = [named(key, item["metadata"]) for key, item in reported.items()]
    parts = clips(number) if carried == "media" else without_media
    consumers = (pair.consumer, neighbour)
    with ThreadPoolExecutor(max_workers=2) as clients:
        replies = clients.map(
            lambda server: server.ask(*parts, QUESTION, ec_transfer_params=reported), consumers
        )
        for server, reply in zip(consumers, replies, strict=True):
            pair.loaded(reply, number, by=server)
    assert pair.producer.schedule.encoder_runs() == encodes + 1
