"""The dashboard's page, open for an hour, which passes quickly here."""

import pytest

from lookup_buffer.dashboard import feed
from lookup_buffer.dashboard.feed import HISTORY_SECONDS, Feed
from lookup_buffer.dashboard.fleet import PageUpdate
from memory_store import InMemoryStore
from observing import Browser, serving_feed

pytestmark = pytest.mark.part(name="soaks")

HOUR_SECONDS = 3600
SAMPLE_PAUSE_SECONDS = 0.006
HEAP_GROWTH_BYTES = 1_000_000
REASONS = ("absent", "stale", "timeout", "no_room")
START = 1_800_000_000


class BusyFleet:
    """Instead of `FleetSampler`: one second every few milliseconds; keys, nodes and reasons of
    misses appear and disappear. Each second has one hit, so the page's count is known."""

    def __init__(self, *_: object) -> None:
        self._number = 0

    def close(self) -> None:
        pass

    async def sample(self) -> PageUpdate:
        self._number += 1
        number = self._number
        point = {
            "at": START + number, "seconds": 1.0, "hits": 1, "claims": number % 5,
            "misses": {REASONS[number // 50 % 4]: number % 3},
            "bytes": {"received shm": 1000 * number, "sent tcp": 10},
        }  # fmt: skip
        nodes = [
            {"node": f"node-{number // 100 + n}", "state": "alive" if n else "dead",
             "silent_seconds": None if n else 7.0, "host": "h", "endpoint": "tcp://h:1",
             "version": "0.1", "items": number, "used_bytes": number, "capacity_bytes": 99999,
             "claims": 1, "hits_per_second": 1.5, "misses_per_second": 0.1}
            for n in range(8)
        ]  # fmt: skip
        hottest = [
            {"namespace": "5" * 64, "key": f"key-{number // 10 + n}", "hits": number,
             "hits_per_second": 0.1 * n}
            for n in range(12)
        ]  # fmt: skip
        now = {
            "at": point["at"], "asked_seconds": 0.001, "nodes": nodes, "claims": number % 5,
            "hottest": hottest, "hits": number, "hit_bytes": 9 * number,
            "misses": {"absent": number, "stale": 3},
            "transfers": [{"direction": "received", "pipe": "shm", "bytes": number,
                           "bytes_per_second": 5}],
        }  # fmt: skip
        return PageUpdate(now, point)


def test_an_hour_leaks_no_memory(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FleetSampler", BusyFleet)
    monkeypatch.setattr(feed, "INTERVAL_SECONDS", SAMPLE_PAUSE_SECONDS)
    with serving_feed(Feed("busy", InMemoryStore)) as server:
        tab = browser.open(f"{server.settings.http_listen}/")
        shown = (
            "parseInt(document.getElementById('saved-note').textContent.replaceAll(',', '')) || 0"
        )
        tab.wait_for(f"({shown}) > {HISTORY_SECONDS}", 120.0)
        before, begun = tab.metrics(), int(tab.run(shown))
        tab.wait_for(f"({shown}) > {begun + HOUR_SECONDS - HISTORY_SECONDS}", 240.0)
        after = tab.metrics()
        hits = "[...document.querySelectorAll('#minutes td:nth-child(3)')]"
        heard = tab.run(f"{hits}.reduce((all, cell) => all + parseInt(cell.textContent), 0)")
        print({name: (before[name], after[name]) for name in ("Nodes", "JSHeapUsedSize")})
        assert heard > 0.8 * HISTORY_SECONDS  # the page kept up, and has what it is to keep
        assert after["Nodes"] < 1.2 * before["Nodes"]
        assert after["JSEventListeners"] < before["JSEventListeners"] + 20
        assert after["JSHeapUsedSize"] - before["JSHeapUsedSize"] < HEAP_GROWTH_BYTES
        assert tab.errors() == []
