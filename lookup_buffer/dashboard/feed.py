"""The feed of the page: samples of the fleet each second while a page is open, and `why`.

The fleet is sampled from the page's first request until LINGER_SECONDS after the last one. All of
it runs on the process' loop.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from typing import Any

from lookup_buffer.dashboard.fleet import FleetSampler, explain, store_error_text
from lookup_buffer.errors import LookupBufferError
from store import BrowsableStore, MetadataStore, StoreError, StoreNotBrowsable

INTERVAL_SECONDS = 1.0
"""Time between two samples. Nodes write their heartbeats and counters once a second."""
LINGER_SECONDS = 60.0
"""A page that is reloaded within this time keeps its history."""
HISTORY_SECONDS = 15 * 60
"""One point a second."""
WATCHERS_MAX = 16
QUESTIONS_MAX = 4
QUESTIONS_AT_ONCE = 2
QUIET_SECONDS = 5.0
"""After this long without an event a comment is sent, to detect a client's disconnection."""
AGAIN_SECONDS = 2.0
"""Pause after a bug in sampling."""
_log = logging.getLogger(__name__)

OpenStore = Callable[[], MetadataStore]


class TooMany(Exception):
    """A limit is reached; the text is for the requester."""


class Feed:
    """Opens the store by `open_store` for the first page."""

    def __init__(self, node: str, open_store: OpenStore) -> None:
        self._node = node
        self._open_store = open_store
        self._store: MetadataStore | None = None
        self._answering = asyncio.Semaphore(QUESTIONS_AT_ONCE)
        self._watchers = 0
        self._questions = 0
        self._used_at = -LINGER_SECONDS
        self._used = asyncio.Event()
        self._points: deque[bytes] = deque(maxlen=HISTORY_SECONDS)
        self._last = b""
        self._news = asyncio.Event()

    def watch(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: the history, then one event each second. Whoever called it calls
        `leave` at the end.

        Raises:
            TooMany: WATCHERS_MAX pages are open.
        """
        if self._watchers >= WATCHERS_MAX:
            raise TooMany(f"{WATCHERS_MAX} pages of this node are open already; close one")
        self._watchers += 1
        self._note_use()
        return self._watch()

    def leave(self) -> None:
        self._watchers -= 1
        self._note_use()

    async def _watch(self) -> AsyncGenerator[bytes, None]:
        yield b"event: history\ndata: [%b]\n\n" % b",".join(self._points)
        last, news = self._last, self._news
        while True:
            if last:
                yield last
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    await news.wait()
                last, news = self._last, self._news
            except TimeoutError:
                last = b": nothing new\n\n"

    async def explain(self, key: str, namespace: str) -> dict[str, Any]:
        """What is known of a key.

        Raises:
            TooMany: QUESTIONS_MAX requests are in flight.
        """
        if self._questions >= QUESTIONS_MAX:
            raise TooMany(f"{QUESTIONS_MAX} requests are in flight; try again in a moment")
        self._questions += 1
        try:
            async with self._answering:
                return await explain(self._opened(), key, namespace)
        except (StoreError, LookupBufferError) as error:  # it was not opened
            return {"key": key, "problem": str(error)}
        finally:
            self._questions -= 1

    async def run(self) -> None:
        """Sample whenever a page is open. Never returns."""
        while True:
            await self._used.wait()
            self._used.clear()
            try:
                await self._sample_while_used()
            except (StoreError, LookupBufferError) as error:  # it was not opened
                self._tell(b"trouble", _json(_text_of(error)))
            except Exception:  # noqa: BLE001 -- a bug; the page says so, and it is tried again
                _log.exception("the dashboard's samples failed: this is a bug, please report it")
                self._tell(b"trouble", _json("sampling failed; the reason is in the node's log"))
            else:
                self._last = b""  # the history is in the points; the last event is out of date
                continue
            await asyncio.sleep(AGAIN_SECONDS)
            if self._is_wanted():
                self._used.set()

    async def _sample_while_used(self) -> None:
        loop = asyncio.get_running_loop()
        with closing(FleetSampler(self._opened())) as sampler:
            await self._sample(sampler, loop)

    async def _sample(self, sampler: FleetSampler, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time()
        while self._is_wanted():
            try:
                update = await sampler.sample()
            except StoreError as error:  # try again: the store may come back
                self._tell(b"trouble", _json(store_error_text(error)))
            else:
                if update.point is not None:
                    self._points.append(_json(update.point))
                now = {"node": self._node, "point": update.point, **update.now}
                self._tell(b"now", _json(now))
            due = max(due + INTERVAL_SECONDS, loop.time())
            await asyncio.sleep(due - loop.time())

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()

    def _opened(self) -> BrowsableStore:
        """The store, opened once. Raises StoreNotBrowsable: it has only what nodes need."""
        if self._store is None:
            self._store = self._open_store()
        if not isinstance(self._store, BrowsableStore):
            raise StoreNotBrowsable(self._store)
        return self._store

    def _is_wanted(self) -> bool:
        return bool(self._watchers) or time.monotonic() - self._used_at < LINGER_SECONDS

    def _note_use(self) -> None:
        self._used_at = time.monotonic()
        self._used.set()

    def _tell(self, kind: bytes, text: bytes) -> None:
        self._last = b"event: %b\ndata: %b\n\n" % (kind, text)
        news, self._news = self._news, asyncio.Event()
        news.set()


def _text_of(error: Exception) -> str:
    return store_error_text(error) if isinstance(error, StoreError) else str(error)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
