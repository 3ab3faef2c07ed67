"""Real vLLM engines for tests, on nodes that act as two hosts, and what they have to answer.

The model is as small as an image of more than a mebibyte allows; it is made once and kept under
build/. `reference` asks an engine without any connector what the tokens are, once for a session,
before any other engine starts. Every test takes pictures that no engine of its module has seen.

`TwoHosts` is a Valkey and two nodes, each of which plays the node of one host. Of engines that
share KV a third one without any connector says what the tokens are; how many tokens an engine
computed is counted from what vLLM's own scheduler planned.
"""

import itertools
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fork_server
from connectors.plugin import CONNECTOR_NAME, KV_CONNECTOR_NAME
from examples.demo.engine import PROCESS_MODULE, Answer, DemoEngine, Process, Question
from examples.demo.engine_settings import EngineSettings, Placement, engine_environment
from examples.demo.model import ensure_model
from examples.demo.model_size import ModelSize, TextSize, VisionSize
from examples.demo.schedule_log import Step
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from nodes import ROOT, NodeProcess, wait_until
from patience import scaled
from proxies import Relay
from servers import free_port, valkey_executable, worker_number
from store import BlockingStore, EmbeddedServer, open_store

OUTCOME_SECONDS = 10.0
STORE_SECONDS = 5.0
"""Where a store is not heard in time, engines encode again what is stored, as they should; and a
machine that is short of processors or memory may well stop for a second."""


ON_GPU = torch.cuda.is_available()
"""Where the engines then run, if vLLM's build is for it."""


class Engine(DemoEngine):
    """A real engine, whose process is a fork where it can be: see `fork_server`."""

    def _started(self, connection: socket.socket) -> Process:
        return fork_server.launch(
            PROCESS_MODULE,
            ["{0}"],
            log=self.settings.log_path,
            environment=fork_server.own_environment() | engine_environment(self.settings),
            keep=[connection.fileno()],
            forked=not ON_GPU,
        )


class TwoHosts:
    """A Valkey and two nodes at fixed places, so that they can be ended and started again.

    Whatever node b fetches from node a goes through `relay`.
    """

    def __init__(self, store_seconds: float) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="lbe-"))
        self._store_seconds = store_seconds
        self.relay = Relay()
        self.server = self._server()
        port = free_port()
        self.relay.connect_to(port)
        advertised = f"tcp://127.0.0.1:{self.relay.port}"
        self.a = self._node("host-a", listen=f"tcp://127.0.0.1:{port}", advertise=advertised)
        self.b = self._node("host-b")
        self.store = self._open_store()
        self._close_server()

    @property
    def nodes(self) -> tuple[NodeProcess, NodeProcess]:
        return self.a, self.b

    def start(self) -> None:
        """Both nodes see each other when this returns."""
        self.restart_server()
        for node in self.nodes:
            node.start()
        wait_until(lambda: len(self.store.beats()) == 2, OUTCOME_SECONDS, "both nodes beat")

    def restart_server(self) -> None:
        """After its end by any means: a new one, empty, at the same address."""
        self._close_server()
        self.server = self._server()
        self.store = self._open_store()

    def stop(self) -> None:
        self.relay.let_go()
        for node in self.nodes:
            node.end()
            assert "Traceback" not in node.log_text(), node.log_text()
        self._close_server()

    def remove(self) -> None:
        self.relay.close()
        shutil.rmtree(self.directory)

    def nodes_text(self) -> str:
        """For a failure's report: what the nodes that run count, and what they logged."""
        lines = []
        for node in filter(NodeProcess.alive, self.nodes):
            counts: dict[str, int] = {}
            with suppress(LookupBufferError):  # it may stand still, or end now
                counts = {name: count for name, count in node.stats().items() if count}
            lines.append(f"{node.node_id}: {counts}\n{node.log_text()}")
        return "\n".join(lines)

    def holders(self, identifier: str) -> set[str]:
        """The nodes that Redis names for an image."""
        records = [record for record in self.store.scan() if record.key == identifier]
        return {location.node for record in records for location in record.locations}

    def wait_for_holder(self, identifier: str, node: NodeProcess) -> None:
        """What an engine encodes is stored and published in the background."""
        wait_until(
            lambda: node.node_id in self.holders(identifier),
            OUTCOME_SECONDS,
            f"{node.node_id} publishes {identifier}",
        )

    def wait_until_attached(self) -> None:
        """Until scheduler and worker of one engine on each node have come (back) to it."""
        for node in self.nodes:
            with node.client("stats") as client:  # a session of its own, the third
                wait_until(
                    lambda: client.stats()["sessions_opened"] >= 3,
                    OUTCOME_SECONDS,
                    f"the engine attaches to {node.node_id}",
                )

    def wait_for_beats(self, node: NodeProcess, count: int) -> None:
        """So many from now on."""
        first = self.store.beats()[node.node_id].sequence
        due = first + count
        wait_until(lambda: self.store.beats()[node.node_id].sequence >= due, OUTCOME_SECONDS)

    def sees(self, node: NodeProcess, identifier: str) -> bool:
        """Whether this node knows of a living one that holds the image."""
        (record,) = [record for record in self.store.scan() if record.key == identifier]
        namespace = Namespace(self.store.namespaces()[record.namespace])
        with LookupBuffer(node.config, namespace) as client:
            return client.has_caches([TensorKey(identifier)], timeout=STORE_SECONDS) == [True]

    def _server(self) -> EmbeddedServer:
        return EmbeddedServer.start(
            self.directory / "valkey", timeout_seconds=scaled(10.0), executable=valkey_executable()
        )

    def _open_store(self) -> BlockingStore:
        return open_store(self.server.url, call_timeout_seconds=STORE_SECONDS)

    def _close_server(self) -> None:
        self.store.close()
        self.server.close()

    def _node(self, name: str, **settings: Any) -> NodeProcess:
        return NodeProcess(
            self.directory / name,
            node_id=name,
            store_url=self.server.url,
            store_timeout_seconds=self._store_seconds,
            **settings,
        )


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    """Where the module's hosts are; nothing runs there yet. A module that stops the store says by
    `STORE_SECONDS` how long its nodes wait for it."""
    hosts = TwoHosts(getattr(request.module, "STORE_SECONDS", STORE_SECONDS))
    yield hosts
    hosts.remove()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure of a test that has such hosts says what their nodes counted and logged."""
    report = yield
    hosts: TwoHosts | None = getattr(item, "funcargs", {}).get("places")
    if report.failed and hosts is not None:
        report.sections.append(("The nodes", hosts.nodes_text()))
    return report


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
        """Without numbers it is a question about none."""
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
    questions += [album.about(*numbers) for numbers in ((), *SEVERAL, *CROSSED)]
    settings = engine_settings("reference", model, tmp_path_factory.mktemp("reference"))
    with Engine(settings) as engine:
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
    """An engine on one core, or the GPU, its own encoder cache with room for one image.

    Where tests run side by side, the first engine of each is on another core.
    """
    cores = sorted(os.sched_getaffinity(0))
    return EngineSettings(
        name=name,
        size=SIZE,
        model_directory=model,
        work_directory=work,
        images_per_prompt=IMAGES_PER_PROMPT,
        cores=() if ON_GPU else (cores[(core + worker_number()) % len(cores)],),
        environment={"VLLM_LOG_STATS_INTERVAL": "0.1"},
        **settings,
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

    def __init__(self, a: Engine, b: Engine, album: Album, reference: Reference) -> None:
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

    def ask(self, engine: Engine, question: Question, *, within_seconds: float) -> Answer:
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
    with Engine(settings[0]) as a, Engine(settings[1]) as b:
        for engine in (a, b):
            engine.wait_ready(timeout_seconds=START_SECONDS)
        yield EnginePair(a, b, album, reference)
    for engine in (a, b):
        assert "Traceback" not in engine.settings.log_path.read_text(), engine.log_tail()


BLOCK, CHUNK = 32, 64
BLOCKS_OF_A = 70
BLOCK_BYTES = 64 << 10
"""Two layers, keys and values of two heads of 64 floats for 32 tokens."""
SAVE_SECONDS = 10.0
HANDOFF_SECONDS = 8.0
KV_FETCH_WAIT_SECONDS = 8.0
"""Both longer than what comes is on its way, also on a busy machine."""
FAULT_VARIABLE = "LOOKUP_BUFFER_TEST_KV_FAULT"
"""Names the file of `engine_plugins`."""
ANSWER_SECONDS = scaled(20.0)
_LETTERS = range(7, 263)
"""Tokens of single bytes."""


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """Tokens that no other seed gives."""
    return tuple(random.Random(seed).choices(_LETTERS, k=length))


def ask_for(tokens: tuple[int, ...], answer: int = 8, **transfer: Any) -> Question:
    return Question((), "", answer, tokens, transfer or None)


def kv_connector(node: NodeProcess, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """What the user of an engine on this node's host writes into `--kv-transfer-config`."""
    config = node.config
    return {
        "kv_connector": KV_CONNECTOR_NAME,
        "kv_role": role,
        "kv_connector_extra_config": {
            "store_url": config.store_url,
            "node_socket": str(config.socket_path()),
            "capacity_bytes": config.capacity_bytes,
            "chunk_tokens": CHUNK,
            "behind_router": True,
            "handoff_wait_seconds": HANDOFF_SECONDS,
            "fetch_wait_seconds": KV_FETCH_WAIT_SECONDS,
            **extra,
        },
    }


def one_of_several(node: NodeProcess) -> dict[str, Any]:
    """Ours, loaded by its path, as the only one of vLLM's MultiConnector."""
    ours = kv_connector(node) | {
        "kv_connector": "FaultyKVConnector",
        "kv_connector_module_path": "engine_plugins",
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours]},
    }


def kv_engine_settings(
    name: str, model: Path, work: Path, core: int, placement: Placement, **arguments: Any
) -> EngineSettings:
    sizes = {"max_model_len": 2048, "max_num_batched_tokens": 512, "block_size": BLOCK}
    extra = {**sizes, **arguments}
    return engine_settings(name, model, work, core=core, placement=placement, extra_arguments=extra)


def interrupted(steps: list[Step]) -> set[str]:
    """Requests that vLLM stopped in the middle and took up again."""
    seen: dict[str, int] = {}
    found = set()
    for number, step in enumerate(steps):
        for request in step.requests:
            if seen.get(request, number) < number - 1:
                found.add(request)
            seen[request] = number
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    answer: Answer
    computed: int
    """Tokens of the prompt that the engine computed; all of them, were it alone."""


class KvPair:
    """Engines a and b under test; every answer is held against one without a connector."""

    def __init__(
        self, hosts: TwoHosts, a: Engine, b: Engine, reference: Engine, fault: Path
    ) -> None:
        self.hosts = hosts
        self.fault = fault
        """While there is this file, engine b's loads fail after as many chunks as it says."""
        self.a = a
        self.b = b
        self.reference = reference

    def tokens(self, question: Question) -> tuple[int, ...]:
        plain = Question(question.images, question.prompt, question.tokens, question.token_ids)
        return self.reference.generate(plain).tokens

    def ask(self, engine: Engine, question: Question) -> Asked:
        """The answer, which is right."""
        before = len(engine.schedule.steps())
        answer = engine.generate(question, timeout_seconds=ANSWER_SECONDS)
        assert answer.tokens == self.tokens(question)
        steps = engine.schedule.steps()[before:]
        return Asked(answer, sum(step.tokens for step in steps) - (len(answer.tokens) - 1))

    def stored(self, node: NodeProcess) -> int:
        """Chunks that Redis says this node holds."""
        store = self.hosts.store
        kinds = store.namespaces()
        return sum(
            kinds[record.namespace].get("content") == "kv_cache"
            for record in store.scan()
            if any(location.node == node.node_id for location in record.locations)
        )

    def ask_and_store(self, engine: Engine, node: NodeProcess, question: Question) -> Asked:
        """Also wait until what is new of it was published: that comes after the answer."""
        before = self.stored(node)
        asked = self.ask(engine, question)
        end = len(question.token_ids) + question.tokens - 1
        fresh = end // CHUNK - (len(question.token_ids) - asked.computed) // CHUNK
        wait_until(lambda: self.stored(node) >= before + fresh, SAVE_SECONDS, "KV is published")
        return asked


@pytest.fixture(scope="module")
def kv_pair(
    places: TwoHosts, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KvPair]:
    """Engine a with scheduler and worker in two processes, and a cache that four prompts fill;
    engine b with both in one, vLLM's own prefix cache on, and our connector as one of several. Both
    share encoder outputs as well."""
    places.start()
    work = tmp_path_factory.mktemp("kv")

    def settings(name: str, core: int, placement: Placement, **arguments: Any) -> EngineSettings:
        return kv_engine_settings(name, model, work, core, placement, **arguments)

    two, one = Placement.TWO_PROCESSES, Placement.ONE_PROCESS
    of_a = settings(
        "a",
        0,
        two,
        kv_transfer_config=kv_connector(places.a),
        ec_transfer_config=connector(places.a),
        kv_cache_memory_bytes=BLOCKS_OF_A * BLOCK_BYTES,
    )
    of_b = settings(
        "b",
        1,
        one,
        kv_transfer_config=one_of_several(places.b),
        ec_transfer_config=connector(places.b),
        enable_prefix_caching=True,
    )
    fault = work / "fault"
    paths = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    of_b.environment.update({FAULT_VARIABLE: str(fault), "PYTHONPATH": paths.rstrip(os.pathsep)})
    of_b.environment["PYTHONHASHSEED"] = "1"  # unlike a: a fork server of its own
    with (
        Engine(of_a) as a,
        Engine(of_b) as b,
        Engine(settings("reference", 0, one)) as reference,
    ):
        for engine in (a, b, reference):
            engine.wait_ready(timeout_seconds=START_SECONDS)
        yield KvPair(places, a, b, reference, fault)
    for engine in (a, b):
        assert "Traceback" not in engine.settings.log_path.read_text(), engine.log_tail()
    places.stop()
