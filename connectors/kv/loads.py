"""Chunks of KV on their way into vLLM's blocks: one thread, one request at a time.

What does not load is told by the numbers of its blocks, and the request counts as loaded all the
same: that is how vLLM wants to hear that it has to compute them.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from connectors.counters import Counters, RateLimitedLog
from connectors.kv.metadata import ChunkLoad, RequestLoad
from connectors.save_queue import use_every_core
from lookup_buffer.errors import LookupBufferError


@dataclass(slots=True)
class LoadResults:
    """What has ended since the last time."""

    loaded: set[str] = field(default_factory=set)
    """Requests, whether or not all of their chunks came."""
    lost_blocks: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class LoadQueue:
    """Requests whose chunks are to be copied.

    Args:
        copy: puts one chunk where it belongs; may raise any `LookupBufferError`.
    """

    def __init__(
        self, copy: Callable[[ChunkLoad, Any], None], counters: Counters, log: RateLimitedLog
    ) -> None:
        self._copy = copy
        self._counters = counters
        self._log = log
        self._queue: queue.SimpleQueue[tuple[RequestLoad, Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._results = LoadResults()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lb-kv-load", daemon=True)
        self._thread.start()

    def put(self, load: RequestLoad, after: Any) -> None:
        """In the model's thread; `after` is what the model was told to do until now."""
        with self._changed:
            self._pending += 1
        self._queue.put((load, after))

    def take(self, timeout: float) -> LoadResults:
        """Both halves of one request's end come together: vLLM counts on it. Where something loads
        and nothing has ended, waits for that, at most `timeout` seconds: a thread that asks again
        and again keeps Python's lock from the one that copies."""
        with self._changed:
            if self._pending and timeout > 0:
                self._changed.wait_for(lambda: bool(self._results.loaded), timeout)
            results, self._results = self._results, LoadResults()
        return results

    def close(self, timeout: float) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        use_every_core()
        while (entry := self._queue.get()) is not None:
            load, after = entry
            lost = set() if self._closed else self._load(load, after)
            with self._changed:
                self._pending -= 1
                self._results.loaded.add(load.request_id)
                if lost:
                    self._results.failed.add(load.request_id)
                    self._results.lost_blocks |= lost
                self._changed.notify_all()

    def _load(self, load: RequestLoad, after: Any) -> set[int]:
        """The blocks that could not be filled: from the first chunk on that did not load, for vLLM
        takes nothing behind a gap."""
        for index, chunk in enumerate(load.chunks):
            try:
                self._copy(chunk, after)
            except LookupBufferError as error:
                self._report("lost", error)
            except Exception as error:  # noqa: BLE001 -- top of a thread; vLLM waits for an answer
                self._report("internal", error)
            else:
                continue
            return {block for left in load.chunks[index:] for block in left.blocks}
        return set()

    def _report(self, reason: str, error: Exception) -> None:
        self._counters.add(f"load_failed:{reason}")
        self._log.report(reason, "KV did not load as promised and is computed: %s", error)
