"""Two of vLLM's OpenAI servers as replicas (`ec_both`) behind a load balancer, on two hosts.

Both have an encoder cache of exactly one image and steps shorter than a prompt of two (chunked
prefill), and plan a step while the one before it runs. Replica a has no prefix cache; replica b has
one, and so few KV blocks that requests which run together are preempted. Whatever they answer is
held against an engine without a connector.
"""

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from command_line import run_json
from engine_plugins import FLAGS, OVERLAPS
from engines import (
    NONE_KNOWN,
    ONE_KNOWN,
    OUTCOME_SECONDS,
    SIZE,
    START_SECONDS,
    TWICE,
    Album,
    Reference,
    TwoHosts,
    connector,
    engine_settings,
)
from examples.demo.engine import Question
from examples.demo.model import model_config
from nodes import at_rest, wait_until
from openai_servers import (
    CHAT,
    OpenAIServer,
    Part,
    Reply,
    chat_of,
    image,
    overlapping,
    parts_of,
    text,
)
from patience import scaled, slowness

pytestmark = pytest.mark.vllm
AT_ONCE_SECONDS = scaled(5.0)
WAIT_SECONDS = 8.0 * slowness()
"""`fetch_wait_seconds` and `metadata_wait_seconds` of both replicas. A request has to be aborted
within them."""
ABORTED = "aborted"
"""Name of the request that is."""
WAITING = "vllm:num_requests_waiting{"
LONG_ANSWER_TOKENS = 400
"""So long that requests meet, also where the server takes its time to begin each."""
BLOCK_TOKENS = 32
FEW_BLOCKS = 36
"""Enough for the longest prompt, too few for two long answers at once."""


class Replicas:
    """The two servers, taken by turns."""

    def __init__(
        self, a: OpenAIServer, b: OpenAIServer, hosts: TwoHosts, album: Album, reference: Reference
    ) -> None:
        self.a, self.b = a, b
        self.hosts = hosts
        self.album = album
        self._reference = reference
        self._fresh = iter(reference.telling)

    def fresh(self) -> Question:
        """About a picture that neither replica was asked about."""
        return self.album.about(next(self._fresh))

    def tokens(self, question: Question) -> tuple[int, ...]:
        return self._reference.tokens(question)

    def node_of(self, server: OpenAIServer) -> Any:
        return self.hosts.a if server is self.a else self.hosts.b

    def ask(self, server: OpenAIServer, question: Question, **fields: Any) -> tuple[str, ...]:
        """Where the images came from, after a look at the tokens."""
        reply = server.ask_about(question, **fields)
        assert reply.tokens == self.tokens(question), reply
        assert reply.seconds < AT_ONCE_SECONDS
        self.wait_until_published(server, reply)
        return server.origins(reply)

    def wait_until_published(self, server: OpenAIServer, reply: Reply) -> None:
        for origin, item in server.schedule.images(reply.request):
            if origin == "encoded":
                self.hosts.wait_for_holder(item.identifier, self.node_of(server))


@pytest.fixture(scope="module")
def hosts(places: TwoHosts) -> Iterator[TwoHosts]:
    places.start()
    try:
        yield places
    finally:
        places.stop()


@pytest.fixture(scope="module")
def replicas(
    hosts: TwoHosts,
    album: Album,
    model: Path,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Replicas]:
    work = tmp_path_factory.mktemp("replicas")
    scarce = {
        "enable_prefix_caching": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": FEW_BLOCKS,
    }
    a, b = (
        engine_settings(
            node.node_id,
            model,
            work,
            core=core,
            ec_transfer_config=connector(
                node, fetch_wait_seconds=WAIT_SECONDS, metadata_wait_seconds=WAIT_SECONDS
            ),
            extra_arguments=extra,
        )
        for core, (node, extra) in enumerate(((hosts.a, {}), (hosts.b, scarce)))
    )
    scale_out = "--enable-scale-out"  # the renderer, and the endpoint for what it hands on
    flags = (scale_out, "--enable-log-requests", *FLAGS)  # the second: it logs what was aborted
    a, b = overlapping(a), overlapping(b)
    with OpenAIServer(a, *flags) as server_a, OpenAIServer(b, *flags) as server_b:
        for server in (server_a, server_b):
            server.wait_ready(START_SECONDS)
        yield Replicas(server_a, server_b, hosts, album, reference)
        for server in (server_a, server_b):
            assert server.is_healthy(), server.log_tail()
            assert "EngineDead" not in server.log_text(), server.log_tail()
            assert OVERLAPS in server.log_text()


@pytest.fixture(autouse=True)
def _at_rest(hosts: TwoHosts) -> Iterator[None]:
    yield
    for node in hosts.nodes:
        at_rest(node)


def test_by_turns_each_image_is_encoded_once(replicas: Replicas) -> None:
    turns = (replicas.a, replicas.b)
    questions = [replicas.fresh() for _ in range(4)]
    for number, question in enumerate(questions):
        assert replicas.ask(turns[number % 2], question) == ("encoded",)
    for number, question in enumerate(questions):
        assert replicas.ask(turns[1 - number % 2], question) == ("loaded",)


def test_several_images_in_one_request(replicas: Replicas) -> None:
    album = replicas.album
    assert replicas.ask(replicas.a, album.about(*NONE_KNOWN)) == ("encoded",) * 3
    assert replicas.ask(replicas.b, album.about(*NONE_KNOWN)) == ("loaded",) * 3
    shown = parts_of(album.about(ONE_KNOWN[1]))
    first = replicas.b.ask(*shown)
    replicas.wait_until_published(replicas.b, first)
    origins = replicas.ask(replicas.a, album.about(*ONE_KNOWN))
    assert origins == ("encoded", "loaded", "encoded")


def test_a_repeated_image(replicas: Replicas) -> None:
    assert replicas.ask(replicas.b, replicas.album.about(*TWICE))[0] == "encoded"
    assert set(replicas.ask(replicas.a, replicas.album.about(*TWICE))) == {"loaded"}


def test_an_image_driven_out_of_the_one_place_is_loaded(replicas: Replicas) -> None:
    first, other = replicas.fresh(), replicas.fresh()
    for question, origin in ((first, "encoded"), (other, "encoded"), (first, "loaded")):
        assert replicas.ask(replicas.a, question) == (origin,)


def test_many_at_once_by_turns(replicas: Replicas) -> None:
    questions = [replicas.fresh() for _ in range(3)] * 4
    turns = [replicas.a, replicas.b] * 6
    with ThreadPoolExecutor(max_workers=6) as clients:
        list(clients.map(replicas.ask, turns, questions))


def test_preempted_requests_get_their_images_again(replicas: Replicas) -> None:
    questions = [replicas.fresh() for _ in range(4)]
    alone = [
        replicas.a.ask(*parts_of(question), tokens=LONG_ANSWER_TOKENS) for question in questions
    ]
    for reply in alone:
        replicas.wait_until_published(replicas.a, reply)
    before = replicas.b.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(max_workers=4) as clients:
        together = list(
            clients.map(
                lambda question: replicas.b.ask(*parts_of(question), tokens=LONG_ANSWER_TOKENS),
                questions,
            )
        )
    assert replicas.b.metric("vllm:num_preemptions_total") > before
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
    for reply in together:
        assert set(replicas.b.origins(reply)) == {"loaded"}


def test_abort_in_the_middle_of_a_prefetch(replicas: Replicas) -> None:
    question, node = replicas.fresh(), replicas.hosts.b
    assert replicas.ask(replicas.a, question) == ("encoded",)
    replicas.hosts.relay.hold_after(SIZE.nbytes_per_image // 2)
    try:
        with replicas.b.asking(*parts_of(question), name=ABORTED):
            wait_until(lambda: node.stats()["reserved_bytes"], AT_ONCE_SECONDS, "a fetch begins")
            wait_until(lambda: replicas.b.metric(WAITING) == 1, AT_ONCE_SECONDS, "it is held back")
        # The server's log says so before the engine has heard of it.
        wait_until(lambda: replicas.b.metric(WAITING) == 0, WAIT_SECONDS / 2, "vLLM aborts it")
        assert re.search(f"{CHAT}{ABORTED}.* aborted", replicas.b.log_text())
    finally:
        replicas.hosts.relay.let_go()
    at_rest(node)
    assert replicas.ask(replicas.b, question) == ("loaded",)
    scheduled = {name for step in replicas.b.schedule.steps() for name in step.requests}
    assert not [name for name in scheduled if name.startswith(CHAT + ABORTED)]


def rendered(replicas: Replicas, question: Question) -> dict[str, Any]:
    """What vLLM's renderer hands on of the question: placeholders and sizes, but no pixels."""
    chat = chat_of(parts_of(question), tokens=question.tokens)
    reply = replicas.a.post("/v1/chat/completions/render", chat)
    assert reply.status == 200, reply
    assert set(reply.body["features"].pop("kwargs_data")) == {"image"}
    # It forgets that not all of a placeholder's tokens stand for rows of the encoder's output.
    tokens, image_token = reply.body["token_ids"], model_config(SIZE)["image_token_id"]
    place = {"offset": tokens.index(image_token), "length": tokens.count(image_token)}
    reply.body["features"]["mm_placeholders"]["image"] = [place]
    return reply.body


def test_an_image_of_which_only_the_metadata_come(replicas: Replicas) -> None:
    question = replicas.fresh()
    assert replicas.ask(replicas.a, question) == ("encoded",)
    request = rendered(replicas, question)
    (identifier,) = request["features"]["mm_hashes"]["image"]
    request["ec_transfer_params"] = {identifier: {"item_indices": [0]}}
    reply = replicas.b.post("/inference/v1/generate", request)
    assert reply.tokens == replicas.tokens(question)
    assert replicas.b.origins(reply) == ("loaded",)


def test_metadata_of_an_image_that_nobody_delivers_fail_alone(replicas: Replicas) -> None:
    request = rendered(replicas, replicas.fresh())
    request["features"]["mm_hashes"]["image"] = ["nobody-delivers-it"]
    request["ec_transfer_params"] = {"nobody-delivers-it": {"item_indices": [0]}}
    reply = replicas.b.post("/inference/v1/generate", request)
    assert reply.status >= 400, reply
    assert WAIT_SECONDS <= reply.seconds < WAIT_SECONDS + AT_ONCE_SECONDS
    known = replicas.album.about(*NONE_KNOWN)
    assert replicas.ask(replicas.b, known) == ("loaded",) * 3


HOSTILE_PARTS: dict[str, Part] = {
    "a uuid and no image": {"type": "image_url", "image_url": None, "uuid": "nobody-has-it"},
    "a uuid and no embeddings": {"type": "image_embeds", "image_embeds": None, "uuid": "none"},
    "metadata that the model has no name for": {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": [1, 16, 16]},
        "uuid": "nobody-has-it-either",
    },
}


@pytest.mark.parametrize("what", HOSTILE_PARTS)
@pytest.mark.parametrize("params", [None, {"nobody-has-it": {"item_indices": [0]}}])
def test_an_image_that_is_only_named_fails_alone(
    replicas: Replicas, what: str, params: dict[str, Any] | None
) -> None:
    fields: dict[str, Any] = {} if params is None else {"ec_transfer_params": params}
    reply = replicas.b.ask(HOSTILE_PARTS[what], text("What is it?"), **fields)
    assert reply.status >= 400
    assert reply.error
    assert reply.seconds < WAIT_SECONDS + AT_ONCE_SECONDS
    assert replicas.b.is_healthy()


GARBAGE: list[Any] = [
    {"": None},
    {"items": [1, 2, {"metadata": "x" * 10_000}]},
    {"nobody": {"item_indices": [-1, 10**18], "metadata": {"image_grid_thw": "wide"}}},
]


@pytest.mark.parametrize("params", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_in_ec_transfer_params_changes_nothing(replicas: Replicas, params: Any) -> None:
    known = replicas.album.about(*NONE_KNOWN)
    assert replicas.ask(replicas.a, known, ec_transfer_params=params) == ("loaded",) * 3


def test_ec_transfer_params_of_another_type_are_refused(replicas: Replicas) -> None:
    reply = replicas.a.ask_about(replicas.album.about(*NONE_KNOWN), ec_transfer_params="all")
    assert reply.status == 400
    assert "ec_transfer_params" in reply.error


def test_one_uuid_for_two_images_is_one_image(replicas: Replicas) -> None:
    """A client's uuid is believed: that is vLLM's own rule, and it costs only who breaks it."""
    one, other = (Path(replicas.fresh().images[0]) for _ in range(2))
    first = replicas.a.ask(image(one, uuid="mine"), text("What is it?"))
    replicas.wait_until_published(replicas.a, first)
    second = replicas.b.ask(image(other, uuid="mine"), text("What is it?"))
    assert replicas.b.origins(second) == ("loaded",)
    assert second.tokens == first.tokens
    honest = replicas.b.ask(image(other), text("What is it?"))
    assert honest.tokens != first.tokens


def test_the_fleets_own_counters_tell_of_it(replicas: Replicas) -> None:
    question = replicas.fresh()
    before = counters(replicas.hosts)
    assert replicas.ask(replicas.a, question) == ("encoded",)
    assert replicas.ask(replicas.b, question) == ("loaded",)
    wait_until(
        lambda: counters(replicas.hosts)["hits_remote"] == before["hits_remote"] + 1,
        OUTCOME_SECONDS,
        "lookup-buffer stats counts a hit",
    )
    after = counters(replicas.hosts)
    assert after["inserts_stored"] == before["inserts_stored"] + 1
    assert after["bytes_fetched"] == before["bytes_fetched"] + SIZE.nbytes_per_image


def counters(hosts: TwoHosts) -> Counter[str]:
    """The fleet's, as an operator reads them, once the nodes have told all that they counted."""
    url, totals = hosts.server.url, Counter[str]()

    def told() -> bool:
        totals.clear()
        totals.update(run_json("stats", "--store-url", url)["totals"])
        inserted = sum(node.stats().get("inserts_stored", 0) for node in hosts.nodes)
        return totals["inserts_stored"] == inserted

    wait_until(told, OUTCOME_SECONDS, "the nodes tell what they counted")
    return totals
