"""When the machine stood still: processes that only sleep, one on each core, tell by oversleeping.

A test that counts on time counts on a machine that gives it some. Where another guest of the same
hardware, or too much at once, takes that away, whoever reads of the failure wants to know.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
                [sys.executable, "-ISs", __file__, str(self.path), str(core), str(os.getpid())],
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
    _sleep(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
