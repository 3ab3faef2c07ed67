"""The node's access to the store: opens it at the first use, and starts the embedded server if set.

Opening may wait for an embedded server to start, so it happens on the threads that use the store
(`lb-registrar`, `lb-locate`, `lb-claim`), and does not delay the node's start. Created by
`node.py`.
"""

import asyncio
import threading
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from lookup_buffer.config import BufferConfig
from lookup_buffer.key import QualifiedKey
from store import EmbeddedServer, EmbeddedServerError, MetadataStore, StoreUnavailable

if TYPE_CHECKING:
    from store.entries import Forgotten
    from store.mirror import Mirror
    from store.mirror_claims import MirrorClaims


class Storage:
    """Thread-safe; one store for all threads of the node."""

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._store: MetadataStore | None = None
        self._server: EmbeddedServer | None = None

    def store(self) -> MetadataStore:
        """The store, opened at the first call.

        Raises:
            StoreUnavailable: the embedded server cannot be started.
        """
        if self._store is None:
            with self._lock:
                if self._store is None:
                    self._store = self._open()
        return self._store

    def place_of(self, address: QualifiedKey) -> str:
        """The name of the server that has the key, as far as known; never blocks."""
        return "" if self._store is None else self._store.place_of(*address)

    def mirror(
        self, loop: asyncio.AbstractEventLoop, dialler: Executor, forgotten: "Forgotten"
    ) -> "tuple[Mirror, MirrorClaims]":
        """A mirror of the opened store, for `loop`, on whose thread this is called; and claims
        over its connections."""
        from store.redis_store import RedisStore  # slow to import, but already imported here

        store = self.store()
        assert isinstance(store, RedisStore)  # the only store that can be configured
        mirror = store.mirror(loop, dialler, forgotten)
        return mirror, store.mirror_claims(mirror)

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

    def _open(self) -> MetadataStore:
        config = self._config
        url = config.store_url
        if url == "embedded":
            self._server = self._start_server()
            url = self._server.url
        return config.store_access().open(url, config.store_timeout_seconds)

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
            if self._server is not None:
                self._server.close()
