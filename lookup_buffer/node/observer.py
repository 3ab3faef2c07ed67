"""The dashboard's process: starts it, and passes its lines on to all open pages.

What `lookup_buffer.dashboard` computes takes milliseconds of Python each second, and a `why` may
take seconds, which would delay the node's loop. So it is a process of its own. It runs while a page
is open and LINGER_SECONDS longer. Its lines are not parsed. Called by `http_dashboard` and
`http_pages`; runs on `lb-http`.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from lookup_buffer.config import BufferConfig
from lookup_buffer.runtime import to_json

LINGER_SECONDS = 60.0
"""A page that is reloaded within this time keeps its history."""
HISTORY_SECONDS = 15 * 60
"""One point a second."""
WATCHERS_MAX = 16
QUESTIONS_MAX = 4
LINE_BYTES_MAX = 16 << 20
QUIET_SECONDS = 5.0
"""After this long without an event a comment is sent, to detect a client's disconnection."""
AGAIN_SECONDS = 2.0
"""Pause before a restart, after the process ended by itself."""
_log = logging.getLogger(__name__)
_PACKAGES = Path(__file__).resolve().parent.parent.parent


class TooMany(Exception):
    """A limit is reached; the text is for the requester."""


def observer_command(node: str, config: BufferConfig) -> tuple[Sequence[str], bytes]:
    """The command of the process, and its first input: secrets must not be on a command line."""
    program = (
        f"import sys; sys.path.insert(0, {str(_PACKAGES)!r}); "
        "from lookup_buffer.dashboard.main import main; main()"
    )
    told = {"node": node, "settings": json.loads(to_json(config))}
    return (sys.executable, "-P", "-c", program), json.dumps(told).encode() + b"\n"


class Observer:
    def __init__(self, command: tuple[Sequence[str], bytes]) -> None:
        self._command, self._told = command
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._watchers = 0
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._asked = 0
        self._used_at = 0.0
        self._points: deque[bytes] = deque(maxlen=HISTORY_SECONDS)
        self._last = b""
        self._news = asyncio.Event()

    def watch(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: the history, then one event each second.

        Raises:
            TooMany: WATCHERS_MAX pages are open.
        """
        if self._watchers >= WATCHERS_MAX:
            raise TooMany(f"{WATCHERS_MAX} pages of this node are open already; close one")
        return self._watch()

    async def _watch(self) -> AsyncGenerator[bytes, None]:
        self._watchers += 1
        try:
            self._start()
            yield b"event: history\ndata: [%b]\n\n" % b",".join(self._points)
            last, news = self._last, self._news
            while True:
                if last:
                    yield last
                try:
                    async with asyncio.timeout(QUIET_SECONDS):
                        await news.wait()
                    last, news = self._last, self._news
                except TimeoutError:
                    last = b": nothing new\n\n"
        finally:
            self._watchers -= 1
            self._used_at = time.monotonic()

    async def ask(self, key: str, namespace: str) -> bytes:
        """What is known of a key, as JSON.

        Raises:
            TooMany: QUESTIONS_MAX requests are in flight, or the process is restarting.
        """
        if len(self._questions) >= QUESTIONS_MAX:
            raise TooMany(f"{QUESTIONS_MAX} requests are in flight; try again in a moment")
        self._start()
        process = self._process
        if process is None or process.stdin is None:
            raise TooMany("the dashboard's process is restarting; try again in a moment")
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            question = {"number": number, "key": key, "namespace": namespace}
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            return await answer
        except OSError:  # the process ended, or is frozen and its pipe is full
            raise TooMany("the dashboard's process does not read; try again in a moment") from None
        finally:
            del self._questions[number]
            self._used_at = time.monotonic()

    def _start(self) -> None:
        self._used_at = time.monotonic()
        if self._task is None or self._task.done():
            self._launch()
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _launch(self) -> None:
        """Start the process without waiting for its program to load."""
        self._process = process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(self._told)
        process.stdin.flush()
        os.set_blocking(process.stdin.fileno(), False)  # /metrics must not wait for it

    def _is_wanted(self) -> bool:
        used = self._watchers or self._questions
        return bool(used) or time.monotonic() - self._used_at < LINGER_SECONDS

    async def _run(self) -> None:
        while True:
            if self._process is not None:
                try:
                    await self._hear(self._process)
                except ValueError:
                    _log.error(
                        "the dashboard's process sent a line above %d bytes; it is restarted",
                        LINE_BYTES_MAX,
                    )
                finally:
                    self._end(self._process)
            if not self._is_wanted():
                self._last = b""  # the history is in the points; the last event is out of date
                return
            self._tell(b"trouble", b'"the dashboard\'s process ended; it is restarted"')
            await asyncio.sleep(AGAIN_SECONDS)
            try:
                self._launch()
            except OSError as error:  # for example at the limit of processes
                _log.error("the dashboard's process cannot be started; retried: %s", error)

    async def _hear(self, process: "subprocess.Popen[bytes]") -> None:
        """Pass lines on until the process ends or no page is open."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=LINE_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, process.stdout)
        try:
            while self._is_wanted() and (line := await reader.readline()):
                self._take(*line.rstrip(b"\n").partition(b" ")[::2])
        finally:
            transport.close()

    def _take(self, kind: bytes, text: bytes) -> None:
        if kind == b"point":
            self._points.append(text)
        elif kind == b"answer":
            number, _, text = text.partition(b" ")
            answer = self._questions.get(int(number))
            if answer is not None and not answer.done():
                answer.set_result(text)
        else:
            self._tell(kind, text)

    def _tell(self, kind: bytes, text: bytes) -> None:
        self._last = b"event: %b\ndata: %b\n\n" % (kind, text)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill the process: it only reads, so that is safe at any moment."""
        self._process = None
        process.kill()
        process.wait()
        assert process.stdin is not None
        try:
            process.stdin.close()
        except OSError:  # unread input is lost, as intended
            pass
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(
                    TooMany("the dashboard's process ended; try again in a moment")
                )
