"""One real vLLM engine in its own processes, as the demo and the end-to-end tests use it.

Runs in the controlling process and imports neither vLLM nor torch. The engine is a session leader
with its own process group: a Ctrl-C in the terminal does not reach it, and every process that it
started ends with it.
"""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from connectors.plugin import CONNECTOR_NAME, KV_CONNECTOR_NAME
from examples.demo.engine_settings import EngineSettings, engine_arguments, engine_environment
from examples.demo.interpreter import python_command
from examples.demo.schedule_log import ScheduleLog

PROCESS_MODULE = "examples.demo.engine_process"
_LOG_TAIL_LINES = 40
_POLL_SECONDS = 0.02
# Enough for a machine ten times slower than two idle cores, which take 40 s and 6 s.
START_SECONDS = 600.0
ANSWER_SECONDS = 300.0
_NAMED = re.compile(r"lookup buffer: (namespace [0-9a-f]{64}|.*shares nothing)")


def knows_namespace(settings: EngineSettings) -> bool:
    """Whether the engine's connector, if any, has logged its namespace, or that it shares nothing:
    before that it misses whatever it is asked for."""
    arguments = json.dumps(engine_arguments(settings), default=str)
    if CONNECTOR_NAME not in arguments and KV_CONNECTOR_NAME not in arguments:
        return True
    return _NAMED.search(settings.log_path.read_text(errors="replace")) is not None


class EngineFailure(Exception):
    """The engine did not start, did not answer in time, or ended. The text ends with its log."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request: a prompt with one "<image>" for each photograph."""

    images: tuple[str, ...]
    prompt: str
    tokens: int = 8
    token_ids: tuple[int, ...] = ()
    """Used instead of `prompt`, if not empty."""
    kv_transfer_params: Mapping[str, Any] | None = field(default=None, hash=False)
    """As in vLLM's requests, for its KV connector."""

    @classmethod
    def about(cls, photograph: Path, text: str, *, tokens: int = 8) -> Self:
        return cls((str(photograph),), f"<image>{text}", tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered, and how it got the encodings of the images."""

    request: str
    tokens: tuple[int, ...]
    finish_reason: str
    queued_seconds: float
    ttft_seconds: float
    """From queued to first token, both by the clock of vLLM's engine core."""
    origins: tuple[str, ...]
    """"encoded" or "loaded" for each image that vLLM's own encoder cache did not hold."""
    identifiers: tuple[str, ...]
    """vLLM's identifiers of the same images."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """What vLLM's KV connector returns for the request, to be passed to another engine."""


@dataclass(frozen=True, slots=True)
class StartFacts:
    import_seconds: float
    start_seconds: float
    pid: int


class Process(Protocol):
    """A process that was started, as `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...


class DemoEngine:
    """A running engine. Not thread-safe: one command at a time. `close` is idempotent.

    `start` and `submit` return at once, `wait_ready` and `collect` wait, so that two engines can
    start or answer at the same time.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.schedule = ScheduleLog(settings.schedule_path)
        self.facts: StartFacts | None = None
        settings.work_directory.mkdir(parents=True, exist_ok=True)
        settings.schedule_path.unlink(missing_ok=True)
        ours, theirs = socket.socketpair()
        self._connection = ours
        self._received = b""
        with theirs:
            self._process = self._started(theirs)
        self._exit = os.pidfd_open(self._process.pid)
        self._closed = False
        # Not in the arguments of the process: the connector's settings may hold a secret.
        self._send(
            {
                "cores": settings.cores,
                "arguments": engine_arguments(settings),
                "schedule_path": str(settings.schedule_path),
            }
        )

    def _started(self, connection: socket.socket) -> Process:
        """The engine's process, a session leader that inherits its end of `connection`."""
        with self.settings.log_path.open("wb") as log:
            return subprocess.Popen(
                python_command(PROCESS_MODULE, str(connection.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | engine_environment(self.settings),
                pass_fds=(connection.fileno(),),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Id of the engine's process and of its process group, which holds all that it started."""
        return self._process.pid

    def wait_ready(self, *, timeout_seconds: float = START_SECONDS) -> StartFacts:
        """Return when the engine can answer and its connector, if any, has logged its namespace.

        Raises:
            EngineFailure: it was not ready in time, or ended.
        """
        if self.facts is None:
            deadline = time.monotonic() + timeout_seconds
            facts = StartFacts(**self._receive("ready", timeout_seconds))
            self._wait_named(deadline)
            self.facts = facts
        return self.facts

    def _wait_named(self, deadline: float) -> None:
        while not knows_namespace(self.settings):
            if time.monotonic() > deadline:
                raise self._failure("did not log its namespace in time")
            time.sleep(_POLL_SECONDS)

    def generate(self, question: Question, *, timeout_seconds: float = ANSWER_SECONDS) -> Answer:
        """The answer to one question."""
        self.submit([question])
        return self.collect(timeout_seconds=timeout_seconds)[0]

    def submit(self, questions: Sequence[Question]) -> None:
        """Send questions that the engine works on together."""
        self._send({"generate": [asdict(question) for question in questions]})

    def collect(self, *, timeout_seconds: float = ANSWER_SECONDS) -> list[Answer]:
        """The answers to the questions of the last `submit`, in their order."""
        return [self._answer(fields) for fields in self._receive("answers", timeout_seconds)]

    def _answer(self, fields: dict[str, Any]) -> Answer:
        images = self.schedule.images(fields["request"])
        return Answer(
            **{**fields, "tokens": tuple(fields["tokens"])},
            origins=tuple(origin for origin, _ in images),
            identifiers=tuple(item.identifier for _, item in images),
        )

    @property
    def encoder_runs(self) -> int:
        """The number of images that vLLM's scheduler has had encoded since the start."""
        return self.schedule.encoder_runs()

    def log_tail(self) -> str:
        text = self.settings.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def kill(self) -> None:
        """Kill every process of the engine at once, as a crash of the machine would."""
        self._end(patience_seconds=0.0)

    def close(self, *, timeout_seconds: float = 15.0) -> None:
        """Shut the engine down; kill the processes that remain after the timeout."""
        if self._closed:
            return
        with contextlib.suppress(EngineFailure):
            self._send({"stop": True})
        self._end(patience_seconds=timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Without waiting if something failed or the user pressed Ctrl-C.
        self.close(timeout_seconds=15.0 if kind is None else 0.0)

    def _end(self, *, patience_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        # Nobody has waited for the process yet: its id, which is also that of the group, is not
        # reused before the group is killed.
        select.select([self._exit], [], [], patience_seconds)
        os.close(self._exit)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=10.0)
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._failure("closed its connection") from error

    def _receive(self, kind: str, timeout_seconds: float) -> Any:
        message = json.loads(self._receive_line(timeout_seconds))
        if kind not in message:
            raise self._failure(f"answered {message.get('error', message)}")
        return message[kind]

    def _receive_line(self, timeout_seconds: float) -> bytes:
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._received:
            self._connection.settimeout(max(deadline - time.monotonic(), _POLL_SECONDS))
            try:
                received = self._connection.recv(1 << 16)
            except TimeoutError as error:
                raise self._failure(f"sent nothing for {timeout_seconds:.0f} s") from error
            except OSError as error:
                raise self._failure("broke its connection") from error
            if not received:
                raise self._failure("ended")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _failure(self, what: str) -> EngineFailure:
        name, path = self.settings.name, self.settings.log_path
        return EngineFailure(f"engine {name} {what}; end of {path}:\n{self.log_tail()}")
