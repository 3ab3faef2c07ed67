"""The node's access to the store: opens it at the first use, and starts the embedded server if set.

Opening may wait for an embedded server to start, so it happens on a thread (`lb-open`), and does
not delay the node's start. A package's store is opened when the node starts. Created by `main.py`;
runs on the loop's thread.

`Breaker` is a circuit breaker: after some failures in a row, no calls for a while. Pure
bookkeeping; the clock is an argument. `registrar` has one, `locate` and `claims` have one for each
server, `transfer` for each node.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.times import Clock
from store import EmbeddedServer, EmbeddedServerError, MetadataStore, StoreError, StoreUnavailable
from store.schemes import is_foreign

if TYPE_CHECKING:
    from store.base import Forgotten, Mirror, MirrorClaims

FAILURES_TO_OPEN = 3

T = TypeVar("T")


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


class Storage:
    """One store for all parts of the node."""

    def __init__(self, config: BufferConfig, node: str) -> None:
        self._config = config
        self._node = node
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
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
            await self._finish(self._open())
        assert self._store is not None
        return self._store

    def place_of(self, address: QualifiedKey) -> str:
        """The name of the server that has the key, as far as known; never blocks."""
        return "" if self._store is None else self._store.place_of(*address)

    def has_mirror(self) -> bool:
        """Whether the store has a mirror. Opens the store of a package, which does not connect.

        Raises:
            ConfigError: the package cannot be used.
        """
        if not is_foreign(self._config.store_url):
            return True
        try:
            self._store = self._make_store()
        except StoreError as error:
            raise ConfigError(str(error)) from error
        return self._store.has_mirror

    def mirror(self, forgotten: "Forgotten") -> "tuple[Mirror, MirrorClaims] | None":
        """A mirror of the opened store and claims over its connections; None if it has none."""
        assert self._store is not None
        return self._store.mirror(forgotten)

    async def close(self) -> None:
        """Close what is open, and what is being opened once it is. Then nothing is opened."""
        self._closed = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store is not None:
            await self._store.close()
        if self._server is not None:
            await _on_thread(self._server.close)

    async def _finish(self, opening: Coroutine[Any, Any, None]) -> None:
        """Run `opening` to its end, also if the caller is cancelled: a server that it started
        would never be closed."""
        task = asyncio.get_running_loop().create_task(opening)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _open(self) -> None:
        """Start the embedded server if it is not running, and open the store if it is not open."""
        async with self._opening:
            if self._closed:
                raise StoreUnavailable("the node is shutting down")
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
