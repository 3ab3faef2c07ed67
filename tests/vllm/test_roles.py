"""Tensor parallelism, and LoRA adapters that reach the encoder, on two of vLLM's OpenAI servers.

Server a has one worker, server b has two (TP=2); both know an adapter of the name "cats", but not
the same one. What they answer is held against a server without a connector that has both.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from connectors.identifiers import content_digest
from engines import (
    OUTCOME_SECONDS,
    SIZE,
    START_SECONDS,
    Album,
    TwoHosts,
    connector,
    engine_settings,
)
from lookup_buffer.key import TensorKey
from models import RANK, write_adapter
from nodes import NodeProcess, at_rest, wait_until
from openai_servers import MODEL_NAME, OpenAIServer
from patience import scaled

pytestmark = pytest.mark.vllm
ANSWER_SECONDS = scaled(20.0)
FETCH_SECONDS = scaled(10.0)
"""`fetch_wait_seconds` of server b, whose workers leave others little of the machine."""
PICTURES = 12
BASE = MODEL_NAME
TABBY, SIAMESE = "tabby", "siamese"
"""Two adapters, by what they contain."""
ARGUMENTS = {
    "enable_lora": True,
    "enable_tower_connector_lora": True,
    "max_loras": 2,
    "max_lora_rank": RANK,
    # At the start of an engine that stores, vLLM 0.32 encodes a dummy image before it has said
    # which adapter that is for; its CPU kernels take that for as many rows as a step has tokens,
    "max_num_batched_tokens": SIZE.embeddings_per_image,
}
# and read it from memory that nobody wrote. This makes glibc hand out zeros, which mean "none".
ENVIRONMENT = {"MALLOC_PERTURB_": "255"}


class Instance:
    """A server, its node, and what the adapters' names mean there."""

    def __init__(self, server: OpenAIServer, node: NodeProcess, names: dict[str, str]) -> None:
        self.server, self.node = server, node
        self.names = {BASE: BASE, **names}


class Fleet:
    """Both instances, and what a server without a connector answered."""

    def __init__(
        self,
        a: Instance,
        b: Instance,
        *,
        hosts: TwoHosts,
        album: Album,
        answers: dict[tuple[int, str], tuple[int, ...]],
        digests: dict[str, str],
    ) -> None:
        self.a, self.b = a, b
        self._hosts = hosts
        self._album = album
        self._answers = answers
        self._digests = digests
        self._fresh = iter(range(PICTURES))

    def fresh(self) -> int:
        """A picture that nobody was asked about."""
        return next(self._fresh)

    def ask(self, instance: Instance, picture: int, model: str = BASE) -> tuple[str, ...]:
        """Where the image came from, after a look at the tokens; published when this returns."""
        reply = instance.server.ask_about(self._album.about(picture), model=model)
        content = instance.names[model]
        assert reply.tokens == self._answers[picture, content], (picture, model)
        assert reply.seconds < ANSWER_SECONDS
        images = instance.server.schedule.images(reply.request)
        for _, item in images:
            self._hosts.wait_for_holder(self._key(item.identifier, model, content), instance.node)
        return tuple(origin for origin, _ in images)

    def get_to_know(self, instance: Instance, model: str) -> None:
        """An adapter's files are read after its first request, which is not shared."""
        picture = self._album.about(self.fresh())
        other = self._album.about(self.fresh())

        def is_shared() -> bool:
            for question in (picture, other):  # each drives the other out of vLLM's own cache
                instance.server.ask_about(question, model=model)
            digest = self._digests[instance.names[model]]
            return any(
                record.key.endswith(f"#lora-{digest}") for record in self._hosts.store.scan()
            )

        wait_until(is_shared, OUTCOME_SECONDS, f"{model} is read")

    def _key(self, identifier: str, model: str, content: str) -> str:
        if model == BASE:
            return identifier
        name, _, digest_of_image = identifier.partition(":")
        assert name == model
        return TensorKey(digest_of_image, part=f"lora-{self._digests[content]}").text


@pytest.fixture(scope="module")
def hosts(places: TwoHosts) -> Iterator[TwoHosts]:
    places.start()
    try:
        yield places
    finally:
        places.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By content; "copy" has the files of one of them in another place."""
    root = tmp_path_factory.mktemp("adapters")
    seeds = {TABBY: 1, SIAMESE: 2, "copy": 1}
    return {name: write_adapter(root / name, seed=seed) for name, seed in seeds.items()}


@pytest.fixture(scope="module")
def fleet(
    hosts: TwoHosts,
    folders: dict[str, Path],
    album: Album,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """Two servers at a time: the one without a connector has ended when b starts."""
    work = tmp_path_factory.mktemp("roles")
    usual = engine_settings("plain", model, work, extra_arguments=ARGUMENTS)
    on_a = replace(
        engine_settings("one-worker", model, work, core=1, extra_arguments=ARGUMENTS),
        ec_transfer_config=connector(hosts.a),
        environment=ENVIRONMENT,
    )
    (core,) = usual.cores
    on_b = replace(
        usual,
        name="two-workers",
        cores=(),
        ec_transfer_config=connector(hosts.b, fetch_wait_seconds=FETCH_SECONDS),
        # Workers that wait for each other spin. On a core each they would leave a machine of two
        # none for the node, which then answers nobody for seconds.
        environment=ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": f"{core}|{core}"},
        extra_arguments=ARGUMENTS | {"tensor_parallel_size": 2},
    )
    with OpenAIServer(on_a, *lora_modules(folders, cats=TABBY)) as server_a:
        with OpenAIServer(usual, *lora_modules(folders, tabby=TABBY, siamese=SIAMESE)) as plain:
            plain.wait_ready(START_SECONDS)
            answers = {
                (picture, name): plain.ask_about(album.about(picture), model=name).tokens
                for picture in range(PICTURES)
                for name in (BASE, TABBY, SIAMESE)
            }
        assert len(set(answers.values())) == len(answers), answers  # or tokens would prove nothing
        modules = lora_modules(folders, cats=SIAMESE, felines="copy")
        with OpenAIServer(on_b, *modules) as server_b:
            for server in (server_a, server_b):
                server.wait_ready(START_SECONDS)
            yield Fleet(
                Instance(server_a, hosts.a, {"cats": TABBY}),
                Instance(server_b, hosts.b, {"cats": SIAMESE, "felines": TABBY}),
                hosts=hosts,
                album=album,
                answers=answers,
                digests={name: content_digest(folder) for name, folder in folders.items()},
            )
            for server in (server_a, server_b):
                assert server.is_healthy(), server.log_tail()
                assert "EngineDead" not in server.log_text(), server.log_tail()


def lora_modules(folders: dict[str, Path], **names: str) -> list[str]:
    return ["--lora-modules", *(f"{name}={folders[what]}" for name, what in names.items())]


@pytest.fixture(autouse=True)
def _at_rest(hosts: TwoHosts) -> Iterator[None]:
    yield
    for node in hosts.nodes:
        at_rest(node, seconds=ANSWER_SECONDS)


def test_an_image_of_one_worker_is_loaded_by_both_of_two(fleet: Fleet) -> None:
    """A rank that had not loaded would end its engine; one with other bytes, change the tokens."""

    def origin_at_b() -> str:
        picture = fleet.fresh()
        assert fleet.ask(fleet.a, picture) == ("encoded",)
        (origin,) = fleet.ask(fleet.b, picture)
        return origin

    # A machine that stands still for seconds costs one image its load; a fault, each.
    assert "loaded" in (origin_at_b() for _ in range(3))


def test_an_image_of_two_workers_is_saved_once_and_loaded_by_one(fleet: Fleet) -> None:
    picture, other, node = fleet.fresh(), fleet.fresh(), fleet.b.node
    before = node.stats()
    assert fleet.ask(fleet.b, picture) == ("encoded",)
    assert fleet.ask(fleet.b, other) == ("encoded",)
    after = node.stats()
    assert after["inserts_stored"] == before.get("inserts_stored", 0) + 2
    assert after.get("inserts_exists", 0) == before.get("inserts_exists", 0)
    assert fleet.ask(fleet.a, picture) == ("loaded",)
    assert fleet.ask(fleet.b, picture) == ("loaded",)  # `other` had driven it out


def test_adapters_are_told_apart_by_what_they_contain(fleet: Fleet) -> None:
    """Not by name, nor by place; and none of them is taken for the model without one."""
    fleet.get_to_know(fleet.a, "cats")
    fleet.get_to_know(fleet.b, "cats")
    fleet.get_to_know(fleet.b, "felines")
    picture, other = fleet.fresh(), fleet.fresh()
    assert fleet.ask(fleet.a, picture, "cats") == ("encoded",)
    assert fleet.ask(fleet.b, picture, "cats") == ("encoded",)  # the same name, another adapter
    assert fleet.ask(fleet.b, picture) == ("encoded",)
    assert fleet.ask(fleet.b, picture, "felines") == ("loaded",)  # another name, the same adapter
    assert fleet.ask(fleet.a, picture) == ("loaded",)
    assert fleet.ask(fleet.b, other, "felines") == ("encoded",)
    assert fleet.ask(fleet.a, other, "cats") == ("loaded",)
