"""The dashboard in a real browser, for tests: a browser for each module, and a page of a node."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from browser import Browser, Tab, chromium_executable
from nodes import NodeProcess

LIVE = "document.getElementById('status').dataset.state == 'live'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser(chromium_executable())
    yield browser
    browser.close()


@contextmanager
def dashboard(browser: Browser, node: NodeProcess, *, live: bool = True) -> Iterator[Tab]:
    """The node's page, once it shows something; nobody has complained in its console."""
    tab = browser.open(f"{node.settings.http_listen}/")
    if live:
        tab.wait_for(f"{LIVE} && document.getElementById('rate').textContent != '–' || {LIVE}")
    yield tab
    assert tab.errors() == []
    tab.close()


def number(text: str) -> int:
    """Of `1,234` or `1,234 in all`."""
    return int(text.split()[0].replace(",", ""))
