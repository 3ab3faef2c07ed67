"""A system that grants no thread, as under `RLIMIT_NPROC` or without memory; and what a connection
that failed for it may leave behind."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def without_threads(name: str = "") -> Iterator[None]:
    """Refuse this process all threads of that name; without a name, all threads."""
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if name in ("", thread.name):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refusing)
        yield


def in_use() -> tuple[int, int]:
    """How many threads and descriptors this process has."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def is_within(before: tuple[int, int]) -> bool:
    """Whether there are no more of either than `in_use` returned before."""
    return all(now <= then for now, then in zip(in_use(), before, strict=True))
