"""The leak guard must itself be able to fail: each kind of leak is made and has to be found."""

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from command_line import run_of
from leaks import LeakGuard
from patience import scaled

pytestmark = pytest.mark.processes

SLEEPER = "import time; time.sleep(60)"
# Detaches as a node does, so that it is no descendant of the test process any more.
DETACHER = f"""
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", {SLEEPER!r}],
    start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
print(child.pid, flush=True)
os._exit(0)
"""


@pytest.fixture
def guard() -> LeakGuard:
    """The run's own mark is reused: a second one would hide our children from the outer guard."""
    return LeakGuard(os.environ["LOOKUP_BUFFER_TEST_RUN"])


def _wait_for_exit(pid: int) -> None:
    """A detached process is not our child: only its pidfd tells when it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [], 10.0)
    os.close(descriptor)


def test_a_child_is_found_and_killed(guard: LeakGuard) -> None:
    baseline = guard.baseline()
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    report = guard.leaked_since(baseline, threads=True, timeout_seconds=0.1)
    assert f"process {child.pid}" in report
    assert "time.sleep(60)" in report
    assert child.wait(timeout=10) == -9


def test_a_detached_process_is_found_and_killed(guard: LeakGuard) -> None:
    baseline = guard.baseline()
    out = subprocess.run(
        [sys.executable, "-c", DETACHER],
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=True,
    )
    pid = int(out.stdout)
    report = guard.leaked_since(baseline, threads=True, timeout_seconds=0.1)
    assert f"process {pid}" in report
    _wait_for_exit(pid)


def test_a_child_that_was_not_waited_for_is_found_with_its_name(guard: LeakGuard) -> None:
    """It has neither a command nor an environment any more."""
    baseline = guard.baseline()
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    report = guard.leaked_since(baseline, threads=True, timeout_seconds=0.1)
    assert f"process {child.pid} " in report
    assert "nobody waited for it): [true]" in report
    assert child.wait(timeout=10) == 0


def test_a_thread_is_found_with_its_stack(guard: LeakGuard) -> None:
    baseline = guard.baseline()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(30,), name="leaky")
    thread.start()
    report = guard.leaked_since(baseline, threads=True, timeout_seconds=0.1)
    ignored = guard.leaked_since(baseline, threads=False, timeout_seconds=0.1)
    stop.set()
    thread.join(timeout=10)
    assert "thread 'leaky'" in report
    assert "wait" in report
    assert ignored == ""


def test_it_waits_for_what_is_about_to_end(guard: LeakGuard) -> None:
    baseline = guard.baseline()
    thread = threading.Thread(target=threading.Event().wait, args=(0.2,))
    thread.start()
    assert guard.leaked_since(baseline, threads=True, timeout_seconds=10) == ""


def test_what_was_there_before_is_not_counted(guard: LeakGuard) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPER]) as child:
        baseline = guard.baseline()
        assert guard.leaked_since(baseline, threads=True, timeout_seconds=0.1) == ""
        child.kill()


def test_a_leaking_test_fails_and_names_what_it_left(tmp_path: Path) -> None:
    """One test leaks, the one after it is not harmed."""
    run = run_of(
        tmp_path,
        f"def test_leaks(): subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])\n"
        "def test_is_clean(): pass\n",
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "test_leaks left something behind" in run.stdout
    assert "time.sleep(60)" in run.stdout
    assert "2 passed, 1 error" in run.stdout


@pytest.mark.parametrize("options", [[], ["--numprocesses=2", "--dist=loadfile"]])
def test_a_leaking_fixture_of_the_session_fails_the_run(tmp_path: Path, options: list[str]) -> None:
    """Also where workers run the tests, which have nowhere to print."""
    leaks = (
        "@pytest.fixture(scope='session')\n"
        f"def sleeper(): return subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])\n"
        "def test_sleeper(sleeper): pass\n"
    )
    other = "def test_other(): pass\n"
    run = run_of(tmp_path, leaks, other, options=options)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "The test session left something behind" in run.stdout
    assert "time.sleep(60)" in run.stdout
    assert "2 passed in" in run.stdout
