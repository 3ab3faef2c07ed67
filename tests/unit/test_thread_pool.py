"""The threads that move bytes, where none can be started."""

import threading
from typing import TYPE_CHECKING

import pytest

from lookup_buffer.node.links import ThreadPool
from patience import scaled

if TYPE_CHECKING:
    from concurrent.futures import Future


def test_what_was_refused_is_not_moved_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that it would have read or written has other content by then. Python's pool keeps
    it in its queue."""
    pool, moved = ThreadPool(2, "moves"), list[str]()
    release, busy = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        release.wait(scaled(10.0))

    first = pool.submit(hold)
    assert busy.wait(scaled(10.0))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_memory:
        without_memory.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit(moved.append, "refused")
    release.set()
    jobs: list[Future[None]] = [first, pool.submit(moved.append, "asked")]
    for job in jobs:
        job.result(scaled(10.0))
    pool.close()
    assert moved == ["asked"]
