"""The node's loop measures how long it is blocked, and says where."""

import asyncio
import logging
import time

import pytest

from lookup_buffer.node.counters import Histogram
from lookup_buffer.node.main import BLOCKED_SECONDS, TimedSelector

LONG_SECONDS = 5 * BLOCKED_SECONDS


def a_long_callback() -> None:
    time.sleep(LONG_SECONDS)


async def block_now_and_then(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(LONG_SECONDS)  # this is no blocked time
        asyncio.get_running_loop().call_soon(a_long_callback)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_blocked_loop_is_measured_and_logged(
    level: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked: list[float] = []
    histogram = Histogram()
    monkeypatch.setattr(histogram, "observe", blocked.append)
    with caplog.at_level(level, "lookup_buffer.node.main"):
        selector = TimedSelector(histogram)
        loop = asyncio.SelectorEventLoop(selector)
        selector.log_stacks()
        loop.run_until_complete(block_now_and_then(3))
        loop.close()
    assert len(blocked) >= 3
    assert min(blocked) > BLOCKED_SECONDS
    assert sum(seconds >= LONG_SECONDS for seconds in blocked) >= 3
    logged = [record.message for record in caplog.records]
    if level == logging.DEBUG:
        assert any(" a_long_callback < " in message for message in logged)
    else:
        assert logged == []
