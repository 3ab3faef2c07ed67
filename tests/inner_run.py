"""A run of tests inside a test: what tests/conftest.py does is seen in what pytest prints."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from patience import scaled

Run = subprocess.CompletedProcess[str]


def run_of(directory: Path, *tests: str, options: Sequence[str] = ()) -> Run:
    """The fixtures themselves, in a run with a mark of its own; each of `tests` is a file."""
    here = Path(__file__).parent
    conftest = (here / "conftest.py").read_text()
    conftest = conftest.replace("timeout_seconds=scaled(10.0)", "timeout_seconds=0.2")
    (directory / "conftest.py").write_text(conftest)
    for name in ("standstills.py", "patience.py"):
        shutil.copy(here / name, directory)
    leaks = (here / "leaks.py").read_text()
    (directory / "leaks.py").write_text(leaks.replace("LOOKUP_BUFFER_TEST_RUN", "INNER_TEST_RUN"))
    for number, source in enumerate(tests):
        path = directory / f"test_inner_{number}.py"
        path.write_text(f"import pytest, subprocess, sys\n{source}")
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = vllm\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(directory)],
        capture_output=True, text=True, timeout=scaled(60), cwd=directory, check=False,
    )  # fmt: skip
