"""How the turns of the node's loop are shared, so that nothing holds it for long.

`Turns` is for connections, for answers to other nodes, for the inserts of all clients, and for the
hand-offs that wait for room. A connection handles its messages in steps, an insert its parts.
Together the steps take about TURN_SECONDS of each turn of the loop, or one step takes longer. The
rest waits, and then each worker makes one step in its turn: who sends much delays others by a step.
While there is time and nobody waits, a step is made at once: a message is handled as soon as it is
read.

`Places` bounds what is done at a time beside the loop: transfers, the sends of `peers`. Used on the
loop's thread only.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from lookup_buffer.times import TURN_SECONDS

T = TypeVar("T")


async def granted(
    grant: "asyncio.Future[T]", until: float | None, undo: Callable[[T], object] = lambda _: None
) -> T:
    """The result of `grant`, which takes effect when it is set: also if that is in the turn of the
    deadline. If it is in the turn of a cancellation, the result is undone. A grant that comes later
    finds that it is cancelled.

    Raises:
        TimeoutError: there is no result at `until`, by the loop's clock.
    """
    try:
        async with asyncio.timeout_at(until):
            return await grant
    except TimeoutError:
        if grant.cancelled():
            raise
        return grant.result()
    except asyncio.CancelledError:
        if not grant.cancelled() and grant.exception() is None:
            undo(grant.result())
        raise


@dataclass(slots=True)
class Places:
    """Of those who ask for one, so many have it at a time; the others wait in order. One that
    leaves costs no search among all that wait, as it would in `asyncio.Semaphore`."""

    _free: int
    _waiting: "OrderedDict[asyncio.Future[None], None]" = field(default_factory=OrderedDict)

    def locked(self) -> bool:
        """Whether who asks now would wait."""
        return not self._free

    def ask(self) -> "asyncio.Future[None]":
        """Done once it has a place, which it is to `release`. Who leaves before cancels it."""
        place = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            place.set_result(None)
        else:
            self._waiting[place] = None
            place.add_done_callback(lambda place: self._waiting.pop(place, None))
        return place

    def release(self) -> None:
        while self._waiting:
            place, _ = self._waiting.popitem(last=False)
            if not place.done():
                place.set_result(None)
                return
        self._free += 1


class Worker(Protocol):
    def step(self) -> bool | None:
        """Do a part of the work. Returns whether more of it can be done now. What it raises is a
        bug, which asyncio reports: the worker is not called again."""
        ...


class Steps(NamedTuple):
    """A worker whose steps are calls of a function: one, unless it returns true."""

    step: Callable[[], bool | None]


class Turns:
    """Of workers of one kind: other kinds have their own, and their own time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Worker] = deque()
        self._left = TURN_SECONDS
        """Of this turn of the loop, or of several if those took little: to begin anew in each would
        make the loop turn once more for each message."""
        self._is_scheduled = False

    def work(self, worker: Worker) -> bool:
        """Let `worker`, which does not wait, do its steps. Returns whether it waits to go on."""
        if not self._waiting:
            while self._left > 0:
                if not self._step(worker):
                    return False
        self.add(worker)
        return True

    def add(self, worker: Worker) -> None:
        """Let `worker`, which does not wait, do its steps after those that wait: none at once."""
        self._waiting.append(worker)
        self._schedule()

    async def run(self, call: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
        """The result of `call`, which is a step. If this is cancelled before, there is no call; if
        in the turn of the call, its result is undone."""
        done: asyncio.Future[T] = self._loop.create_future()

        def step() -> None:
            if not done.done():
                try:
                    done.set_result(call())
                except Exception as error:  # noqa: BLE001 -- the task raises it
                    done.set_exception(error)

        self.work(Steps(step))
        return await granted(done, None, undo)

    def _step(self, worker: Worker) -> bool:
        began = self._loop.time()
        has_more = bool(worker.step())
        self._left -= self._loop.time() - began
        if self._left <= 0:
            self._schedule()
        return has_more

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled, self._left = False, TURN_SECONDS
        try:
            while self._waiting and self._left > 0:
                worker = self._waiting.popleft()
                if self._step(worker):
                    self._waiting.append(worker)
        finally:
            if self._waiting:
                self._schedule()
