"""The node's access to the store: opens it at the first use, and starts the embedded server if set.

Opening may wait for an embedded server to start, so it happens on the threads that use the store
(`lb-registrar`, `lb-locate`), and does not delay the node's start. A package's store is
opened when the node starts. Created by `node.py`.
"""

import asyncio
import threading
from typing import TYPE_CHECKING

from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from store import (
    BlockingStore,
    EmbeddedServer,
    EmbeddedServerError,
    StoreError,
    StoreUnavailable,
)
from store.schemes import is_foreign

if TYPE_CHECKING:
    from store.base import Forgotten, Mirror, MirrorClaims


class Storage:
    """Thread-safe; one store for all threads of the node, on the node's loop."""

    def __init__(self, config: BufferConfig, loop: asyncio.AbstractEventLoop, node: str) -> None:
        self._config = config
        self._node = node
        self._loop = loop
        self._loop_runs = True
        self._lock = threading.Lock()
        self._store: BlockingStore | None = None
        self._server: EmbeddedServer | None = None

    def store(self) -> BlockingStore:
        """The store, opened at the first call.

        Raises:
            StoreUnavailable: the embedded server cannot be started.
        """
        if self._store is None:
            with self._lock:
                if self._store is None:
                    self._store = self._open()
            if not self._loop_runs:
                self._store.owner_stopped()
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
            return self.store().store.has_mirror
        except StoreError as error:
            raise ConfigError(str(error)) from error

    def mirror(self, forgotten: "Forgotten") -> "tuple[Mirror, MirrorClaims] | None":
        """A mirror of the opened store and claims over its connections; None if it has none.

        Called on the loop's thread.
        """
        return self.store().store.mirror(forgotten)

    def close_mirror(self, mirror: "Mirror") -> None:
        """Close it where the loop runs: perhaps on another thread by now. Not on the loop's."""
        self.store().on_loop(mirror.close)

    def revive(self) -> None:
        """Restart the embedded server if it died; its socket's path stays.

        Raises:
            StoreUnavailable: it cannot be started.
        """
        with self._lock:
            if self._server is not None and not self._server.running:
                self._server.close()
                self._server = self._start_server()

    def _start_server(self) -> EmbeddedServer:
        try:
            directory = self._config.runtime_directory() / "valkey"
            return EmbeddedServer.start(directory, timeout_seconds=10.0)
        except EmbeddedServerError as error:
            raise StoreUnavailable(str(error)) from error

    def _open(self) -> BlockingStore:
        config = self._config
        url = config.store_url
        if url == "embedded":
            self._server = self._start_server()
            url = self._server.url
        seconds = config.store_timeout_seconds
        try:
            store = config.store_access().open_async(url, seconds, name=self._node)
        except ConfigError as error:  # the credential provider worked when the node started
            raise StoreUnavailable(str(error)) from error
        return BlockingStore(store, self._loop)

    def loop_stopped(self) -> None:
        """The node's loop runs no more; its threads end on their own."""
        self._loop_runs = False  # first: a thread may be opening the store
        if self._store is not None:
            self._store.owner_stopped()

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
            if self._server is not None:
                self._server.close()
