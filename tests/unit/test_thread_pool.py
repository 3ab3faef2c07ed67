"""The threads that move bytes or look up a name, where none can be started."""

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from lookup_buffer.errors import PipeBroken
from lookup_buffer.node.links import TENSORS, Credentials, ThreadPool, dial
from patience import scaled
from store import Location

if TYPE_CHECKING:
    from concurrent.futures import Future


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


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


@pytest.mark.parametrize("host", ["host.invalid", "[fe80::1%lo]"])
def test_a_node_whose_name_no_thread_looks_up_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """An address with a zone is looked up, too."""

    async def dialled() -> None:
        loop, there = asyncio.get_running_loop(), Location("n", "b", 1, 1)
        with monkeypatch.context() as without_memory:
            without_memory.setattr(threading.Thread, "start", refuse)
            await dial(loop, there, f"tcp://{host}:1", TENSORS, Credentials())

    with pytest.raises(PipeBroken, match="new thread"):
        asyncio.run(dialled())
