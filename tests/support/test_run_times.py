"""The times of a run, by test, file and tier."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import run_times

TESTS = """
import time
def test_computes():
    until = time.thread_time() + 1.2
    while time.thread_time() < until: pass
def test_waits(): time.sleep(1.2)
"""


def ran(folder: Path, times: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "test_two.py").write_text(TESTS)
    # Another rootdir: nothing of this project's configuration counts.
    command = [sys.executable, "-m", "pytest", "-p", "run_times", "--rootdir", str(folder.parent)]
    return subprocess.run(
        [*command, "-c", os.devnull, "-p", "no:cacheprovider", f"{folder.name}/test_two.py"],
        cwd=folder.parent, capture_output=True, text=True, check=False,
        env={**os.environ, "TEST_TIMES": str(times),
             "PYTHONPATH": str(Path(run_times.__file__).parent)},
    )  # fmt: skip


@pytest.mark.processes
def test_two_runs_of_one_report(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    unit, node = ran(tmp_path / "unit", times), ran(tmp_path / "node", times)
    assert (unit.returncode, node.returncode) == (0, 0), unit.stdout + node.stdout
    assert "2 unit" in unit.stdout
    document = json.loads(times.read_text())
    assert {tier: tally["tests"] for tier, tally in document["tiers"].items()} == {
        "unit": 2, "node": 2,
    }  # fmt: skip
    assert set(document["files"]) == {"unit/test_two.py", "node/test_two.py"}
    waited = document["tests"]["node/test_two.py::test_waits"]
    assert waited["call"] >= 1.2
    assert waited["cpu_seconds"] < 0.5
    assert document["tests"]["unit/test_two.py::test_computes"]["cpu_seconds"] >= 1.2
