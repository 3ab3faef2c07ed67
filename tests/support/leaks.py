"""Finds the processes and threads that a test left behind. Reads /proc; does not depend on pytest.

A process is ours if it descends from this one, or if it carries this run's mark in its environment:
a node detaches itself from its parent, and the mark is what remains of its origin.
"""

import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "LOOKUP_BUFFER_TEST_RUN"
POLL_SECONDS = 0.02
# Helpers of the standard library that one process keeps for its whole life.
LASTING_COMMANDS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: int  # clock ticks since boot: tells a reused pid from the old process
    parent: int
    state: str
    name: str

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.started

    def command(self) -> str:
        """What it runs now, or just its name, once it has ended."""
        command = b""
        with suppress(OSError):
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        return command.replace(b"\0", b" ").decode(errors="replace").strip() or f"[{self.name}]"

    def lasts(self) -> bool:
        command = self.command()
        return any(word in command for word in LASTING_COMMANDS)

    def __str__(self) -> str:
        hint = "; ended, but nobody waited for it" if self.state == "Z" else ""
        return (
            f"process {self.pid} (parent {self.parent}, state {self.state}{hint}): {self.command()}"
        )


@dataclass(frozen=True, slots=True)
class Baseline:
    processes: frozenset[tuple[int, int]]
    threads: frozenset[threading.Thread]


class LeakGuard:
    """One per test run. Used from the main thread only.

    It looks before and after each test, so it reads no more than it has to: of what ran before it,
    and so is not ours, nothing but the one line that tells it from a newer process of that number.
    """

    def __init__(self, mark: str) -> None:
        self._needle = f"{MARK}={mark}".encode()
        self._strangers = frozenset(process.identity for process in _all_processes())
        self.at_start = self.baseline()

    @classmethod
    def install(cls) -> "LeakGuard":
        """Marks this process' environment, which every program started from it inherits.

        Where a run of tests has started this one, as pytest-xdist starts its workers, the mark
        begins with that run's: what is ours is also theirs, and not the other way round.
        """
        mark = os.environ.get(MARK, "") + uuid.uuid4().hex
        os.environ[MARK] = mark
        return cls(mark)

    def baseline(self) -> Baseline:
        return Baseline(
            processes=frozenset(process.identity for process in self.processes()),
            threads=frozenset(threading.enumerate()),
        )

    def leaked_since(self, baseline: Baseline, *, threads: bool, timeout_seconds: float) -> str:
        """A text on what is still there after at most the timeout; empty if nothing is.

        Kills the processes it reports.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            processes = [p for p in self.processes() if p.identity not in baseline.processes]
            alive = [
                thread
                for thread in threading.enumerate()
                if threads and thread not in baseline.threads
            ]
            if not processes and not alive:
                return ""
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        lines = [f"  {process}" for process in processes] + [_describe(t) for t in alive]
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        return "\n".join(lines)

    def processes(self) -> list[Process]:
        """All living processes that are ours, except this one."""
        table = {process.pid: process for process in _all_processes()}
        mine = os.getpid()
        return [
            process
            for process in table.values()
            if process.pid != mine
            and process.identity not in self._strangers
            and (_descends(process, mine, table) or self._is_marked(process.pid))
            and not (process.lasts() and _helps_a_living_process(process, table))
        ]

    def _is_marked(self, pid: int) -> bool:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False  # gone meanwhile, or another user's
        return any(variable.startswith(self._needle) for variable in variables)


def _all_processes() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # ended while we looked
        # The command's name, in parentheses, may itself contain spaces and parentheses.
        start, end = stat.index(b"("), stat.rindex(b")")
        state, parent, *fields = stat[end + 1 :].split()
        yield Process(
            pid=int(name),
            started=int(fields[17]),
            parent=int(parent),
            state=state.decode(),
            name=stat[start + 1 : end].decode(errors="replace"),
        )


def _descends(process: Process, ancestor: int, table: dict[int, Process]) -> bool:
    seen = set()
    parent = process.parent
    while parent in table and parent not in seen:
        if parent == ancestor:
            return True
        seen.add(parent)
        parent = table[parent].parent
    return False


def _helps_a_living_process(process: Process, table: dict[int, Process]) -> bool:
    """What a fork server has forked bears its command line, also when it is left as an orphan."""
    parent = table.get(process.parent)
    return parent is not None and parent.pid != 1 and not parent.lasts()


def _describe(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)[-4:]) if frame else "    (no frame)\n"
    daemon = "daemon " if thread.daemon else ""
    return f"  {daemon}thread {thread.name!r}, now at:\n{stack.rstrip()}"
