"""What a core that stood still does to tests: a failure tells it, and the test runs once more.

A pytest plugin. Where a core gets nothing for a second, calls time out and leases lapse, as they
must, and a test sees misses. Such a test runs again, with all its fixtures, wide ones too, started
anew, and its second result counts. The end of the run names each such test, with its first failure.
"""

import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from patience import Standstills

AGAIN_SECONDS = 1.0
"""As long as the shortest bounds that the product has: a beat, a call of the store."""
_RERUN = "rerun"
_SECTION = "The machine"

standstills_key = pytest.StashKey[Standstills]()


@pytest.hookimpl(tryfirst=True)  # before the guard of leaks: the sleepers are none
def pytest_configure(config: pytest.Config) -> None:
    if (workerinput := getattr(config, "workerinput", None)) is not None:
        config.stash[standstills_key] = Standstills(Path(workerinput["standstills"]))
        return
    until_the_end = ExitStack()
    config.add_cleanup(until_the_end.close)
    folder = until_the_end.enter_context(tempfile.TemporaryDirectory())
    config.stash[standstills_key] = standstills = Standstills(Path(folder, "standstills"))
    until_the_end.enter_context(standstills.watched())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist is about to start a worker."""
    node.workerinput["standstills"] = str(node.config.stash[standstills_key].path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure comes with what the machine did meanwhile: no excuse, perhaps an explanation."""
    report = yield
    if report.failed:
        began = time.monotonic() - call.duration
        if took := item.config.stash[standstills_key].longest(since=began):
            said = f"A core stood still for {took:.2f} s meanwhile."
            report.sections.append((_SECTION, said))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    began = time.monotonic()
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failed = [report for report in reports if report.failed]
    if failed and item.config.stash[standstills_key].longest(since=began) >= AGAIN_SECONDS:
        for report in failed + _end_all_fixtures(item):
            report.outcome = _RERUN  # type: ignore[assignment]  # as pytest-rerunfailures calls it
            item.ihook.pytest_runtest_logreport(report=report)
        item._initrequest()  # type: ignore[attr-defined]
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _end_all_fixtures(item: pytest.Item) -> list[pytest.TestReport]:
    """A report if one of them fails at that."""
    ended = pytest.CallInfo.from_call(
        lambda: item.session._setupstate.teardown_exact(None), when="teardown"
    )
    if ended.excinfo is None:
        return []
    return [item.ihook.pytest_runtest_makereport(item=item, call=ended)]


def pytest_report_teststatus(
    report: pytest.TestReport,
) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    if report.outcome == _RERUN:
        return _RERUN, "R", ("RERUN", {"yellow": True})
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.stats.get(_RERUN, ()):
        terminalreporter.section(f"ran once more, since the machine stood still: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
        # Empty if it stood still in another phase of the test than the one that failed.
        terminalreporter.write_line(dict(report.sections).get(_SECTION, ""))
