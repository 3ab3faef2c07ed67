"""The examples run as they are."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize("address", ["shm://{}/pipe", "gloo://127.0.0.1:0"])
def test_a_pipe_between_two_processes(address: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "pipe.py"), address.format(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    expected = [f"layer-{n}: (1024, 1024) of {n}" for n in (3, 0, 2, 1)]
    assert run.stdout.splitlines() == expected
