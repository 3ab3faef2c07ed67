"""The node's access to the store: opens it at the first use, and starts the embedded server if set.

Opening may wait for an embedded server to start, so it happens on a thread (`lb-open`), and does
not delay the node's start. A package's store is opened when the node starts. Created by `main.py`;
runs on the loop's thread.

What fails: `Breaker` is a circuit breaker: after some failures in a row, no calls for a while.
`registrar` has one, `locate` and `claims` have one for each server, `transfer` for each node.
`RoundTrip` estimates how long a call of the store takes, from what `membership` measures.
`PeriodicTasks` and `FailureLog` belong to `registrar`. Pure bookkeeping; the clock is an argument.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError
from lookup_buffer.times import Clock
from store import (
    EmbeddedServer,
    EmbeddedServerError,
    MetadataStore,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
    import_client,
)
from store.schemes import is_foreign

FAILURES_TO_OPEN = 3

REST_SECONDS: Final = 5.0
"""The pause of a task whose server did not answer: after the server returned, the task is late by
at most this."""
AGAIN_SECONDS = 60.0
"""A lasting failure is logged again after this time."""
KINDS_MAX = 16
"""At most this many different failures are logged within that time."""

T = TypeVar("T")
Task = Callable[[MetadataStore], Awaitable[object]]
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Breaker:
    """Closed: calls pass. Open: calls are refused until a pause is over; then one call probes."""

    clock: Clock
    failures_to_open: int = FAILURES_TO_OPEN
    pause_seconds_min: float = 0.1
    pause_seconds_max: float = 1.0
    """A pause is twice the one before."""
    jitter: float = 0.0
    """The part of a pause that is left to chance."""
    failures: int = 0
    """Since the last success."""
    _pause_seconds: float = 0.0
    _closed_at: float = 0.0

    @property
    def open(self) -> bool:
        return self.failures >= self.failures_to_open

    def allows(self) -> bool:
        return not self.open or self.clock() >= self._closed_at

    def succeeded(self) -> None:
        self.failures = 0
        self._pause_seconds = 0.0

    def failed(self) -> None:
        self.failures += 1
        if self.open:
            pause = max(2 * self._pause_seconds, self.pause_seconds_min)
            self._pause_seconds = min(pause, self.pause_seconds_max)
            part = 1.0 - self.jitter * random.random()
            self._closed_at = self.clock() + part * self._pause_seconds


@dataclass(slots=True)
class FailureLog:
    """Logs each failure at once, and then not again for a while."""

    clock: Clock = time.monotonic
    _logged_at: dict[str, float] = field(default_factory=dict)

    def log(self, what: str, error: Exception) -> None:
        """Log that `what` failed and why, unless it was logged recently. Any error but one of the
        store is a bug, logged with its traceback."""
        is_bug = not isinstance(error, StoreError)
        why = f"{error!r}; this is a bug, please report it" if is_bug else error
        text, now = f"{what}: {why}", self.clock()
        logged_at = {text: at for text, at in self._logged_at.items() if now - at < AGAIN_SECONDS}
        self._logged_at = logged_at
        if text not in logged_at and len(logged_at) < KINDS_MAX:
            logged_at[text] = now
            level, cause = (logging.ERROR, error) if is_bug else (logging.WARNING, None)
            _log.log(level, "%s", text, exc_info=cause)


@dataclass(slots=True)
class PeriodicTasks:
    failures: FailureLog
    clock: Clock
    tasks: list[tuple[str, Task]]
    """Each with the text to log if it fails, its name, too; the next one first."""
    _paused_until: dict[str, float] = field(default_factory=dict)

    async def run_until(self, due: float, store: MetadataStore) -> None:
        """Run the tasks one after another until `due`; the next call continues after the last
        one."""
        for _ in range(len(self.tasks)):
            failure, task = self.tasks.pop(0)
            self.tasks.append((failure, task))
            if self.clock() >= self._paused_until.get(failure, 0.0):
                await self._run(failure, task, store)
            if self.clock() >= due:
                return

    async def _run(self, failure: str, task: Task, store: MetadataStore) -> None:
        try:
            await task(store)
        except ConfigError:
            raise  # the node must end
        except Exception as error:  # noqa: BLE001 -- the publication must not depend on it
            self.failures.log(failure, error)
            if not isinstance(error, StoreFull | StoreCorrupt):  # else its server answers
                self._paused_until[failure] = self.clock() + REST_SECONDS

    def resume(self) -> None:
        """End all pauses: the store is new, or has lost its data."""
        self._paused_until.clear()


@dataclass(slots=True)
class RoundTrip:
    """The round trip to the store, estimated as TCP does it (RFC 6298). Pure bookkeeping."""

    _smoothed: float = 0.0
    _variation: float = 0.0

    def observe(self, seconds: float) -> None:
        """One more round trip took this long."""
        if not self._smoothed:
            self._smoothed, self._variation = seconds, seconds / 2
            return
        self._variation += (abs(self._smoothed - seconds) - self._variation) / 4
        self._smoothed += (seconds - self._smoothed) / 8

    @property
    def bound_seconds(self) -> float:
        """What few round trips exceed; 0 before the first one. TCP waits for an answer so long."""
        return self._smoothed + 4 * self._variation


class Storage:
    """One store for all parts of the node."""

    def __init__(self, config: BufferConfig, node: str) -> None:
        self._config = config
        self._node = node
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        self._store: MetadataStore | None = None
        self._server: EmbeddedServer | None = None

    async def store(self) -> MetadataStore:
        """The store, opened at the first call. If the embedded server died, it is restarted; its
        socket's path stays.

        Raises:
            StoreUnavailable: the embedded server cannot be started.
        """
        if self._store is None or (self._server is not None and not self._server.running):
            if self._closed:
                raise StoreUnavailable("the node is shutting down")
            if self._opening is None or self._opening.done():
                self._opening = asyncio.get_running_loop().create_task(self._open())
            # Run to its end, also if this call is cancelled: a server that it started would never
            # be closed.
            await asyncio.shield(self._opening)
        assert self._store is not None
        return self._store

    def has_mirror(self) -> bool:
        """Whether the store has a mirror. Imports the store's client; opens the store of a package,
        which does not connect.

        Raises:
            ConfigError: the package cannot be used.
        """
        if not is_foreign(self._config.store_url):
            import_client()
            return True
        try:
            self._store = self._make_store()
        except StoreError as error:
            raise ConfigError(str(error)) from error
        return self._store.has_mirror

    async def close(self) -> None:
        """Close what is open, and what is being opened once it is. Then nothing is opened."""
        self._closed = True
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._store is not None:
            await self._store.close()
        if self._server is not None:
            await _on_thread(self._server.close)

    async def _open(self) -> None:
        """Start the embedded server if it is not running, and open the store if it is not open."""
        server = self._server
        if self._config.store_url == "embedded" and not (server and server.running):
            if server is not None:
                server.close()
            self._server = await _on_thread(self._start_server)
        if self._store is None:
            self._store = await _on_thread(self._make_store)

    def _start_server(self) -> EmbeddedServer:
        try:
            directory = self._config.runtime_directory() / "valkey"
            return EmbeddedServer.start(directory, timeout_seconds=10.0)
        except EmbeddedServerError as error:
            raise StoreUnavailable(str(error)) from error

    def _make_store(self) -> MetadataStore:
        config = self._config
        url = config.store_url if self._server is None else self._server.url
        seconds = config.store_timeout_seconds
        try:
            return config.store_access().open_async(url, seconds, name=self._node)
        except ConfigError as error:  # the credential provider worked when the node started
            raise StoreUnavailable(str(error)) from error


async def _on_thread(call: Callable[[], T]) -> T:
    """The result of a call that may wait for a process. The thread ends with it."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="lb-open")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call)
    finally:
        thread.shutdown(wait=False)
