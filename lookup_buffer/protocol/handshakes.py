"""`Handshakes`: those of TLS, made on threads, a few at once.

OpenSSL reads the certificates of a stranger before it verifies one, and has no bound on their keys:
20 of them, 10 KB, took it 10 s, in one call that nothing ends. Used on a loop's thread.
"""

import asyncio
import threading
from collections import Counter
from contextlib import suppress
from typing import Protocol

from lookup_buffer.errors import PipeBroken


class Handshake(Protocol):
    """A `TlsSocket`."""

    def go_on(self) -> int: ...

    def dup(self) -> "Handshake": ...

    def close(self) -> None: ...


class Handshakes:
    """Each call of OpenSSL takes a place until it returns, also if nobody waits for it any more."""

    def __init__(self, most: int, most_of_one: int) -> None:
        """At most `most` calls at once, and `most_of_one` of one host or address."""
        self._most, self._most_of_one = most, most_of_one
        self._waiting: dict[asyncio.Future[None], str] = {}
        """For a place, the oldest first; and whose they are."""
        self._running: Counter[str] = Counter()

    async def go_on(self, secured: Handshake, host: str) -> int:
        """`secured.go_on` on a thread of its own, which the end of the process does not wait for.

        Raises:
            PipeBroken: no thread can be started.
            OSError: the handshake failed.
        """
        await self._place(host)
        try:
            call = _called(secured)
        except RuntimeError as error:
            self._leave(host)
            raise PipeBroken(f"no thread for a handshake: {error}") from error
        call.add_done_callback(lambda _: self._leave(host))
        try:
            await asyncio.wait([call])
            return call.result()
        finally:
            del call  # it has the error, whose traceback has this frame

    async def _place(self, host: str) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = host
        self._give_places()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(host)
            raise
        finally:
            self._waiting.pop(place, None)

    def _give_places(self) -> None:
        for place, host in list(self._waiting.items()):
            if self._running.total() >= self._most:
                return
            if self._running[host] < self._most_of_one and not place.done():
                del self._waiting[place]
                self._running[host] += 1
                place.set_result(None)

    def _leave(self, host: str) -> None:
        self._running[host] -= 1
        self._running += Counter()  # drops those of 0
        self._give_places()


def _called(secured: Handshake) -> "asyncio.Future[int]":
    """The call's future. What it raises has no reference to a frame, so there is no cycle: a node
    hardly ever collects them, and a stranger's handshakes fail as often as he likes.

    Raises:
        RuntimeError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    call: asyncio.Future[int] = loop.create_future()
    owned = secured.dup()  # its descriptor stays open during the call

    def end(event: int, error: BaseException | None) -> None:
        if error is None:
            call.set_result(event)
        else:
            call.set_exception(error)
            call.exception()  # who waited may be gone

    def run() -> None:
        event, failure = 0, None
        try:
            event = owned.go_on()
        except BaseException as error:  # noqa: BLE001 -- who waits raises it
            failure = error.with_traceback(None)
            failure.__cause__ = failure.__context__ = None
        owned.close()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, event, failure)
        del failure

    try:
        threading.Thread(target=run, name="lb-tls", daemon=True).start()
    except RuntimeError:
        owned.close()
        raise
    return call
