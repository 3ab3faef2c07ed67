"""The dashboard's page: lost and found again, and behind a token."""

from nodes import StartNode
from observing import LIVE, Browser, dashboard
from servers import free_port

TOKEN = "nur-fuer-uns-und-niemanden"


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
