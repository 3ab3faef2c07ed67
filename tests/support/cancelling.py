"""Cancels a coroutine at each of its await points, one run for each."""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

RUNS_MAX = 1000


@types.coroutine
def _cancelled_at(coroutine: Coroutine[Any, Any, Any], wait: int) -> Generator[Any, Any, bool]:
    """Await `coroutine`; its task is cancelled at the `wait`-th point where it waits. Returns
    whether it ended before."""
    task = asyncio.current_task()
    assert task is not None
    waits = 0
    sent: BaseException | None = None
    while True:
        try:
            waited_for = coroutine.send(None) if sent is None else coroutine.throw(sent)
        except StopIteration:
            return waits <= wait
        if waits == wait:
            task.get_loop().call_soon(task.cancel)
        waits += 1
        try:
            yield waited_for
        except BaseException as error:
            sent = error
        else:
            sent = None


async def cancel_at_each_wait(
    make: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[], Awaitable[None]]
) -> int:
    """Run what `make` returns, cancelled at its first wait, then at its second, and so on, until a
    run ends before. `check` is awaited after each run. Returns the number of cancelled runs."""
    for wait in range(RUNS_MAX):
        task = asyncio.ensure_future(_cancelled_at(make(), wait))
        await asyncio.wait([task])
        await check()
        if not task.cancelled() and task.result():
            return wait
    raise AssertionError(f"it waits more than {RUNS_MAX} times")
