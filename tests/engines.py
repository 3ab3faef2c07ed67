"""Real vLLM engines for tests, on nodes that act as two hosts, and what they have to answer.

The model is as small as an image of more than a mebibyte allows; it is made once and kept under
build/. `reference` asks an engine without any connector what the tokens are, once for a session,
before any other engine starts. Every test takes pictures that no engine of its module has seen.
"""

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connectors.plugin import CONNECTOR_NAME
from examples.demo.engine import Answer, DemoEngine, Question
from examples.demo.engine_settings import EngineSettings, Placement
from examples.demo.model import ensure_model
from examples.demo.model_size import ModelSize, TextSize, VisionSize
from nodes import ROOT, NodeProcess
from patience import scaled
from two_hosts import OUTCOME_SECONDS, TwoHosts
from workers import worker_number

START_SECONDS = scaled(240.0)
FETCH_WAIT_SECONDS = 15.0
"""Bytes that are on their way come sooner, also on a busy machine, and who waits so long in vain is
told from who does not wait."""
PICTURES = 40
TELLING_MIN = 24
IMAGES_PER_PROMPT = 3
PROMPT = "What is in this picture?"

# One image is 256 rows of 1,152 floats: 1.18 MB, more than the smallest arena holds.
SIZE = ModelSize(
    name="test",
    vision=VisionSize(
        image_size=224, patch_size=14, hidden=128, intermediate=256, layers=2, heads=4
    ),
    text=TextSize(hidden=1152, intermediate=256, layers=2, heads=4, kv_heads=2, head_dim=64),
)
# Requests of several pictures, by their numbers in the album; the others are asked for alone.
NONE_KNOWN, ONE_KNOWN, TWICE = (0, 1, 2), (3, 4, 5), (6, 6)
SEVERAL = (NONE_KNOWN, ONE_KNOWN, TWICE)
CROSSED = ((0, 1), (1, 0), (3, 4), (4, 3))
"""The same pictures in either order."""
RETRAINED = 7
"""The one picture that an engine with other weights is asked about."""


@dataclass(frozen=True, slots=True)
class Album:
    """Pictures, and questions about them."""

    paths: tuple[Path, ...]

    def about(self, *numbers: int) -> Question:
        images = tuple(str(self.paths[number]) for number in numbers)
        return Question(images, "<image>" * len(images) + PROMPT)


@dataclass(frozen=True, slots=True)
class Reference:
    """What an engine without a connector answered."""

    answers: dict[Question, Answer]
    telling: tuple[int, ...]
    """Pictures that are asked for alone, and whose tokens no other picture has."""

    def tokens(self, question: Question) -> tuple[int, ...]:
        return self.answers[question].tokens

    def identifier(self, question: Question) -> str:
        """vLLM's name of the one image in `question`, the same in every engine."""
        (identifier,) = self.answers[question].identifiers
        return identifier


@pytest.fixture(scope="session")
def album(tmp_path_factory: pytest.TempPathFactory) -> Album:
    """Pieces of the demo's photographs, no two alike."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("album")
    # Not the rocket: most of its pieces are the same sky.
    sources = [ROOT / f"examples/demo/photographs/{name}.jpg" for name in ("cat", "coffee")]
    paths = []
    for number in range(PICTURES):
        with Image.open(sources[number % len(sources)]) as photograph:
            edge = min(photograph.size) // 2
            corner_x = (photograph.width - edge) * ((number * 7) % PICTURES) // PICTURES
            corner_y = (photograph.height - edge) * ((number * 11) % PICTURES) // PICTURES
            piece = photograph.crop((corner_x, corner_y, corner_x + edge, corner_y + edge))
            path = folder / f"{number}.png"
            piece.resize((224, 224)).save(path)
        paths.append(path)
    return Album(tuple(paths))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A link, so that a test can put other weights in the same place."""
    link = tmp_path_factory.mktemp("models") / "model"
    link.symlink_to(weights(seed=0))
    return link


def weights(*, seed: int) -> Path:
    return ensure_model(SIZE, ROOT / "build" / "models", seed=seed).resolve()


@pytest.fixture(scope="session")
def reference(album: Album, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Also the engine of somebody who merely installed us: nothing of ours may show in it."""
    questions = [album.about(number) for number in range(PICTURES)]
    questions += [album.about(*numbers) for numbers in (*SEVERAL, *CROSSED)]
    settings = engine_settings("reference", model, tmp_path_factory.mktemp("reference"))
    with DemoEngine(settings) as engine:
        engine.wait_ready(timeout_seconds=START_SECONDS)
        answers = {question: engine.generate(question) for question in questions}
        assert "lookup buffer" not in engine.settings.log_path.read_text()
    tokens = [answers[album.about(number)].tokens for number in range(PICTURES)]
    apart = {RETRAINED, *itertools.chain(*SEVERAL)}
    telling = [n for n in range(PICTURES) if tokens.count(tokens[n]) == 1 and n not in apart]
    assert len(telling) >= TELLING_MIN, f"too few pictures that tokens tell apart: {tokens}"
    return Reference(answers, tuple(telling))


def engine_settings(
    name: str, model: Path, work: Path, *, core: int = 0, **settings: Any
) -> EngineSettings:
    """An engine on one core, its own encoder cache with room for one image.

    Where tests run side by side, the first engine of each is on another core.
    """
    cores = sorted(os.sched_getaffinity(0))
    return EngineSettings(
        name=name,
        size=SIZE,
        model_directory=model,
        work_directory=work,
        images_per_prompt=IMAGES_PER_PROMPT,
        cores=(cores[(core + worker_number()) % len(cores)],),
        environment={"VLLM_LOG_STATS_INTERVAL": "0.1"},
        **{"placement": Placement.ONE_PROCESS, **settings},
    )


def connector(node: NodeProcess, **extra: Any) -> dict[str, Any]:
    """What the user of an engine on this node's host writes into `--ec-transfer-config`."""
    config = node.config
    return {
        "ec_connector": CONNECTOR_NAME,
        "ec_role": "ec_both",
        "ec_connector_extra_config": {
            "store_url": config.store_url,
            "node_socket": str(config.socket_path()),
            "capacity_bytes": config.capacity_bytes,
            "fetch_wait_seconds": FETCH_WAIT_SECONDS,
            **extra,
        },
    }


class EnginePair:
    """An engine on each of two hosts, under test; every answer is held against the reference."""

    def __init__(self, a: DemoEngine, b: DemoEngine, album: Album, reference: Reference) -> None:
        self.a = a
        self.b = b
        self._album = album
        self._reference = reference
        self._fresh = itertools.cycle(reference.telling)

    def fresh(self) -> Question:
        """About a picture that neither engine has seen, or not for long: then they have it no
        more, and its node only if that was not started anew."""
        return self._album.about(next(self._fresh))

    def identifier(self, question: Question) -> str:
        return self._reference.identifier(question)

    def tokens(self, question: Question) -> tuple[int, ...]:
        return self._reference.tokens(question)

    def ask(self, engine: DemoEngine, question: Question, *, within_seconds: float) -> Answer:
        """The answer, which is right and in time: `within_seconds` on an idle machine."""
        within_seconds = scaled(within_seconds)
        started = time.monotonic()
        answer = engine.generate(question, timeout_seconds=within_seconds + OUTCOME_SECONDS)
        seconds = time.monotonic() - started
        assert answer.tokens == self.tokens(question)
        assert seconds < within_seconds, f"{seconds:.2f} s, {answer}"
        return answer


@pytest.fixture(scope="module")
def engine_pair(
    request: pytest.FixtureRequest,
    places: TwoHosts,
    album: Album,
    model: Path,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EnginePair]:
    """Engine a with scheduler and worker in two processes, engine b with both in one.

    They start without nodes or Redis, and attach when there are some. A module may set
    PLACEMENTS to have it the other way round, and PREPARE to a function that changes the settings.
    """
    work = tmp_path_factory.mktemp("engines")
    placements = getattr(
        request.module, "PLACEMENTS", (Placement.TWO_PROCESSES, Placement.ONE_PROCESS)
    )
    settings = [
        engine_settings(
            node.node_id,
            model,
            work,
            core=core,
            placement=placement,
            ec_transfer_config=connector(node),
        )
        for core, (node, placement) in enumerate(zip(places.nodes, placements, strict=True))
    ]
    prepare = getattr(request.module, "PREPARE", None)
    settings = [prepare(each) for each in settings] if prepare else settings
    with DemoEngine(settings[0]) as a, DemoEngine(settings[1]) as b:
        for engine in (a, b):
            engine.wait_ready(timeout_seconds=START_SECONDS)
        yield EnginePair(a, b, album, reference)
    for engine in (a, b):
        assert "Traceback" not in engine.settings.log_path.read_text(), engine.log_tail()
