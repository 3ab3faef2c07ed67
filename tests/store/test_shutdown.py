"""A store or a mirror that is closed in the middle of a dial: nothing is raised, nothing is logged.

In processes in Python's development mode, one for each way of closing. There a task that is
destroyed while it waits, an exception that nobody takes and a socket that nobody closes are errors.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nodes import ROOT
from patience import scaled
from proxies import ANYWHERE, Blackhole

PATIENT_SECONDS = 1000.0
"""Of calls and connects: the test ends in time only if they are ended."""
END_SECONDS = 30.0

URLS = (
    "redis://127.0.0.1:{0}",
    "redis-cluster://127.0.0.1:{0},127.0.0.1:{1}",
    "redis-sentinel://127.0.0.1:{0},127.0.0.1:{1}/service",
    "rediss://127.0.0.1:{0}",
)

USE = """
import asyncio, logging, sys, threading, time
from store import StoreUnavailable, open_async_store, open_store

# The development mode also reports a step of the loop that took 0.1 s: the machine may be busy.
logging.getLogger("asyncio").addFilter(lambda one: not str(one.msg).startswith("Executing"))
how, seconds, urls = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
timeouts = {"call_timeout_seconds": seconds, "connect_timeout_seconds": seconds}

async def use(url):
    store, found = open_async_store(url, **timeouts), []
    mirror, _ = store.mirror()
    calls = [asyncio.create_task(call) for call in (store.ping(), store.look_up([("ns", "k")]))]
    await asyncio.sleep(0.2)
    mirror.ask("ns", ["k"], found.extend)
    await asyncio.sleep(0.2)
    assert not any(call.done() for call in calls)
    if how == "cancelled":
        for call in calls:
            call.cancel()
    mirror.close()
    await store.close()
    expected = asyncio.CancelledError if how == "cancelled" else StoreUnavailable
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(end) for end in ends] == [expected] * 2, ends
    assert [type(one) for one in found] == [StoreUnavailable]

def use_from_threads(url):
    def ping():
        try:
            store.ping()
        except StoreUnavailable:
            ended.append(True)

    store, ended = open_store(url, **timeouts), []
    threads = [threading.Thread(target=ping) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    store.close()
    for thread in threads:
        thread.join()
    assert ended == [True] * 3

for url in urls:
    use_from_threads(url) if how == "from threads" else asyncio.run(use(url))
"""


@pytest.fixture(params=["nobody accepts", "nobody answers"])
def ports(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    if request.param == "nobody accepts":
        with Blackhole() as one, Blackhole() as other:
            yield [one.port, other.port]
    else:
        with socket.create_server(ANYWHERE) as one, socket.create_server(ANYWHERE) as other:
            yield [one.getsockname()[1], other.getsockname()[1]]


@pytest.mark.parametrize("how", ["closed", "cancelled", "from threads"])
def test_a_dial_ends_with_its_store(ports: list[int], how: str) -> None:
    words = [how, str(PATIENT_SECONDS), *(url.format(*ports) for url in URLS)]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", USE, *words],
        capture_output=True,
        cwd=ROOT,
        text=True,
        timeout=scaled(END_SECONDS),
    )
    assert (done.returncode, done.stderr) == (0, "")
