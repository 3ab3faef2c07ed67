"""An engine whose weights are still being hashed: it serves, and shares nothing until that is done.

Another engine of this host holds the lock of the hashing, so the test decides when it continues.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from connector_standins import EMBED_BYTES, Bench, make_request
from connectors.client import SchedulerClient
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.namespace import Identity, NamespaceTask
from connectors.settings import ConnectorSettings
from connectors.weights import DigestCache, WeightsSource, weights_source
from nodes import wait_until
from test_kv_scheduler import Engine, Request
from test_weights import checkpoint, config

CHUNKS = 40
HASHED_SECONDS = 60.0


class Start:
    """An engine's client, and the moment at which its weights may be hashed."""

    def __init__(self, source: WeightsSource, cache: DigestCache) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(cache.lock(threading.Event()))
        self.naming = NamespaceTask(Identity({"part": "value"}, source), cache=cache)

    def client_over(self, buffer: Any) -> Any:
        buffer.namespace = ""
        return SchedulerClient(buffer, self.naming)

    def go_on(self) -> str:
        self._stack.close()
        wait_until(lambda: self.naming.namespace is not None, HASHED_SECONDS)
        assert self.naming.namespace is not None
        return self.naming.namespace.fingerprint

    def close(self) -> None:
        self._stack.close()
        self.naming.close()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr("connectors.namespace.AT_ONCE_BYTES", 0)
    source = weights_source(config(checkpoint(tmp_path / "model")), "")
    started = Start(source, DigestCache(tmp_path / "cache"))
    yield started
    started.close()


def scheduler_of(bench: Bench, start: Start, *, consumer: bool) -> EcScheduler:
    return EcScheduler(
        start.client_over(bench.buffer),
        ConnectorSettings(idle_wait_seconds=0, capacity_bytes=1 << 26),
        EngineShape(True, consumer, 2, EMBED_BYTES),
        metadata_fields=lambda _: set(),
        clock=bench.clock,
    )


@pytest.mark.parametrize("consumer", [True, False], ids=["both", "encode-only"])
def test_encoder_outputs_are_shared_once_the_weights_are_hashed(
    start: Start, consumer: bool
) -> None:
    bench = Bench(consumer=consumer)
    bench.scheduler = scheduler_of(bench, start, consumer=consumer)
    for name in ("A", "C"):
        bench.store(name)
    before = make_request("before", "A")
    assert bench.ensure(before), "it waits for nothing"
    assert not bench.allocate(before)
    metadata = bench.build()
    assert (metadata.namespace, metadata.mm_datas, metadata.saves) == ("", [], {})
    assert bench.buffer.calls == [], "no request was sent"
    assert bench.buffer.fleet.sets == []
    assert bench.buffer.fleet.encoding == []
    if consumer:
        assert bench.scheduler.counters.totals()["miss:namespace_pending"] == 1
    bench.scheduler.gate.forget("before")
    fingerprint = start.go_on()
    after, new = make_request("after", "C"), make_request("new", "B")
    assert bench.ensure(after)
    assert bench.allocate(after)
    assert bench.ensure(new)
    assert not bench.allocate(new)
    metadata = bench.build()
    assert metadata.namespace == bench.buffer.namespace == fingerprint
    assert list(metadata.saves) == ["B"]
    assert [load.mm_hash for load in metadata.mm_datas] == (["C"] if consumer else [])


def test_kv_is_shared_once_the_weights_are_hashed(start: Start) -> None:
    engine = Engine(client_over=start.client_over, behind_router=True)
    before = Request("before", CHUNKS)
    engine.know(before, [0, 1])
    handed = Request("handed", CHUNKS, seed=7)
    handed.kv_transfer_params = {"do_remote_decode": True}
    taken = Request("taken", CHUNKS, seed=8)
    taken.kv_transfer_params = {"do_remote_prefill": True, "transfer_id": "t"}
    for request in (before, handed, taken):
        assert engine.side.matched(request, 0) == (0, False), "it waits for nothing"
        metadata = engine.start(request, engine.allocate(request, 0, CHUNKS), CHUNKS)
        assert (metadata.namespace, metadata.loads, metadata.saves) == ("", [], [])
        assert engine.side.finished(request) is None, "no hand-off is reported"
    assert engine.buffer.calls == []
    assert engine.side.counters.totals()["miss:namespace_pending"] >= 1
    fingerprint = start.go_on()
    after = Request("after", CHUNKS)
    tokens, is_coming = engine.side.matched(after, 0)
    assert tokens
    assert is_coming
    metadata = engine.start(after, engine.allocate(after, tokens, CHUNKS), CHUNKS)
    assert metadata.namespace == engine.buffer.namespace == fingerprint
    assert metadata.loads
