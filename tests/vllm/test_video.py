"""Two of vLLM's OpenAI servers as replicas (`ec_both`) on two hosts, asked about video clips.

A step is shorter than a clip's placeholder (chunked prefill). What they answer is held against a
server without a connector.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from engines import START_SECONDS, TwoHosts, connector, engine_settings
from examples.demo.engine_settings import EngineSettings
from nodes import ROOT, at_rest
from openai_servers import OpenAIServer, Part, Reply, text
from patience import scaled
from video_model import (
    MODEL_TOKENS_MAX,
    PLUGIN,
    clip,
    ensure_video_model,
    frame_list,
    picture,
)

pytestmark = pytest.mark.vllm
AT_ONCE_SECONDS = scaled(5.0)
QUESTION = text("What happens?")
STEP_TOKENS = 64
TRUSTING = "--trust-request-mm-kwargs"
"""Else vLLM lets no request say how many frames of its clips count."""
MAKERS: dict[str, Callable[[], Part]] = {
    **{f"clip {number}": partial(clip, number) for number in range(12)},
    "clip 0 backwards": partial(clip, 0, backwards=True),
    "frames": partial(frame_list, 20),
    "picture 0": partial(picture, 0),
    "picture 1": partial(picture, 1),
}
SEVERAL = (
    ("clip 1", "clip 2"),
    ("clip 2", "clip 1"),
    ("picture 0", "clip 3"),
    ("clip 4", "picture 1"),
    ("clip 5", "clip 5"),
)
FEW_FRAMES = 4
Asked = tuple[tuple[str, ...], int | None]
"""Names of items; how many frames of each clip count, if not all."""
ASKED: list[Asked] = [
    *(((name,), None) for name in MAKERS),
    *((names, None) for names in SEVERAL),
    (("clip 11",), FEW_FRAMES),
]


@cache
def item(name: str) -> Part:
    return MAKERS[name]()


def ask(server: OpenAIServer, asked: Asked) -> Reply:
    names, frames = asked
    few = {"video": {"num_frames": frames}}
    fields: dict[str, Any] = {"media_io_kwargs": few} if frames else {}
    return server.ask(*map(item, names), QUESTION, **fields)


class Replicas:
    """The two servers, and what a server without a connector answered."""

    def __init__(
        self,
        a: OpenAIServer,
        b: OpenAIServer,
        hosts: TwoHosts,
        answers: dict[Asked, tuple[int, ...]],
    ) -> None:
        self.a, self.b = a, b
        self.hosts = hosts
        self._answers = answers

    def ask(self, server: OpenAIServer, *names: str, frames: int | None = None) -> tuple[str, ...]:
        """Where the items came from, after a look at the tokens; what is new was published."""
        reply = ask(server, (names, frames))
        assert reply.tokens == self._answers[names, frames]
        assert reply.seconds < AT_ONCE_SECONDS
        node = self.hosts.a if server is self.a else self.hosts.b
        for origin, found in server.schedule.images(reply.request):
            if origin == "encoded":
                self.hosts.wait_for_holder(found.identifier, node)
        return server.origins(reply)


def video_settings(name: str, model: Path, work: Path, core: int, **more: Any) -> EngineSettings:
    arguments = {
        "limit_mm_per_prompt": {"image": 1, "video": 2},
        "max_model_len": MODEL_TOKENS_MAX,
        "max_num_batched_tokens": STEP_TOKENS,
    }
    settings = engine_settings(name, model, work, core=core, extra_arguments=arguments, **more)
    paths = filter(None, [str(PLUGIN), os.environ.get("PYTHONPATH")])
    settings.environment["PYTHONPATH"] = os.pathsep.join(paths)
    return settings


@pytest.fixture(scope="module")
def hosts(places: TwoHosts) -> Iterator[TwoHosts]:
    places.start()
    try:
        yield places
    finally:
        places.stop()


@pytest.fixture(scope="module")
def replicas(hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two servers at a time: the one without a connector has ended when the second starts."""
    work = tmp_path_factory.mktemp("video")
    model = ensure_video_model(ROOT / "build" / "models").resolve()
    of_a, of_b = (
        video_settings(node.node_id, model, work, core, ec_transfer_config=connector(node))
        for core, node in enumerate(hosts.nodes)
    )
    with OpenAIServer(of_a, TRUSTING) as a:
        with OpenAIServer(video_settings("plain", model, work, 1), TRUSTING) as plain:
            plain.wait_ready(START_SECONDS)
            answers = answers_of(plain)
        with OpenAIServer(of_b, TRUSTING) as b:
            for server in (a, b):
                server.wait_ready(START_SECONDS)
            yield Replicas(a, b, hosts, answers)
            for server in (a, b):
                assert server.is_healthy(), server.log_tail()
                assert "EngineDead" not in server.log_text(), server.log_tail()


def answers_of(plain: OpenAIServer) -> dict[Asked, tuple[int, ...]]:
    answers = {asked: ask(plain, asked).tokens for asked in ASKED}
    assert len(set(answers.values())) == len(answers), answers  # or tokens would prove nothing
    return answers


@pytest.fixture(autouse=True)
def _at_rest(hosts: TwoHosts) -> Iterator[None]:
    yield
    for node in hosts.nodes:
        at_rest(node)


@pytest.mark.parametrize("name", ["clip 0", "clip 0 backwards", "frames"])
def test_a_clip_is_encoded_once(replicas: Replicas, name: str) -> None:
    """Also the frames of a clip that is known already, in another order."""
    assert replicas.ask(replicas.a, name) == ("encoded",)
    assert replicas.ask(replicas.b, name) == ("loaded",)


def test_a_clip_of_which_fewer_frames_count_is_another_one(replicas: Replicas) -> None:
    assert replicas.ask(replicas.a, "clip 11") == ("encoded",)
    assert replicas.ask(replicas.b, "clip 11", frames=FEW_FRAMES) == ("encoded",)
    assert replicas.ask(replicas.a, "clip 11", frames=FEW_FRAMES) == ("loaded",)
    assert replicas.ask(replicas.b, "clip 11") == ("loaded",)


def test_two_clips_in_one_request(replicas: Replicas) -> None:
    assert replicas.ask(replicas.b, "clip 1") == ("encoded",)
    assert replicas.ask(replicas.a, "clip 2", "clip 1") == ("encoded", "loaded")
    assert replicas.ask(replicas.b, "clip 1", "clip 2") == ("loaded",)  # it kept the first


def test_a_picture_and_a_clip_in_one_request(replicas: Replicas) -> None:
    assert replicas.ask(replicas.a, "picture 0", "clip 3") == ("encoded", "encoded")
    assert replicas.ask(replicas.b, "picture 0", "clip 3") == ("loaded", "loaded")
    assert replicas.ask(replicas.b, "picture 1") == ("encoded",)
    assert replicas.ask(replicas.a, "clip 4", "picture 1") == ("encoded", "loaded")


def test_the_same_clip_twice_in_one_request(replicas: Replicas) -> None:
    assert replicas.ask(replicas.a, "clip 5", "clip 5")[0] == "encoded"
    assert set(replicas.ask(replicas.b, "clip 5", "clip 5")) == {"loaded"}


def test_a_clip_that_the_engine_kept_is_loaded_when_it_was_driven_out(replicas: Replicas) -> None:
    assert replicas.ask(replicas.a, "clip 6") == ("encoded",)
    assert replicas.ask(replicas.a, "clip 6") == ()
    for number in (7, 8, 9, 10):
        assert replicas.ask(replicas.a, f"clip {number}") == ("encoded",)
    assert replicas.ask(replicas.a, "clip 6") == ("loaded",)
