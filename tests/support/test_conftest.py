"""What tests/conftest.py does for all tests."""

from pathlib import Path

import pytest

from command_line import run_of


@pytest.mark.processes
def test_a_full_collection_skips_the_objects_of_the_modules(tmp_path: Path) -> None:
    """Each full collection over them would stop all threads for half a second.

    This runs in a process of its own: here, a test before this one may have imported vLLM.
    """
    run = run_of(
        tmp_path,
        "import gc\n"
        "def test_frozen():\n"
        "    walked_over, passed_over = len(gc.get_objects()), gc.get_freeze_count()\n"
        "    assert walked_over < passed_over\n",
    )
    assert run.returncode == pytest.ExitCode.OK, run.stdout
