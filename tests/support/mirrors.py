"""Mirrors for tests: on a loop in a thread of their own, with blocking calls for the test."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from redis.credentials import CredentialProvider

from nodes import wait_until
from patience import scaled
from servers import command
from store import BlockingStore, Record, StoreUnavailable
from store.base import Found
from store.blocking import LoopRunner
from store.mirror import RedisMirror
from store.redis_store import RedisStore
from store.topology import open_topology
from store.url import parse

_T = TypeVar("_T")
CALL_SECONDS = 5.0
"""Of who wants an answer: as long as a machine that does other things too may need for it."""
HASTY_SECONDS = 1.0
"""Of who wants to see what happens when there is none, and what it costs."""
MARGIN_SECONDS = 0.9
"""Two time-outs in a row would not fit."""


class _StoreOfALoop(BlockingStore):
    """Its calls run on a loop that another thread runs."""

    def __init__(self, store: RedisStore, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(store)
        self._runner = _Caller(loop)


class _Caller(LoopRunner):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(scaled(30.0))

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        self.run(last)


class Mirroring:
    """A store, and its mirror on a thread. `failures` is what the loop's callbacks raised."""

    def __init__(
        self,
        url: str,
        *,
        call_seconds: float = CALL_SECONDS,
        credentials: CredentialProvider | None = None,
        **limits: Any,
    ) -> None:
        self.call_seconds = call_seconds
        self.failures: list[BaseException | None] = []
        self.slowest = 0.0
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(
            lambda _, context: self.failures.append(context.get("exception"))
        )
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        topology = open_topology(
            parse(url),
            call_timeout_seconds=call_seconds,
            connect_timeout_seconds=call_seconds,
            credentials=credentials,
            name="mirror",
        )
        self.store = _StoreOfALoop(RedisStore(topology), self._loop)
        self.mirror: RedisMirror = self.do(lambda: RedisMirror(topology, **limits))

        if "-cluster://" in url or "-sentinel://" in url:
            wait_until(self._knows_all_servers, 10.0, "each server that holds keys has answered")
            self.slowest = 0.0

    def _knows_all_servers(self) -> bool:
        found = self.ask("nobodys", [f"k{n}" for n in range(64)])
        return found == [None] * len(found)

    def do(self, call: Callable[[], Any]) -> Any:
        """What `call` returns on the loop's thread."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(scaled(10.0))

    def ask(self, namespace: str, keys: Sequence[str]) -> list[Found]:
        """The answers, which have to come within the budget."""
        answered: Future[list[Found]] = Future()
        started = time.monotonic()
        self._loop.call_soon_threadsafe(
            self.mirror.ask, namespace, keys, lambda found: answered.set_result(list(found))
        )
        found = answered.result(scaled(10.0))
        took = time.monotonic() - started
        self.slowest = max(self.slowest, took)
        assert took < self.call_seconds + MARGIN_SECONDS, f"asking took {took:.3f} s"
        return found

    def has(self, namespace: str, key: str) -> bool | None:
        """Whether there is a record, and None where the mirror says that it does not know."""
        (found,) = self.ask(namespace, [key])
        return None if isinstance(found, StoreUnavailable) else isinstance(found, Record)

    def knows(self, namespace: str, key: str) -> bool:
        return self.do(lambda: key in self.mirror.entries(namespace))  # type: ignore[no-any-return]

    def wait_to_know(self, namespace: str, key: str, *, there: bool, seconds: float) -> float:
        """Ask until the mirror says so; what it took."""
        return wait_until(
            lambda: self.has(namespace, key) is there, seconds, f"{key} is {there} in the mirror"
        )

    def watch(self, namespace: str, key: str) -> "Watching":
        return Watching(self, namespace, key)

    def close(self) -> None:
        assert self.failures == []
        self.do(self.mirror.close)
        self.store.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(scaled(5.0))
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    def __enter__(self) -> "Mirroring":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Watching:
    """A watch, and what the mirror said of its key each time it notified."""

    def __init__(self, mirroring: Mirroring, namespace: str, key: str) -> None:
        self.seen: list[bool] = []
        self._mirroring = mirroring
        self._of = namespace, key
        self.cancel_in_notify = False
        self._cancel = mirroring.do(lambda: mirroring.mirror.watch(namespace, key, self._notified))

    def _notified(self) -> None:
        namespace, key = self._of
        entry = self._mirroring.mirror.entries(namespace).get(key)
        self.seen.append(entry is not None and entry.record is not None)
        if self.cancel_in_notify:
            self._cancel()

    def wait(self, *, there: bool, seconds: float = 2.0) -> float:
        return wait_until(
            lambda: bool(self.seen) and self.seen[-1] is there, seconds, f"notified of {there}"
        )

    def cancel(self) -> None:
        self._mirroring.do(self._cancel)


def kill_tracked(url: str) -> None:
    """End the connections that have tracking on, as a network that fails does."""
    for line in command(url, "CLIENT", "LIST").decode().splitlines():
        fields = dict(field.partition("=")[::2] for field in line.split())
        if "t" in fields["flags"]:
            command(url, "CLIENT", "KILL", "ID", fields["id"])
