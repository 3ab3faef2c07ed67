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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "LOOKUP_BUFFER_TEST_RUN"
POLL_SECONDS = 0.02
SETTLED_SECONDS = 1.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
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

    def has_settled(self) -> bool:
        """Whether it runs what it was started for: a fork has no mark before it executes that."""
        age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / TICKS_PER_SECOND
        return age_seconds > SETTLED_SECONDS

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

    It looks before and after each test, so it reads each process that is not ours once only. A pid
    is not given to another process before all other pids have been.
    """

    def __init__(self, mark: str) -> None:
        self._needle = f"{MARK}={mark}".encode()
        self._strangers: set[int] = set()
        self._ours: dict[int, Process] = {}
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
        found = self._look()
        return [
            process
            for process in self._ours.values()
            if not (process.lasts() and _helps_a_living_process(process, found))
        ]

    def _look(self) -> dict[int, Process]:
        """Update what is ours. Returns these processes, this one, and the new ones."""
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= present
        read = map(_process, present - self._strangers)
        found = {process.pid: process for process in read if process is not None}
        self._ours = {pid: one for pid, one in found.items() if self._is_ours(one, found)}
        self._strangers |= {
            pid
            for pid, process in found.items()
            if pid not in self._ours and pid != os.getpid() and process.has_settled()
        }
        return found

    def _is_ours(self, process: Process, found: dict[int, Process]) -> bool:
        if process.pid == os.getpid():
            return False
        known = self._ours.get(process.pid)
        if known is not None and known.identity == process.identity:
            return True
        return _descends(process, os.getpid(), found) or self._is_marked(process.pid)

    def _is_marked(self, pid: int) -> bool:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False  # gone meanwhile, or another user's
        return any(variable.startswith(self._needle) for variable in variables)


def _process(pid: int) -> Process | None:
    """None if it ended while we looked."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command's name, in parentheses, may itself contain spaces and parentheses.
    start, end = stat.index(b"("), stat.rindex(b")")
    state, parent, *fields = stat[end + 1 :].split()
    return Process(
        pid=pid,
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
