"""A bounded queue that stores encoder outputs, or KV, in the buffer without blocking the model.

`offer` runs in the model's thread and only keeps a reference. One background thread does the rest.
An output is immutable once computed; vLLM reads it, and may drop its own reference meanwhile. The
queue reads only `nbytes` of an output: `offer` and `insert` may pass a tensor, or an object that
makes one later.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from connectors.counters import Counters, RateLimitedLog
from lookup_buffer.errors import BufferFull, Closed, LookupBufferError, TensorTooLarge


class SaveQueue:
    """A bounded queue and its thread.

    Args:
        insert: stores one output under the text of a key; returns whether it was new. May raise
            any `LookupBufferError`.
        dropped: called with the key of each output that is not stored; on either thread.
        bytes_max: bound on the bytes that wait. An empty queue accepts an output of any size.
        items_max: bound on the number of outputs that wait.
        what: the name of one output in the log.
    """

    def __init__(
        self,
        insert: Callable[[str, Any], bool],
        dropped: Callable[[str], None],
        *,
        bytes_max: int,
        items_max: int,
        counters: Counters,
        log: RateLimitedLog,
        what: str = "an encoder output",
    ) -> None:
        self._insert = insert
        self._dropped = dropped
        self._bytes_max = bytes_max
        self._items_max = items_max
        self._counters = counters
        self._log = log
        self._what = what
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._waiting_items = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lb-save", daemon=True)
        self._thread.start()

    def offer(self, key: str, output: Any) -> bool:
        """Accept the output, or count it as skipped if the queue is full. Returns whether it was
        accepted. Never blocks, never raises."""
        nbytes = output.nbytes
        with self._changed:
            is_full = self._waiting_items > 0 and (
                self._waiting_items >= self._items_max
                or self._waiting_bytes + nbytes > self._bytes_max
            )
            accepted = not (is_full or self._closed)
            if accepted:
                self._waiting_items += 1
                self._waiting_bytes += nbytes
        if accepted:
            self._queue.put((key, output))
        else:
            self._counters.add("save_skipped:queue_full")
            self._log.report(
                "queue_full",
                "%s is not stored: the queue is full (save_queue_bytes, save_queue_items)",
                self._what,
            )
            self._dropped(key)
        return accepted

    def drain(self, timeout: float) -> bool:
        """Wait until the queue is empty and idle, at most `timeout` seconds; False at the
        timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting_items == 0, timeout)

    def close(self, timeout: float) -> None:
        """Store what is queued, for at most `timeout` seconds. Idempotent."""
        deadline = time.monotonic() + timeout
        with self._changed:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self._queue.put(None)
        self.drain(timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        use_every_core()
        while (entry := self._queue.get()) is not None:
            key, output = entry
            nbytes = output.nbytes
            self._store(key, output)
            del entry, output  # drop the references at once: vLLM counts this memory as free
            with self._changed:
                self._waiting_items -= 1
                self._waiting_bytes -= nbytes
                self._changed.notify_all()

    def _store(self, key: str, output: Any) -> None:
        try:
            is_new = self._insert(key, output)
        except TensorTooLarge as error:
            self._skip(key, "too_large", error)
        except BufferFull as error:
            self._skip(key, "buffer_full", error)
        except Closed:
            self._counters.add("save_skipped:closed")
        except LookupBufferError as error:
            self._skip(key, "node", error)
        except Exception as error:  # noqa: BLE001 -- top of a thread: one output must not end it
            self._skip(key, "internal", error)
        else:
            self._counters.add("saved" if is_new else "save_exists")

    def _skip(self, key: str, reason: str, error: Exception) -> None:
        self._dropped(key)
        self._counters.add(f"save_skipped:{reason}")
        self._log.report(reason, "%s is not stored (%s): %s", self._what, reason, error)


def use_every_core() -> None:
    """Let the calling thread run on every core; on Linux no other thread is affected.

    vLLM binds each CPU worker to one core, and its threads inherit the binding. A copy on that core
    would slow down the model.
    """
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError:
        pass  # a sandbox may forbid it; copies are then slower
