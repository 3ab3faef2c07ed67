"""Wall clocks of single processes that jump, by libfaketime; the machine's is left alone."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
"""Of Debian's package libfaketime: `make system-packages`."""


class Clock:
    """The wall clock of some processes, which jumps when `set` is called; the monotonic clock does
    not, as in reality. `variables` are the environment in which they are to be started."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    @property
    def variables(self) -> Mapping[str, str]:
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, seconds: int) -> None:
        self._file.write_text(f"{seconds:+d}\n")


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """For the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
