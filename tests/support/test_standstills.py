"""Standstills are detected, and a test runs once more: by stopped sleepers, or by what is said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import run_of
from nodes import wait_until
from patience import STANDSTILL_SECONDS, Standstills, scaled
from servers import alive

pytestmark = pytest.mark.processes

STOPPED_SECONDS = 0.5


@pytest.fixture
def standstills(tmp_path: Path) -> Standstills:
    return Standstills(tmp_path / "standstills")


def test_a_standstill_is_reported_for_its_time_only(standstills: Standstills) -> None:
    with standstills.watched() as sleepers:
        assert len(sleepers) == len(os.sched_getaffinity(0))
        time.sleep(0.5)  # until they sleep
        before = time.monotonic()
        for sleeper in sleepers:
            os.kill(sleeper, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        for sleeper in sleepers:
            os.kill(sleeper, signal.SIGCONT)
        wait_until(lambda: standstills.longest(since=before) >= STANDSTILL_SECONDS, 2.0)
        assert standstills.longest(since=before) > STOPPED_SECONDS - STANDSTILL_SECONDS
        assert standstills.longest(since=time.monotonic() + 3600) == 0
    assert not any(alive(sleeper) for sleeper in sleepers)


def test_the_sleepers_end_with_their_parent(standstills: Standstills) -> None:
    program = (
        "import os, pathlib, sys, patience\n"
        "with patience.Standstills(pathlib.Path(sys.argv[1])).watched() as sleepers:\n"
        "    print(*sleepers, flush=True)\n"
        "    os._exit(0)\n"
    )
    started = subprocess.run(
        [sys.executable, "-c", program, str(standstills.path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=scaled(30),
    )
    sleepers = [int(pid) for pid in started.stdout.split()]
    assert sleepers
    wait_until(lambda: not any(alive(sleeper) for sleeper in sleepers), 5.0)


@pytest.mark.parametrize(("seconds", "told"), [(0.25, True), (0.0, False)])
def test_a_failure_reports_the_standstill_and_counts(
    tmp_path: Path, seconds: float, told: bool
) -> None:
    run = run_of(
        tmp_path,
        "import patience\n"
        f"patience.Standstills.longest = lambda self, since: {seconds}\n"
        "def test_fails(): assert 1 == 2\n"
        "def test_passes(): pass\n",
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert "1 failed, 1 passed" in run.stdout
    assert (run.stdout.count("A core stood still for 0.25 s meanwhile.") == 1) is told


@pytest.mark.parametrize(("seconds", "again"), [(1.5, True), (0.5, False)])
def test_what_fails_while_a_core_stands_still_runs_once_more(
    tmp_path: Path, seconds: float, again: bool
) -> None:
    """With fixtures started anew; what fails twice has failed, and what passes runs once."""
    run = run_of(
        tmp_path,
        "import patience, pytest\n"
        f"patience.Standstills.longest = lambda self, since: {seconds}\n"
        "started, ended, passed, asked = [], [], [], []\n"
        "@pytest.fixture(scope='module')\n"
        "def number():\n"
        "    started.append(1)\n"
        "    yield len(started)\n"
        "    ended.append(1)\n"
        "    assert len(ended) != 1\n"
        "@pytest.fixture(scope='module')\n"
        "def second_time():\n"
        "    asked.append(1)\n"
        "    assert len(asked) == 2\n"
        "def test_passes(number): passed.append(1)\n"
        "def test_fails_once(number): assert number == 2\n"
        "def test_starts_once_more(second_time): pass\n"
        "def test_fails(): assert 1 == 2\n"
        "def test_passed_once(): assert len(passed) == 1\n",
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    named = run.stdout.count("ran once more, since the machine stood still: ")
    if again:
        assert "1 failed, 4 passed" in run.stdout
        assert named == 4, run.stdout  # two calls, a start of a fixture, an end of the other
        assert "assert 1 == 2" in run.stdout
    else:
        assert "2 failed, 2 passed, 2 errors" in run.stdout, run.stdout
        assert named == 0
