"""The node's access to the store: opens it at the first use, and starts the embedded server if set.

Opening may wait for an embedded server to start, so it happens on a thread (`lb-open`), and does
not delay the node's start. A package's store is opened when the node starts. Created by `node.py`;
runs on the loop's thread.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from store import EmbeddedServer, EmbeddedServerError, MetadataStore, StoreError, StoreUnavailable
from store.schemes import is_foreign

if TYPE_CHECKING:
    from store.base import Forgotten, Mirror, MirrorClaims

T = TypeVar("T")


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
        """The store, opened at the first call.

        Raises:
            StoreUnavailable: the embedded server cannot be started.
        """
        if self._store is None:
            await self._finish(self._open_once())
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
            self._store = self._open()
        except StoreError as error:
            raise ConfigError(str(error)) from error
        return self._store.has_mirror

    def mirror(self, forgotten: "Forgotten") -> "tuple[Mirror, MirrorClaims] | None":
        """A mirror of the opened store and claims over its connections; None if it has none."""
        assert self._store is not None
        return self._store.mirror(forgotten)

    async def revive(self) -> None:
        """Restart the embedded server if it died; its socket's path stays.

        Raises:
            StoreUnavailable: it cannot be started.
        """
        await self._finish(self._restart())

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

    async def _open_once(self) -> None:
        async with self._opening:
            self._check_open()
            if self._store is None:
                self._store = await _on_thread(self._open)

    async def _restart(self) -> None:
        async with self._opening:
            self._check_open()
            if self._server is not None and not self._server.running:
                self._server.close()
                self._server = await _on_thread(self._start_server)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the node is shutting down")

    def _start_server(self) -> EmbeddedServer:
        try:
            directory = self._config.runtime_directory() / "valkey"
            return EmbeddedServer.start(directory, timeout_seconds=10.0)
        except EmbeddedServerError as error:
            raise StoreUnavailable(str(error)) from error

    def _open(self) -> MetadataStore:
        config = self._config
        url = config.store_url
        if url == "embedded":
            if self._server is None:
                self._server = self._start_server()
            url = self._server.url
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
