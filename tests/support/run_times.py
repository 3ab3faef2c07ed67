"""How long each test took: into build/test-times.json, with a summary at the end of the run.

A pytest plugin. The file names each test's seconds of setup, call and teardown, the processor
seconds of the test's own thread in its call, and those of all processes that it waited for; then
the sums of each file and of each tier, which is the file's folder. Of a run of several pytest
processes (`scripts/run-tests`) each adds to the file that `TEST_TIMES` names; a single pytest
begins it anew.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = "TEST_TIMES"
"""The file that all pytest processes of one run add to."""
SLOWEST_SHOWN = 30
_PHASES = ("setup", "call", "teardown")
_CPU = "cpu_seconds"
_OF_CHILDREN = "children_cpu_seconds"

Test = dict[str, float]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _children_before[:] = [_of_children()]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    yield
    item.user_properties.append((_OF_CHILDREN, round(_of_children() - _children_before[0], 3)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    began = time.thread_time()
    yield
    item.user_properties.append((_CPU, round(time.thread_time() - began, 3)))


_children_before = [0.0]


def _of_children() -> float:
    """Processor seconds of the processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system


class Times:
    """The tests of one pytest process; with pytest-xdist, of the one that starts the workers."""

    def __init__(self, path: Path, *, adds: bool) -> None:
        self._path = path
        self._adds = adds
        self.tests: dict[str, Test] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[report.nodeid]
        test[report.when] = round(test.get(report.when, 0.0) + report.duration, 3)
        for name, value in report.user_properties:
            if name in (_CPU, _OF_CHILDREN):
                test[name] = value  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        tests = dict(self.tests)
        if self._adds and self._path.is_file():
            tests = json.loads(self._path.read_text())["tests"] | tests
        document = {
            "tiers": sums(tests, tier_of),
            "files": sums(tests, file_of),
            "tests": dict(sorted(tests.items())),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(document, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        slowest = sorted(self.tests.items(), key=lambda one: -seconds_of(one[1]))[:SLOWEST_SHOWN]
        terminalreporter.section(f"slowest {len(slowest)} tests: setup + call + teardown, seconds")
        for name, test in slowest:
            phases = " + ".join(f"{test.get(phase, 0.0):.2f}" for phase in _PHASES)
            terminalreporter.write_line(f"{seconds_of(test):7.2f} = {phases:22} {name}")
        terminalreporter.section(
            "seconds by tier: of tests, processor, processes' processor; tests"
        )
        for tier, tally in sums(self.tests, tier_of).items():
            terminalreporter.write_line(
                f"{tally['seconds']:8.1f} {tally[_CPU]:8.1f} {tally[_OF_CHILDREN]:8.1f}"
                f" {tally['tests']:6} {tier}"
            )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        named = os.environ.get(ENVIRONMENT)
        path = Path(named) if named else ROOT / "build" / "test-times.json"
        config.pluginmanager.register(Times(path, adds=named is not None))


def seconds_of(test: Test) -> float:
    return sum(test.get(phase, 0.0) for phase in _PHASES)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def tier_of(nodeid: str) -> str:
    return Path(file_of(nodeid)).parent.name


def sums(tests: dict[str, Test], group_of: Any) -> dict[str, dict[str, float]]:
    """Seconds, processor seconds and number of the tests of each group, the longest first."""
    found: dict[str, dict[str, float]] = {}
    for nodeid, test in tests.items():
        tally = found.setdefault(
            group_of(nodeid), {"seconds": 0.0, _CPU: 0.0, _OF_CHILDREN: 0.0, "tests": 0}
        )
        tally["seconds"] = round(tally["seconds"] + seconds_of(test), 3)
        for name in (_CPU, _OF_CHILDREN):
            tally[name] = round(tally[name] + test.get(name, 0.0), 3)
        tally["tests"] += 1
    return dict(sorted(found.items(), key=lambda one: -one[1]["seconds"]))
