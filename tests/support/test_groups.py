"""A test that starts a process without its marker fails, and so does a unit test that computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import groups

pytestmark = pytest.mark.processes

TESTS = """
import multiprocessing, subprocess, sys, time
import pytest

def starts(): subprocess.run([sys.executable, "-c", ""], check=True)
def test_starts(): starts()
def test_forks(): multiprocessing.get_context("fork").Process(target=print).start()
@pytest.mark.processes
def test_may_start(): starts()
@pytest.fixture
def start_node(): starts()
def test_uses_a_node(start_node): pass
def test_computes():
    until = time.thread_time() + 1.2
    while time.thread_time() < until: pass
def test_waits(): time.sleep(1.2)
"""
ALLOWED = {"test_may_start", "test_uses_a_node", "test_waits"}


def outcomes(folder: Path, profile: str, *options: str) -> dict[str, str]:
    folder.mkdir()
    (folder / "test_inner.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "groups", "--rootdir", str(folder)]
    settings = ["-c", os.devnull, "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, *settings, "test_inner.py"],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "HYPOTHESIS_PROFILE": profile, "TESTS_SLOWNESS": "1",
             "PYTHONPATH": str(Path(groups.__file__).parent)},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("test_inner.py::")]
    assert lines, done.stdout + done.stderr
    return {line.split()[0].partition("::")[2]: line.split()[1] for line in lines}


def test_only_a_marked_test_starts_processes_and_a_unit_test_is_short(tmp_path: Path) -> None:
    found = outcomes(tmp_path / "unit", "quick")
    assert {name for name, outcome in found.items() if outcome == "PASSED"} == ALLOWED


def test_with_many_examples_a_unit_test_may_be_long(tmp_path: Path) -> None:
    assert outcomes(tmp_path / "unit", "long")["test_computes"] == "PASSED"


def test_the_marker_follows_from_folder_and_fixtures(tmp_path: Path) -> None:
    assert outcomes(tmp_path / "node", "quick")["test_starts"] == "PASSED"
    selected = outcomes(tmp_path / "unit", "quick", "-m", "processes")
    assert set(selected) == {"test_may_start", "test_uses_a_node"}
