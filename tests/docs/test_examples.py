"""The examples run as they are."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nodes import wait_until
from patience import scaled

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_pipe_between_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "pipe.py"), f"shm://{tmp_path}/pipe"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert run.returncode == 0, run.stderr
    expected = [f"layer-{n}: (1024, 1024) of {n}" for n in (3, 0, 2, 1)]
    assert run.stdout.splitlines() == expected


def test_a_hand_off_between_two_processes() -> None:
    with tempfile.TemporaryDirectory(prefix="lbx-") as directory:  # a socket's path is bounded
        command = [sys.executable, str(EXAMPLES / "handoff.py"), directory]
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=scaled(100), check=False
        )
        assert run.returncode == 0, run.stderr
        expected = [f"layer-{n}: (1024, 1024) of {n}" for n in (2, 0, 1)]
        assert run.stdout.splitlines() == [*expected, "still present: [False, False, False]"]
        wait_until(lambda: not (Path(directory) / "node.sock").exists(), 20.0)  # idle, so it ends
