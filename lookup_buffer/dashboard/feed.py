"""The feed of the page: samples of the fleet each second while a page is open, and `why`.

The fleet is sampled from the page's first request until LINGER_SECONDS after the last one. All of
it runs on the process' loop.
"""

import asyncio
import json
import logging
import time
from collections import Counter, deque
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


class Watcher:
    """An open page of one user."""

    def __init__(self, user: str) -> None:
        self.user = user
        self.news = asyncio.Event()
        self.is_dropped = False


class Feed:
    """Opens the store by `open_store` for the first page."""

    def __init__(self, node: str, open_store: OpenStore) -> None:
        self._node = node
        self._open_store = open_store
        self._store: MetadataStore | None = None
        self._answering = asyncio.Semaphore(QUESTIONS_AT_ONCE)
        self._watchers: dict[Watcher, None] = {}
        """The oldest first."""
        self._questions = 0
        self._used_at = -LINGER_SECONDS
        self._used = asyncio.Event()
        self._points: deque[bytes] = deque(maxlen=HISTORY_SECONDS)
        self._last = b""

    def watch(self, user: str) -> Watcher:
        """A place for a page of this user, who calls `leave` at the end. If all are taken, a user
        with more pages than this one loses the oldest of them.

        Raises:
            TooMany: WATCHERS_MAX pages are open, and nobody has more of them than this user.
        """
        if len(self._watchers) >= WATCHERS_MAX:
            self._make_place(user)
        watcher = Watcher(user)
        self._watchers[watcher] = None
        self._note_use()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Idempotent."""
        self._watchers.pop(watcher, None)
        self._note_use()

    def _make_place(self, user: str) -> None:
        pages = Counter(each.user for each in self._watchers)
        pages[user] += 1
        most, number = pages.most_common(1)[0]
        if pages[user] == number:
            raise TooMany(f"{WATCHERS_MAX} pages of this node are open already; close one")
        oldest = next(each for each in self._watchers if each.user == most)
        del self._watchers[oldest]
        oldest.is_dropped = True
        oldest.news.set()

    async def events(self, watcher: Watcher) -> AsyncGenerator[bytes, None]:
        """Server-sent events: the history, then one event each second, until it is dropped."""
        yield b"event: history\ndata: [%b]\n\n" % b",".join(self._points)
        last = self._last
        while not watcher.is_dropped:
            watcher.news.clear()
            if last:
                yield last
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    await watcher.news.wait()
                last = self._last
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
        for watcher in self._watchers:
            watcher.news.set()


def _text_of(error: Exception) -> str:
    return store_error_text(error) if isinstance(error, StoreError) else str(error)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
