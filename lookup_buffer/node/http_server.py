"""The node's HTTP listener: dashboard, `/metrics` and `/healthz`.

It has one thread (`lb-http`) with its own loop, so that slow readers do not delay the node's loop.
A connection serves one request and has a deadline. At the connection limit, the oldest idle
connection is closed; if none is idle, the new one is. Pages are made on this thread; they read
counters under locks that are held for bookkeeping only. `node.py` starts and closes it.
"""

import asyncio
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lookup_buffer.config import parse_http
from lookup_buffer.node.http_page import Maker
from lookup_buffer.node.loop import call_from_thread

if TYPE_CHECKING:
    from lookup_buffer.node.http_exchange import Exchange

CONNECTIONS_MAX = 32
CLOSE_SECONDS = 5.0
ACCEPT_TURNS = 5
"""A connection's task has started at most this many turns of the loop after its accept. Only
then can it see that the node closes, or be cancelled without an entry in the log."""

Pages = Mapping[str, Maker]
"""Served pages, by path."""


class HttpServer:
    """`listen`, `start` and `close` are called on the node's main thread."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self.address = ""
        """The URL at which it listens, with the actual port."""
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._held: dict[Exchange, asyncio.Task[None]] = {}
        """The open connections and their tasks, oldest first."""

    def listen(self, address: str) -> None:
        """Bind.

        Raises:
            OSError: the address is in use or not of this host.
        """
        host, port = parse_http(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=CONNECTIONS_MAX)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"

    def start(self, pages: Pages) -> None:
        """Serve from now on, on `lb-http`."""
        self._thread = threading.Thread(target=self._run, args=(pages,), name="lb-http")
        self._thread.daemon = True
        self._thread.start()

    def close(self) -> None:
        """Idempotent, bounded."""
        if self._thread is not None:
            call_from_thread(self._loop, self._closing.set)
            self._thread.join(CLOSE_SECONDS)
        elif not self._loop.is_closed():
            self._loop.close()
        if self._socket is not None:
            self._socket.close()

    # -- the thread

    def _run(self, pages: Pages) -> None:
        try:
            self._loop.run_until_complete(self._serve(pages))
        finally:
            self._loop.close()

    async def _serve(self, pages: Pages) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._closing.is_set() or not self._make_room():
                writer.transport.abort()
                return
            # Imported here: it imports h11, which would delay the node's start.
            from lookup_buffer.node.http_exchange import Exchange

            exchange = Exchange(reader, writer, pages, self._token)
            task = asyncio.current_task()
            assert task is not None
            self._held[exchange] = task
            try:
                await exchange.hold()
            except (OSError, TimeoutError, asyncio.CancelledError):
                pass  # the client left, was too slow or was displaced, or the node ends
            finally:
                self._held.pop(exchange, None)
                writer.transport.abort()

        server = await asyncio.start_server(connected, sock=self._socket)
        await self._closing.wait()
        server.close()
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)  # until their sockets are closed

    def _make_room(self) -> bool:
        """Whether one more connection is allowed; closes the oldest idle one if needed."""
        if len(self._held) < CONNECTIONS_MAX:
            return True
        idle = next((exchange for exchange in self._held if not exchange.answering), None)
        if idle is None:
            return False
        self._held.pop(idle).cancel()
        return True
