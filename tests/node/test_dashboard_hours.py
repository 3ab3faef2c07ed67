"""The dashboard's page over time: lost and found again, behind a token, and open for an hour."""

import pytest

from lookup_buffer.dashboard import feed
from lookup_buffer.dashboard.feed import HISTORY_SECONDS, Feed
from lookup_buffer.dashboard.fleet import PageUpdate
from memory_store import InMemoryStore
from nodes import StartNode
from observing import LIVE, Browser, dashboard, serving_feed
from servers import free_port

TOKEN = "nur-fuer-uns-und-niemanden"
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


@pytest.mark.alone
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


def test_a_lost_connection_is_shown_and_made_again(browser: Browser, start_node: StartNode) -> None:
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}")
    status = "document.getElementById('status')"
    with dashboard(browser, node) as tab:
        tab.wait_for("document.getElementById('alive').textContent.startsWith('1 ')")
        node.kill()
        tab.wait_for(f"{status}.innerText.includes('connection lost, trying again in')")
        assert "The connection to the node is lost. The data below is of" in tab.text("#banner")
        assert tab.run("document.getElementById('board').classList.contains('stale')")
        tab.type("#key", "anything")
        tab.wait_for("document.getElementById('answer').innerText.includes('does not answer')")
        node.start()
        tab.wait_for(f"{LIVE} && document.getElementById('banner').hidden", 40.0)
        tab.forgive()  # browsers complain of each request that fails


def test_the_page_requests_the_token_and_keeps_it_for_the_tab(
    browser: Browser, start_node: StartNode
) -> None:
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}", http_token=TOKEN)
    with dashboard(browser, node, live=False) as tab:
        tab.wait_for("!document.getElementById('login').hidden")
        assert tab.run("document.getElementById('board').hidden")
        assert tab.errors() == []
        tab.type("#token", "another")
        tab.wait_for("document.getElementById('refused').textContent != ''")
        tab.forgive()  # of the 401
        tab.type("#token", TOKEN)
        tab.wait_for(LIVE)
        tab.type("#key", "never-stored")
        tab.wait_for("document.querySelector('.findings')")
        assert TOKEN not in tab.run("location.href + document.documentElement.outerHTML")
        loaded = tab.run("performance.getEntriesByType('resource').map(one => one.name).join(' ')")
        assert TOKEN not in loaded
        tab.go(f"{node.settings.http_listen}/")
        tab.wait_for(LIVE)
        with dashboard(browser, node, live=False) as other:
            other.wait_for("!document.getElementById('login').hidden")
    assert TOKEN not in node.log_text()
