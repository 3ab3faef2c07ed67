"""The node's HTTP listener: dashboard, `/metrics` and `/healthz`, for who looks on from outside.

One thread with a loop of its own, so that nobody who reads here, or hangs, holds up the node's. A
connection is one request and its answer, and each has its deadline; there is a bounded number of
them. For one that comes beyond, the oldest is closed that nobody is answering, so that who holds
connections keeps nobody out; where all are being answered the new one is closed unheard. Pages are
made on this thread: they take what other threads count, under locks that are held for bookkeeping
only.
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
"""So many turns of the loop at most after it was accepted a connection has begun, and sees that the
node ends; one that has not yet begun cannot be cancelled without a word in the log."""

Pages = Mapping[str, Maker]
"""What is served, by path."""


class HttpServer:
    """`listen`, `start` and `close` on the node's thread."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self.address = ""
        """Where it listens, with the port that was really taken."""
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._held: dict[Exchange, asyncio.Task[None]] = {}
        """The connections that there are, and who holds them; the oldest first."""

    def listen(self, address: str) -> None:
        """Bind.

        Raises:
            OSError: the address is taken or not ours.
        """
        host, port = parse_http(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=CONNECTIONS_MAX)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"

    def start(self, pages: Pages) -> None:
        """Answer, on a thread of its own, from now on."""
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
            # Here, as it imports h11, for which a node that is starting does not wait.
            from lookup_buffer.node.http_exchange import Exchange

            exchange = Exchange(reader, writer, pages, self._token)
            task = asyncio.current_task()
            assert task is not None
            self._held[exchange] = task
            try:
                await exchange.hold()
            except (OSError, TimeoutError, asyncio.CancelledError):
                pass  # who asked has left, was too slow or gives way, or the node ends
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
            await asyncio.sleep(0)  # until the sockets of those are closed

    def _make_room(self) -> bool:
        """Whether there is a place for one more."""
        if len(self._held) < CONNECTIONS_MAX:
            return True
        idle = next((exchange for exchange in self._held if not exchange.answering), None)
        if idle is None:
            return False
        self._held.pop(idle).cancel()
        return True
