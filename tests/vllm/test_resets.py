"""vLLM's OpenAI servers that go on sharing, and go on, whatever befalls their caches.

What is stored under an image's own key and is no output of its encoder is a miss; after vLLM has
thrown away its caches, or was paused, what the buffer holds is loaded. After weights were loaded
anew it is not.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines import (
    CHUNK,
    OUTCOME_SECONDS,
    SIZE,
    START_SECONDS,
    Album,
    Reference,
    TwoHosts,
    connector,
    engine_settings,
    kv_connector,
    kv_engine_settings,
    prompt,
)
from examples.demo.engine_settings import Placement
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from nodes import wait_until
from openai_servers import MODEL_NAME, OpenAIServer, Reply, image, text

pytestmark = pytest.mark.vllm
ROWS, WIDTH = SIZE.embeddings_per_image, SIZE.text.hidden
PROMPT_TOKENS = 500
PAUSES = ("/pause", "/resume", "/sleep?level=1", "/wake_up")
ANSWER = 8
GREEDY = {"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True, "return_token_ids": True}
MISSES = "vllm:lookup_buffer_ec_misses_total"
NO_OUTPUTS = {
    "twice as wide": (torch.zeros(ROWS, 2 * WIDTH), "shape"),
    "half as wide": (torch.zeros(ROWS, WIDTH // 2), "shape"),
    "one column": (torch.zeros(ROWS, 1), "shape"),
    "a row less": (torch.zeros(ROWS - 1, WIDTH), "shape"),
    "three dimensions": (torch.zeros(ROWS, WIDTH, 1), "shape"),
    "one number": (torch.zeros(()), "shape"),
    "none": (None, "shape"),
    "another dtype": (torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16), "dtype"),
    "integers": (torch.zeros(ROWS, WIDTH, dtype=torch.int32), "dtype"),
}
"""What is stored, and the reason of the miss."""


@pytest.fixture(scope="module")
def hosts(places: TwoHosts) -> Iterator[TwoHosts]:
    places.start()
    try:
        yield places
    finally:
        places.stop()


class Served:
    """A server with an encoder cache of one image; every answer is right."""

    def __init__(
        self, server: OpenAIServer, hosts: TwoHosts, album: Album, reference: Reference
    ) -> None:
        self.server = server
        self.hosts = hosts
        self._album = album
        self._reference = reference
        self._fresh = iter(reference.telling)

    def fresh(self) -> int:
        """The number of a picture that the server was not asked about."""
        return next(self._fresh)

    def name(self, picture: int) -> str:
        """What the client calls it, and vLLM and the buffer therefore too."""
        return f"picture-{picture}"

    def ask(self, picture: int) -> tuple[str, ...]:
        """Where the image came from; nothing where vLLM's own cache had it."""
        question = self._album.about(picture)
        (path,) = question.images
        words = text(question.prompt.replace("<image>", ""))
        named = image(Path(path), uuid=self.name(picture))
        reply = self.server.ask(named, words, tokens=question.tokens)
        assert reply.tokens == self._reference.tokens(question)
        origins = self.server.origins(reply)
        if "encoded" in origins:
            self.hosts.wait_for_holder(self.name(picture), self.hosts.a)
        return origins

    def tell(self, path: str) -> Reply:
        reply = self.server.post(path, {})
        assert reply.status == 200, reply
        return reply

    def namespace(self) -> Namespace:
        """Of the engine, as anybody can read it in Redis."""
        (parts,) = self.hosts.store.namespaces().values()
        return Namespace(parts)

    def missed(self, reason: str) -> float:
        label = f'reason="{reason}"'
        lines = self.server.metrics().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(MISSES) and label in line
        )


@pytest.fixture(scope="module")
def served(
    hosts: TwoHosts,
    album: Album,
    model: Path,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    settings = engine_settings(
        "served", model, tmp_path_factory.mktemp("served"), ec_transfer_config=connector(hosts.a)
    )
    developing = {"VLLM_SERVER_DEV_MODE": "1"}
    settings = replace(settings, environment=settings.environment | developing)
    with OpenAIServer(settings) as server:
        server.wait_ready(START_SECONDS)
        served = Served(server, hosts, album, reference)
        assert served.ask(served.fresh()) == ("encoded",)
        yield served
        assert server.is_healthy()


@pytest.mark.parametrize("kind", NO_OUTPUTS)
def test_what_is_no_output_of_this_encoder_is_a_miss(served: Served, kind: str) -> None:
    tensor, reason = NO_OUTPUTS[kind]
    picture = served.fresh()
    with LookupBuffer(served.hosts.a.config, served.namespace()) as client:
        client.insert(TensorKey(served.name(picture)), tensor)
    before = served.missed(reason)
    assert served.ask(picture) == ("encoded",)
    wait_until(lambda: served.missed(reason) == before + 1, OUTCOME_SECONDS)


# On a CPU vLLM's workers keep their memory in sleep; all else of it is what happens on a GPU.
RESETS = (("/reset_encoder_cache",), ("/pause", "/resume"), ("/sleep?level=1", "/wake_up"))


@pytest.mark.parametrize("path", RESETS)
def test_after_a_reset_what_the_buffer_holds_is_loaded(
    served: Served, path: tuple[str, ...]
) -> None:
    picture = served.fresh()
    assert served.ask(picture) == ("encoded",)
    assert served.ask(picture) == (), "vLLM's own cache has it"
    for _ in range(2):
        for step in path:
            served.tell(step)
        assert served.ask(picture) == ("loaded",)
    other = served.fresh()
    assert served.ask(other) == ("encoded",), "it still stores"
    assert served.ask(picture) == ("loaded",)


def test_kv_is_shared_after_a_pause_and_not_after_new_weights(
    hosts: TwoHosts, model: Path, tmp_path: Path
) -> None:
    node = hosts.b
    settings = kv_engine_settings(
        "paused",
        model,
        tmp_path,
        0,
        Placement.TWO_PROCESSES,
        kv_transfer_config=kv_connector(node, fetch_wait_seconds=20.0),
    )
    developing = {"VLLM_SERVER_DEV_MODE": "1"}
    settings = replace(settings, environment=settings.environment | developing)
    with OpenAIServer(settings) as server:
        server.wait_ready(START_SECONDS)

        def ask(seed: int) -> tuple[tuple[int, ...], bool]:
            """The answer, and whether the prompt's whole chunks were loaded for it."""
            before = len(server.schedule.steps())
            body = {"prompt": list(prompt(PROMPT_TOKENS, seed)), "model": MODEL_NAME}
            reply = server.post("/v1/completions", body | GREEDY)
            computed = sum(step.tokens for step in server.schedule.steps()[before:])
            return reply.tokens, computed < CHUNK + ANSWER

        def wait_for(prompts: int) -> None:
            due = prompts * (PROMPT_TOKENS // CHUNK)
            wait_until(lambda: node.stats()["items"] >= due, OUTCOME_SECONDS)

        first, is_loaded = ask(seed=1)
        assert not is_loaded
        wait_for(prompts=1)
        for _ in range(2):
            assert ask(seed=1) == (first, True)
            for path in (*PAUSES, "/reset_prefix_cache?reset_external=true"):
                assert server.post(path, {}).status == 200
        other, is_loaded = ask(seed=2)
        assert not is_loaded
        wait_for(prompts=2)
        assert ask(seed=2) == (other, True)

        reload = {"method": "reload_weights", "timeout": START_SECONDS}
        assert server.post("/collective_rpc", reload).status == 200
        assert ask(seed=2) == (other, False)
        assert "weights of this engine have changed" in server.log_text()
        assert server.is_healthy()
