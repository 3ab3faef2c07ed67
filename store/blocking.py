"""Blocking: coroutines of one asyncio loop, called from threads without `await`.

The thread that calls runs the loop for as long as its call takes. So a command needs no thread for
its store.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast

from store.answers import Address
from store.base import BrowsableStore, Inspection, MetadataStore, Traces
from store.errors import StoreError, StoreNotBrowsable, StoreUnavailable
from store.record import Record

if TYPE_CHECKING:
    from concurrent.futures import Future

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LOOK_SECONDS: Final = 0.05
"""How often a thread that waits looks whether a signal has come: one that comes right before a wait
does not end it."""
_PAGE: Final = 1000
"""Elements of an iteration that are read in one call."""


class LoopRunner:
    """Runs coroutines on one loop for any thread. Thread-safe.

    Of the threads that call at the same time one drives the loop. Calls from inside a coroutine are
    not possible.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._driven = False
        self._calls = 0
        """Calls under way."""
        self._closed = False

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """The result of `coroutine`.

        Raises:
            StoreUnavailable: it is closed, or was closed meanwhile.
        """
        try:
            _check_thread()
            with self._changed:
                if self._closed:
                    raise StoreUnavailable("the store is closed")
                loop = self._begin()
        except BaseException:
            coroutine.close()
            raise
        return self._run(coroutine, loop)

    def iterate(self, iterator: AsyncIterator[_T]) -> Iterator[_T]:
        """The elements of `iterator`, read in pages."""
        end: Exception | None = None
        while end is None:
            page, end = self.run(_page(iterator))
            yield from page
        if not isinstance(end, StopAsyncIteration):
            raise end

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, which ends the calls under way, then nothing more. Idempotent."""
        try:
            _check_thread()
            with self._changed:
                if self._closed:
                    last.close()
                    return
                loop = self._begin()
                self._closed = True
        except BaseException:
            last.close()
            raise
        try:
            self._run(last, loop)
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._calls)
            loop.run_until_complete(_end_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def _begin(self) -> asyncio.AbstractEventLoop:
        """Count a call, under the lock. Until its end the loop is not closed."""
        if self._loop is None:  # not before the first call: the process may fork
            self._loop = asyncio.new_event_loop()
        self._calls += 1
        return self._loop

    def _run(self, coroutine: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
        try:
            if not self._drive():
                return self._wait(asyncio.run_coroutine_threadsafe(coroutine, loop), loop)
            try:
                return _run_to_end(loop, _after_events(coroutine))
            finally:
                self._end_drive()
        except BaseException:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
            else:  # a signal may have come before the wait for its task began
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_cancel_task_of, coroutine)
            raise
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _drive(self) -> bool:
        with self._changed:
            if self._driven:
                return False
            self._driven = True
            return True

    def _end_drive(self) -> None:
        with self._changed:
            self._driven = False
            self._changed.notify_all()

    def _wait(self, future: "Future[_T]", loop: asyncio.AbstractEventLoop) -> _T:
        """Wait for `future`; drive the loop if nobody does."""
        future.add_done_callback(self._notify)
        try:
            while not future.done():
                with self._changed:
                    self._changed.wait_for(
                        lambda: future.done() or not self._driven,
                        timeout=_LOOK_SECONDS,
                    )
                if not future.done() and self._drive():
                    try:
                        _run_to_end(loop, _end_of(future))
                    finally:
                        self._end_drive()
        except BaseException:  # such as KeyboardInterrupt
            future.cancel()
            raise
        return future.result()

    def _notify(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()


def _cancel_task_of(coroutine: Coroutine[Any, Any, Any]) -> None:
    for task in asyncio.all_tasks():
        if task.get_coro() is coroutine:
            task.cancel()


def _check_thread() -> None:
    """Raises RuntimeError in a thread that runs a loop, which a blocking call would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("this call blocks the running event loop; use store.open_async_store there")


def _run_to_end(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of `coroutine`, which leaves no task behind when a signal interrupts it."""
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, StoreError):
                loop.run_until_complete(task)
        elif not (loop.is_running() or loop.is_closed()):
            _run_once(loop)
        raise


def _run_once(loop: asyncio.AbstractEventLoop) -> None:
    """One iteration. After an interrupt at the end of a run, the callback that stops that run may
    still be due; it would stop the next one."""
    loop.call_soon(loop.stop)
    loop.run_forever()


async def _end_all() -> None:
    """Cancel all other tasks of the loop, and wait for their end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # transports that were aborted close now


async def _end_of(future: "Future[Any]") -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    await ended.wait()


async def _after_events(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run `coroutine` after what happened since the loop ran last: a server closed connections."""
    for _ in range(2):  # the first finds events, the second comes after their callbacks
        await asyncio.sleep(0)
    return await coroutine


async def _page(iterator: AsyncIterator[_T]) -> tuple[list[_T], Exception | None]:
    """The next elements, and what ended the iteration; None if it goes on."""
    page: list[_T] = []
    try:
        while len(page) < _PAGE:
            page.append(await anext(iterator))
    except (StopAsyncIteration, StoreError, ValueError) as end:
        return page, end
    return page, None


def blocking(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate["Blocking", _P], _T]:
    """The method of the same name, called without `await`."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: "Blocking", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        called = getattr(self._target, name, None)
        if called is None:
            raise StoreNotBrowsable(self._target)
        result: _T = self._runner.run(called(*args, **kwargs))
        return result

    return call


class Blocking:
    """Base of objects whose methods `blocking` made from those of `target`."""

    def __init__(self, target: object, runner: LoopRunner) -> None:
        self._target = target
        self._runner = runner


class BlockingStore(Blocking):
    """A MetadataStore for threads: see there. What it lacks of a BrowsableStore raises
    StoreNotBrowsable.

    Every method may be called from any thread at any time. Do not use a store on both sides of a
    fork at once.
    """

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store, LoopRunner())
        self.store = store

    publish_many = blocking(MetadataStore.publish_many)
    publish = blocking(MetadataStore.publish)
    look_up = blocking(MetadataStore.look_up)
    locate = blocking(MetadataStore.locate)
    withdraw_many = blocking(MetadataStore.withdraw_many)
    withdraw = blocking(MetadataStore.withdraw)
    claim = blocking(MetadataStore.claim)
    release_many = blocking(MetadataStore.release_many)
    release_claim = blocking(MetadataStore.release_claim)
    beat = blocking(MetadataStore.beat)
    leave = blocking(MetadataStore.leave)
    beats = blocking(MetadataStore.beats)
    describe_node = blocking(MetadataStore.describe_node)
    node_infos = blocking(MetadataStore.node_infos)
    describe_namespace = blocking(MetadataStore.describe_namespace)
    add_hits = blocking(MetadataStore.add_hits)
    add_stats = blocking(MetadataStore.add_stats)
    note_failures = blocking(MetadataStore.note_failures)
    invalidations = blocking(MetadataStore.invalidations)

    mark_invalid = blocking(BrowsableStore.mark_invalid)
    node_ages = blocking(BrowsableStore.node_ages)
    namespaces = blocking(BrowsableStore.namespaces)
    hits = blocking(BrowsableStore.hits)
    stats = blocking(BrowsableStore.stats)
    gone = blocking(BrowsableStore.gone)
    failure = blocking(BrowsableStore.failure)
    clear = blocking(BrowsableStore.clear)
    server_info = blocking(BrowsableStore.server_info)
    ping = blocking(BrowsableStore.ping)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """The result of a coroutine that uses `store`, or `browsed`."""
        return self._runner.run(coroutine)

    @property
    def browsable(self) -> bool:
        """Whether it is a BrowsableStore."""
        return isinstance(self.store, BrowsableStore)

    def scan(self, namespace: str | None = None, *, limit: int | None = None) -> Iterator[Record]:
        return self._runner.iterate(self.browsed.scan(namespace, limit=limit))

    def place_of(self, namespace: str, key: str) -> str:
        return self.store.place_of(namespace, key)

    def failovers(self) -> int:
        return self.store.failovers()

    def traces(self) -> "BlockingTraces":
        traces = self.browsed.traces()
        if traces is None:
            raise StoreNotBrowsable(self.store, "it keeps no history of keys")
        return BlockingTraces(traces, self._runner)

    def inspection(self) -> "BlockingInspection | None":
        inspection = self.browsed.inspection()
        return None if inspection is None else BlockingInspection(inspection, self._runner)

    def close(self) -> None:
        """Close all connections. Idempotent. Pending calls end with StoreUnavailable."""
        self._runner.close(self.store.close())

    @property
    def browsed(self) -> BrowsableStore:
        """The store itself. Raises StoreNotBrowsable: it has only what nodes need."""
        if not isinstance(self.store, BrowsableStore):
            raise StoreNotBrowsable(self.store)
        return self.store

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BlockingTraces(Blocking):
    """Traces for threads and commands."""

    of = blocking(Traces.of)
    hottest = blocking(Traces.hottest)
    departures = blocking(Traces.departures)

    def find(self, part: str) -> Iterator[Address]:
        return self._runner.iterate(cast("Traces", self._target).find(part))


class BlockingInspection(Blocking):
    """Inspection for threads and commands."""

    refused = blocking(Inspection.refused)
    allowed_beyond_reads = blocking(Inspection.allowed_beyond_reads)
    clock_ahead_seconds = blocking(Inspection.clock_ahead_seconds)
    foreign_nodes = blocking(Inspection.foreign_nodes)
    examine_records = blocking(Inspection.examine_records)
