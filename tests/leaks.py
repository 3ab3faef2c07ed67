"""Finds the processes and threads that a test left behind. Reads /proc; knows nothing of pytest.

A process is ours if it descends from this one, or if it carries this run's mark in its environment:
a node detaches itself from whoever started it, and the mark is what remains of its origin.
"""

import os
import signal
import sys
import threading
import time
import traceback
import uuid
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
    command: str

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.started

    def __str__(self) -> str:
        hint = "; ended, but nobody waited for it" if self.state == "Z" else ""
        return (
            f"process {self.pid} (parent {self.parent}, state {self.state}{hint}): {self.command}"
        )


@dataclass(frozen=True, slots=True)
class Baseline:
    processes: frozenset[tuple[int, int]]
    threads: frozenset[threading.Thread]


class LeakGuard:
    """One per test run. Used from the main thread only."""

    def __init__(self, mark: str) -> None:
        self._needle = f"{MARK}={mark}".encode()
        self.at_start = self.baseline()

    @classmethod
    def install(cls) -> "LeakGuard":
        """Marks this process' environment, which every program started from it inherits."""
        mark = uuid.uuid4().hex
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
        ours = []
        for process in table.values():
            if process.pid == mine or any(word in process.command for word in LASTING_COMMANDS):
                continue
            if _descends(process, mine, table) or self._is_marked(process.pid):
                ours.append(process)
        return ours

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False  # gone meanwhile, or another user's


def _all_processes() -> list[Process]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended while we looked
        # The name in parentheses may itself contain spaces and parentheses.
        name, rest = stat[stat.index("(") + 1 :].rsplit(")", 1)
        fields = rest.split()
        found.append(
            Process(
                pid=int(entry.name),
                started=int(fields[19]),
                parent=int(fields[1]),
                state=fields[0],
                command=command.strip() or f"[{name}]",
            )
        )
    return found


def _descends(process: Process, ancestor: int, table: dict[int, Process]) -> bool:
    seen = set()
    parent = process.parent
    while parent in table and parent not in seen:
        if parent == ancestor:
            return True
        seen.add(parent)
        parent = table[parent].parent
    return False


def _describe(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)[-4:]) if frame else "    (no frame)\n"
    daemon = "daemon " if thread.daemon else ""
    return f"  {daemon}thread {thread.name!r}, now at:\n{stack.rstrip()}"
