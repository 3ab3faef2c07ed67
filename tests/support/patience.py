"""How long tests wait for what has to come: longer where the machine is slow.

Run as a program it prints by what factor this machine is slower, just now, than an idle one.
`scripts/run-tests` multiplies its limits by it, and `scaled` multiplies the tests' deadlines. A
deadline that is not needed costs nothing, since who waits for a condition stops when it holds; so
`scaled` adds time as well, for a load that comes after the measurement.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

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


def quickest(attempt: Callable[[], object], enough: float, tries: int = 5) -> float:
    """The least seconds that an attempt took, of up to `tries`, until one took less than `enough`.

    For what must not wait for something else: other work on the machine delays one attempt or
    another, a fault delays each.
    """
    least = math.inf
    for _ in range(tries):
        started = time.monotonic()
        attempt()
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


if __name__ == "__main__":
    print(_steps() if sys.argv[1:] else slowness())
