"""Lines: a slow server delays its own line only; a node that ends does not wait for all work."""

import threading
import time
from contextlib import ExitStack

import pytest

from lookup_buffer.node.lines import Lines
from nodes import StartNode, key, wait_until
from proxies import Relay
from servers import StartServer


def test_each_shard_has_its_own_ordered_queue() -> None:
    lines, done, hold = Lines("test"), [], threading.Event()
    lines.submit("slow", lambda _: hold.wait(10.0))
    for n in range(20):
        lines.submit("slow", lambda _, n=n: done.append(("slow", n)))  # type: ignore[misc]
        lines.submit("fast", lambda _, n=n: done.append(("fast", n)))  # type: ignore[misc]
    wait_until(lambda: len(done) == 20, 5.0)
    hold.set()
    lines.close(5.0)
    assert done == [(place, n) for place in ("fast", "slow") for n in range(20)]


def test_each_shard_has_its_own_breaker() -> None:
    lines, allowed = Lines("test"), []
    for _ in range(3):
        lines.submit("dead", lambda breaker: breaker.failed())
    for place in ("dead", "living"):
        lines.submit(place, lambda breaker: allowed.append(breaker.allows()))
    lines.close(5.0)
    assert sorted(allowed) == [False, True]


def test_a_failed_task_does_not_stop_the_queue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines, done = Lines("test"), threading.Event()
    lines.submit("", lambda _: 1 / 0)
    lines.submit("", lambda _: done.set())
    assert done.wait(5.0)
    lines.close(5.0)
    assert "ZeroDivisionError" in caplog.text


def test_closing_is_bounded_and_drops_the_remaining_tasks() -> None:
    lines, hold = Lines("test"), threading.Event()
    done: list[object] = []
    lines.submit("frozen", lambda _: hold.wait(60.0))
    lines.submit("frozen", done.append)
    started = time.monotonic()
    lines.close(0.2)
    assert 0.2 <= time.monotonic() - started < 30.0, "the line is held for a minute"
    hold.set()
    lines.submit("frozen", done.append)
    time.sleep(0.1)
    assert done == []


def test_a_node_ends_in_time_with_releases_pending(
    start_server: StartServer, start_node: StartNode
) -> None:
    relay = Relay()
    relay.connect_to(str(start_server().directory / "server.sock"))
    node = start_node(store_url=f"redis://127.0.0.1:{relay.port}", store_timeout_seconds=2.0)
    wait_until(lambda: node.stats()["store_up"], 5.0)
    with ExitStack() as stack:
        for _ in range(100):
            assert stack.enter_context(node.client()).claim(key(), lease_seconds=60.0).granted
        relay.delay(0.4)
        started = time.monotonic()
        assert node.terminate() == 0
        print(f"ended after {time.monotonic() - started:.2f} s")
        # One round trip for each session would take 40 s; the registrar leaves within a few.
        assert time.monotonic() - started < 30.0
    relay.close()
