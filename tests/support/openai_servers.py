"""vLLM's own OpenAI server in processes of its own, with HTTP requests as its users send them.

Takes the settings of an engine (`engines.engine_settings`), so that its answers can be compared
with those of an engine with the same ones and no connector.
"""

import base64
import http.client
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import fork_server
from examples.demo.counting_scheduler import LOG_SETTING
from examples.demo.engine import Question, knows_namespace
from examples.demo.engine_settings import (
    EngineSettings,
    Placement,
    engine_arguments,
    engine_environment,
)
from examples.demo.schedule_log import ScheduleLog
from nodes import ROOT
from patience import scaled
from servers import free_port

Part = dict[str, Any]

# A prompt of content parts and nothing else: what an engine is asked directly.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part.type == 'video' %}<video>"
    "{% else %}<image>{% endif %}"
    "{% endfor %}{% endfor %}"
)
MODEL_NAME = "model"
CHAT = "chatcmpl-"
COMPLETIONS = "/v1/chat/completions"
END_SECONDS = scaled(20.0)
ASK_SECONDS = scaled(60.0)
_LOG_TAIL_LINES = 60
# `vllm serve` does the same, but looks for the version of a distribution called vllm.
_MODULE = "vllm.entrypoints.openai.api_server"
# vLLM's own choice on GPUs. On CPU its steps do not overlap all the same: `engine_plugins`.
_SCHEDULER = "examples.demo.counting_scheduler.CountingAsyncScheduler"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back over HTTP."""

    status: int
    body: dict[str, Any]
    seconds: float

    @property
    def tokens(self) -> tuple[int, ...]:
        assert self.status == 200, self
        return tuple(self.body["choices"][0]["token_ids"])

    @property
    def request(self) -> str:
        """The server's name for it; the engine appends a random suffix."""
        return str(self.body.get("id") or self.body["request_id"])

    @property
    def finish_reason(self) -> str:
        assert self.status == 200, self
        return str(self.body["choices"][0]["finish_reason"])

    @property
    def error(self) -> str:
        assert self.status >= 400, self
        return str(self.body["error"]["message"])


class OpenAIServer:
    """A running server. `close` is idempotent; several may start at the same time."""

    def __init__(self, settings: EngineSettings, *flags: str, forked: bool = True) -> None:
        # The API server has a process of its own whatever the settings say.
        self.settings = settings = replace(settings, placement=Placement.TWO_PROCESSES)
        self.schedule = ScheduleLog(settings.schedule_path)
        settings.work_directory.mkdir(parents=True, exist_ok=True)
        template = settings.work_directory / "chat.jinja"
        template.write_text(CHAT_TEMPLATE)
        self.port = free_port()
        arguments = ["--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--served-model-name", MODEL_NAME, "--chat-template", str(template)]
        arguments += ["--chat-template-content-format", "openai", "--scheduler-cls", _SCHEDULER]
        arguments += ["--additional-config", json.dumps({LOG_SETTING: str(settings.schedule_path)})]
        self._process = fork_server.launch(
            _MODULE,
            [*arguments, *_flags(engine_arguments(settings)), *flags],
            log=settings.log_path,
            environment=fork_server.own_environment() | engine_environment(settings),
            forked=forked,
        )
        self._exit = os.pidfd_open(self._process.pid)
        self._closed = False

    def wait_ready(self, timeout_seconds: float) -> None:
        """Until it answers, and its connector shares."""
        deadline = time.monotonic() + timeout_seconds
        while not (self.is_healthy() and knows_namespace(self.settings)):
            if self._has_ended() or time.monotonic() > deadline:
                pytest.fail(f"the server does not start:\n{self.log_tail()}")
            time.sleep(0.1)

    def is_healthy(self) -> bool:
        """As a load balancer asks: 503 when the engine is dead."""
        try:
            with connected(self.port, 5.0) as connection:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
        except OSError:
            return False

    def ask(self, *parts: Part, tokens: int = 8, **fields: Any) -> Reply:
        """One chat completion, greedy, of exactly so many tokens."""
        return self.post(COMPLETIONS, chat_of(parts, tokens) | fields)

    def ask_about(self, question: Question, **fields: Any) -> Reply:
        """The question that another engine is asked directly."""
        return self.ask(*parts_of(question), tokens=question.tokens, **fields)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Reply:
        return post(self.port, path, body, **headers)

    def metrics(self) -> str:
        """vLLM's own /metrics."""
        with connected(self.port, ASK_SECONDS) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

    def metric(self, name: str) -> float:
        """A counter or gauge of vLLM's own /metrics."""
        lines = self.metrics().splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(name)]
        assert values, name
        return sum(values)

    @contextmanager
    def asking(self, *parts: Part, name: str, tokens: int = 8) -> Iterator[None]:
        """A request under way; leaving hangs up, by which vLLM aborts it. Its name there begins
        with CHAT and `name`."""
        with self.posting(COMPLETIONS, chat_of(parts, tokens) | {"request_id": name}):
            yield

    @contextmanager
    def posting(self, path: str, body: dict[str, Any]) -> Iterator[None]:
        """As `asking`, whatever is asked."""
        with connected(self.port, ASK_SECONDS) as connection:
            _send(connection, path, body)
            yield

    def origins(self, reply: Reply) -> tuple[str, ...]:
        """ "encoded" or "loaded" for each item that vLLM's own encoder cache did not hold."""
        return tuple(origin for origin, _ in self.schedule.images(reply.request))

    def log_text(self) -> str:
        return self.settings.log_path.read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-_LOG_TAIL_LINES:])

    def close(self) -> None:
        """SIGTERM as an operator would, then whatever is left of its process group."""
        if self._closed:
            return
        self._closed = True
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        select.select([self._exit], [], [], END_SECONDS)
        os.close(self._exit)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10.0)

    def _has_ended(self) -> bool:
        return bool(select.select([self._exit], [], [], 0.0)[0])

    def __enter__(self) -> "OpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def post(port: int, path: str, body: dict[str, Any], **headers: str) -> Reply:
    """To a server of this machine."""
    started = time.monotonic()
    with connected(port, ASK_SECONDS) as connection:
        _send(connection, path, body, **headers)
        response = connection.getresponse()
        text = response.read()
    return Reply(response.status, json.loads(text or "{}"), time.monotonic() - started)


@contextmanager
def connected(port: int, timeout_seconds: float) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)
    try:
        yield connection
    finally:
        connection.close()


def overlapping(settings: EngineSettings) -> EngineSettings:
    """With a PYTHONPATH by which the engine finds `engine_plugins`."""
    paths = [str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return replace(settings, environment={**settings.environment, **path})


def parts_of(question: Question) -> list[Part]:
    pictures = [image(Path(path)) for path in question.images]
    return [*pictures, text(question.prompt.replace("<image>", ""))]


def text(words: str) -> Part:
    return {"type": "text", "text": words}


def image(path: Path, **fields: Any) -> Part:
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def chat_of(parts: Sequence[Part], tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": list(parts)}],
        "temperature": 0.0,
        "max_tokens": tokens,
        "ignore_eos": True,  # a random model may say "end" early
        "return_token_ids": True,
    }


def _send(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any], **headers: str
) -> None:
    connection.request(
        "POST", path, json.dumps(body), {"Content-Type": "application/json", **headers}
    )


def _flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments of `vllm.LLM` as the server's command line has them."""
    flags: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if name == "disable_log_stats":  # the one switch without a "no-" form
            flags += ["--disable-log-stats"] * value
        elif isinstance(value, bool):
            flags.append(f"--{option}" if value else f"--no-{option}")
        else:
            flags += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
