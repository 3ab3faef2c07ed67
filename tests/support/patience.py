"""How slow the machine is: longer deadlines where it is slow, and a notice where it stood still.

Run as a program it prints by what factor this machine is slower, just now, than an idle one.
`scripts/run-tests` multiplies its limits by it, and `scaled` multiplies the tests' deadlines. A
deadline that is not needed costs nothing, since a wait for a condition ends when the condition
holds. So `scaled` also adds time, for a load that comes after the measurement.

`Standstills` records when a core stood still: one process per core does nothing but sleep, and
writes down when it overslept. The cause is another guest of the same hardware, or too much load at
once. A failed test reports it.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = "TESTS_SLOWNESS"
"""The factor, for all processes of a run: the first one measures."""
SLOWNESS_MAX = 4.0
"""A hang ends in less than this many times what it takes on an idle machine."""
ALLOWANCE_SECONDS = 10.0

_STEPS = 3_000_000
_SECONDS_WHEN_IDLE = 0.12
"""What the steps take on a machine that does nothing else, rounded up."""


def scaled(seconds: float) -> float:
    """The deadline, on this machine, for what an idle one has within `seconds`.

    For waits. An upper bound on what something took says little on a busy machine: compare it with
    what the fault would take, or look at something that is no time.
    """
    return slowness() * (seconds + ALLOWANCE_SECONDS)


def quickest(attempt: Callable[[], object], enough: float, tries: int = 20) -> float:
    """The least seconds that an attempt took, of up to `tries`, until one took less than `enough`.

    For what must not wait for something else: other work on the machine delays one attempt or
    another, also past the time of a call to a store; a fault delays each.
    """
    from store import StoreUnavailable  # not for the program that this is as well

    least = math.inf
    for _ in range(tries):
        started = time.monotonic()
        try:
            attempt()
        except StoreUnavailable:
            continue
        least = min(least, time.monotonic() - started)
        if least < enough:
            break
    return least


def slowness() -> float:
    """By what factor this machine was slower than an idle one when the run began; 1 or more."""
    if ENVIRONMENT not in os.environ:
        os.environ[ENVIRONMENT] = f"{_measured():.2f}"
    return float(os.environ[ENVIRONMENT])


def _measured() -> float:
    """Of the same work on all cores at once: a load takes its part of each."""
    command = [sys.executable, "-ISs", __file__, "steps"]
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in os.sched_getaffinity(0)
    ]
    took = statistics.mean(float(worker.communicate()[0]) for worker in workers)
    return min(max(took / _SECONDS_WHEN_IDLE, 1.0), SLOWNESS_MAX)


def _steps() -> float:
    """Seconds that the fixed work took."""
    started = time.monotonic()
    number = 0
    for step in range(_STEPS):
        number = (number * 31 + step) & 0xFFFF
    return time.monotonic() - started


NAP_SECONDS = 0.01
STANDSTILL_SECONDS = 0.1
"""Later than this is no nap's wakening on a machine whose cores are merely busy."""


class Standstills:
    """What the sleepers wrote into a file: any process that knows its name may ask."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def watched(self) -> Iterator[list[int]]:
        """The sleepers, by their process numbers, run until this ends, or this process."""
        self.path.touch()
        sleepers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-ISs",
                    __file__,
                    "sleep",
                    str(self.path),
                    str(core),
                    str(os.getpid()),
                ],
                start_new_session=True,  # Ctrl-C is for who waits for the tests
            )
            for core in os.sched_getaffinity(0)
        ]
        try:
            yield [sleeper.pid for sleeper in sleepers]
        finally:
            for sleeper in sleepers:
                sleeper.kill()
                sleeper.wait()

    def longest(self, since: float) -> float:
        """The longest, in seconds, of those that ended after `since` (`time.monotonic`); or 0."""
        time.sleep(2 * NAP_SECONDS)  # who stood still as well has it yet to write
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return max((float(took) for ended, took in lines if float(ended) > since), default=0.0)


def _sleep(path: str, core: int, parent: int) -> None:
    os.sched_setaffinity(0, {core})
    with open(path, "a") as found:
        woke = time.monotonic()
        while os.getppid() == parent:
            time.sleep(NAP_SECONDS)
            before, woke = woke, time.monotonic()
            if woke - before - NAP_SECONDS >= STANDSTILL_SECONDS:
                found.write(f"{woke} {woke - before - NAP_SECONDS}\n")
                found.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["sleep"]:
        _sleep(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        print(_steps() if sys.argv[1:] else slowness())
