"""The observer: the process that asks the store what the fleet does, for all pages that are open.

What `lookup_buffer.dashboard` works out takes milliseconds of Python each second, and a question
may take seconds: beside the node's loop that would be in everybody's way. So it is a process of
its own, which runs while somebody looks on and LINGER_SECONDS longer. Its lines are passed on
unread, to everybody at once. All of this runs on the HTTP listener's loop.
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
"""A page that is loaded again finds its history."""
HISTORY_SECONDS = 15 * 60
"""One point a second."""
WATCHERS_MAX = 16
QUESTIONS_MAX = 4
LINE_BYTES_MAX = 16 << 20
QUIET_SECONDS = 5.0
"""After so long without news something is sent all the same, or nobody sees that a client left."""
AGAIN_SECONDS = 2.0
"""After the observer ended by itself."""
_log = logging.getLogger(__name__)
_PACKAGES = Path(__file__).resolve().parent.parent.parent


class TooMany(Exception):
    """More is not done at once; the text is for who asked."""


def observer_command(node: str, config: BufferConfig) -> tuple[Sequence[str], bytes]:
    """The observer's program, and what it is told first: secrets stand on no command line."""
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
        """Events as browsers hear them: what was, then what is, each second.

        Raises:
            TooMany: watch already.
        """
        if self._watchers >= WATCHERS_MAX:
            raise TooMany(f"{WATCHERS_MAX} pages look at this node already")
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
            TooMany: are asking, or the observer has just ended.
        """
        if len(self._questions) >= QUESTIONS_MAX:
            raise TooMany("others are asking already; try again in a moment")
        self._start()
        process = self._process
        if process is None or process.stdin is None:
            raise TooMany("the observer starts anew; try again in a moment")
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            question = {"number": number, "key": key, "namespace": namespace}
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            return await answer
        except OSError:  # it has ended, or is frozen and its pipe is full
            raise TooMany("the observer does not hear; try again in a moment") from None
        finally:
            del self._questions[number]
            self._used_at = time.monotonic()

    def _start(self) -> None:
        self._used_at = time.monotonic()
        if self._task is None or self._task.done():
            self._launch()
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _launch(self) -> None:
        """What waits for the program to be loaded waits in it, not here."""
        self._process = process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(self._told)
        process.stdin.flush()
        os.set_blocking(process.stdin.fileno(), False)  # whoever scrapes waits for no observer

    def _is_wanted(self) -> bool:
        used = self._watchers or self._questions
        return bool(used) or time.monotonic() - self._used_at < LINGER_SECONDS

    async def _run(self) -> None:
        while True:
            if self._process is not None:
                try:
                    await self._hear(self._process)
                except ValueError:
                    _log.error("the observer said more than %d bytes at once", LINE_BYTES_MAX)
                finally:
                    self._end(self._process)
            if not self._is_wanted():
                self._last = b""  # what was is in the points; what is, is not known any more
                return
            self._tell(b"trouble", b'"the observer ended; it is started again"')
            await asyncio.sleep(AGAIN_SECONDS)
            try:
                self._launch()
            except OSError as error:  # as where there are too many processes
                _log.error("the observer cannot be started: %s", error)

    async def _hear(self, process: "subprocess.Popen[bytes]") -> None:
        """Until it ends, or nobody wants it."""
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
        """It only reads, so it may be killed at any moment."""
        self._process = None
        process.kill()
        process.wait()
        assert process.stdin is not None
        try:
            process.stdin.close()
        except OSError:  # it had not heard all, and never will
            pass
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(TooMany("the observer ended; try again in a moment"))
