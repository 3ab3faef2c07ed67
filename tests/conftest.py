"""Shared by all tests: the fixtures of servers.py and nodes.py, and a guard against leaks.

It also keeps Python's collector from walking over all that the modules hold.

The guard: when a test ends, no process it started is left (also none that was detached from us),
and no thread. A test that leaks fails, with what is needed to find the leak in the message; leaked
processes are then killed so that they cannot spoil the tests after it. What fixtures of a wider
scope started before the test is not counted against it; they have to be named in its arguments.
"""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hypothesis_profiles import build_character_table, load_profile
from leaks import LeakGuard
from patience import scaled, slowness

# pytest puts the folder of this file on the path. Its folder `vllm` would then pass for the
# package of that name where none is installed.
with suppress(ValueError):
    sys.path.remove(str(Path(__file__).parent))

load_profile()

# Real servers and nodes for every test that asks: see servers.py, nodes.py, engines.py.
pytest_plugins = [
    name
    for name in (
        "servers",
        "nodes",
        "engines",
        "first_hosts",
        "raw_ends",
        "clusters",
        "switchovers",
        "observing",
        "groups",
        "network",
        "run_times",
        "standstills",
    )
    if importlib.util.find_spec(name)
]
# These are not named test_*, so without this a failed assert in them would not be explained.
pytest.register_assert_rewrite(
    "contract_pipe",
    "contract_pipe_limits",
    "contract_pipe_processes",
    "pipe_ends",
    "servers",
    "nodes",
    "engines",
    "observing",
    "openai_servers",
    "deployment",
    "store.testing",
)

_guard = pytest.StashKey[LeakGuard]()
_of_workers = pytest.StashKey[list[str]]()
_LEFT_BEHIND = "left behind"


def pytest_addoption(parser: pytest.Parser) -> None:
    """For soaks by hand; what CI runs is the default."""
    group = parser.getgroup("soak")
    group.addoption("--soak-seed", type=int, default=0, help="what chance begins with")
    group.addoption("--pool-rounds", type=int, default=1, help="rounds of 100 requests")
    group.addoption("--pool-batch", type=int, default=8, help="of them to one engine at once")
    group.addoption("--handoffs", type=int, default=400, help="hand-offs under faults")
    group.addoption("--lane-seconds", type=float, default=20.0, help="of faults among pools")
    group.addoption("--torture-minutes", type=float, default=0.0, help="at least one of each round")
    group.addoption("--torture-totals", default="", help="the file that runs add up in")
    group.addoption("--torture-rounds", default="", help="kinds of rounds, with commas between")
    group.addoption("--storm-requests", type=int, default=150, help="requests under faults")


def pytest_configure(config: pytest.Config) -> None:
    slowness()  # measured before anything of the run is a load, and handed on to all its processes
    config.stash[_guard] = LeakGuard.install()
    config.stash[_of_workers] = []
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a shell starts what it puts into the background, and so would every command that a test
        # interrupts, as its child.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # not before Hypothesis' own
def pytest_sessionstart() -> None:
    build_character_table()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Python's collector passes over what the modules of all tests have made.

    These are 700,000 objects with torch and vLLM among them, and never garbage. Each full
    collection walks over all that is not frozen, 0.5 to 1 s of it, while all threads of the process
    stand still; a test in whose call that falls takes it for the call's.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # from here it counts how much there is, and so how much more makes it due


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def environment_of_the_module() -> Iterator[None]:
    """vLLM sets variables when it makes a configuration, LD_PRELOAD among them: every node and
    server that a later test starts would load torch's libraries."""
    with _environment_kept():
        yield


@pytest.fixture(autouse=True)
def environment(environment_of_the_module: None) -> Iterator[None]:
    with _environment_kept():
        yield


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up first of the function's fixtures, so it looks after all of them are torn down."""
    guard = request.config.stash[_guard]
    baseline = guard.baseline()
    yield
    # An engine inside the test's process leaves threads of vLLM and torch behind; those are not
    # ours to end. Its processes are.
    threads = request.node.get_closest_marker("vllm") is None
    report = guard.leaked_since(baseline, threads=threads, timeout_seconds=scaled(10.0))
    if report:
        pytest.fail(f"{request.node.nodeid} left something behind:\n{report}", pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The same for fixtures of wider scope: after the last test nothing at all is left."""
    gc.unfreeze()  # libraries report at the exit what was not collected
    guard = session.config.stash[_guard]
    reports = session.config.stash[_of_workers]
    if report := guard.leaked_since(guard.at_start, threads=False, timeout_seconds=scaled(10.0)):
        reports.append(report)
    to_the_controller = getattr(session.config, "workeroutput", None)
    if to_the_controller is not None:
        to_the_controller[_LEFT_BEHIND] = reports
    elif reports:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nThe test session left something behind:", *reports, sep="\n")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist, which itself has nowhere to print, has ended."""
    workeroutput = getattr(node, "workeroutput", {})
    node.config.stash[_of_workers] += workeroutput.get(_LEFT_BEHIND, [])
