"""Blocking calls of an asynchronous store: whoever waits may be interrupted."""

import asyncio
import os
import signal
import threading
import time

import pytest

from nodes import wait_until
from store.blocking import LoopRunner
from store.errors import StoreUnavailable


def test_an_interrupted_call_is_cancelled_on_the_loop_that_another_thread_drives() -> None:
    """Wherever the signal comes: one in 14 came before the wait had begun."""
    for _ in range(60):
        interrupt_a_call_on_a_loop_that_another_thread_drives()


def interrupt_a_call_on_a_loop_that_another_thread_drives() -> None:
    runner, begun = LoopRunner(), threading.Event()
    ended: list[type] = []

    async def drive() -> None:
        begun.set()
        while not ended:
            await asyncio.sleep(0.01)

    async def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60.0)
        except BaseException as end:
            ended.append(type(end))
            raise

    driver = threading.Thread(target=lambda: runner.run(drive()))
    driver.start()
    begun.wait(10.0)
    with pytest.raises(KeyboardInterrupt):
        runner.run(interrupted())
    wait_until(lambda: ended, 5.0)
    driver.join()
    assert ended == [asyncio.CancelledError]
    runner.close(asyncio.sleep(0))


def test_an_interrupted_call_of_the_driving_thread_leaves_no_task() -> None:
    runner = LoopRunner()
    ended: list[type] = []

    async def interrupted() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60.0)
        except BaseException as end:
            ended.append(type(end))
            raise

    with pytest.raises(KeyboardInterrupt):
        runner.run(interrupted())
    assert ended == [asyncio.CancelledError]
    assert runner.run(asyncio.sleep(0, "next")) == "next"
    runner.close(asyncio.sleep(0))


def test_a_call_inside_a_coroutine_is_refused() -> None:
    runner = LoopRunner()

    async def call() -> None:
        runner.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="open_async_store"):
        asyncio.run(call())


def call_until_it_ends(runner: LoopRunner, ends: list[BaseException]) -> None:
    try:
        while True:
            assert runner.run(asyncio.sleep(0.0001, "x")) == "x"
    except BaseException as end:
        ends.append(end)


def test_calls_of_other_threads_while_it_closes_end_or_are_refused() -> None:
    """Whenever the close comes: none hangs, and none sees a loop that is closed or a cancel."""
    for round_number in range(50):
        runner = LoopRunner()
        ends: list[BaseException] = []
        threads = [
            threading.Thread(target=call_until_it_ends, args=(runner, ends), daemon=True)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.0003 * round_number)
        runner.close(asyncio.sleep(0))
        for thread in threads:
            thread.join(10.0)
        assert [type(end) for end in ends] == [StoreUnavailable] * len(threads)


async def interrupted_at_its_end() -> int:
    """The signal comes once this has returned, and `run_until_complete` has not."""
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
    return 1


def test_an_interrupt_at_the_end_of_a_call_does_not_stop_the_next() -> None:
    runner, closed = LoopRunner(), []

    async def last() -> None:
        closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        runner.run(interrupted_at_its_end())
    assert runner.run(asyncio.sleep(0, 2)) == 2
    with pytest.raises(KeyboardInterrupt):
        runner.run(interrupted_at_its_end())
    runner.close(last())
    assert closed == [True]
