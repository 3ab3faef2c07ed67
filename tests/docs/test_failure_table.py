"""The table of failures: each row names the tests that cause it, and these exist."""

import re
from pathlib import Path

import pytest

from groups import FOLDERS, STARTED_BY
from nodes import ROOT

TESTS = ROOT / "tests"
IN_ONE_PROCESS = {
    "vLLM gives away blocks of its own prefix cache while a request that counts on them waits"
}
"""What no process can be made to do: it happens inside a pass of vLLM's scheduler."""


def _section(path: str, heading: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return text.partition(f"\n{heading}\n")[2].partition("\n#")[0]


def _rows() -> dict[str, list[tuple[str, str]]]:
    """The names in the last column, as (file, function), by what fails."""
    lines = _section("docs/operations.md", "## What each failure costs").splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return {fault.strip(): re.findall(r"`(\w+)::(\w+)`", tests) for fault, _, _, tests in cells[2:]}


ROWS = _rows()


def _file(name: str) -> Path:
    (path,) = TESTS.glob(f"*/{name}.py")
    return path


def _starts_processes(path: Path) -> bool:
    """As `groups` decides it, as far as the source tells."""
    source = path.read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", source))
    return (
        path.parent.name in FOLDERS
        or path.stem.endswith("_nodes")
        or "mark.processes" in source
        or bool(words & STARTED_BY)
    )


def test_there_is_a_table() -> None:
    assert len(ROWS) > 50
    assert ROWS.keys() >= IN_ONE_PROCESS


@pytest.mark.parametrize("fault", ROWS)
def test_each_row_names_tests_that_exist(fault: str) -> None:
    assert ROWS[fault]
    for file, name in ROWS[fault]:
        source = _file(file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(async )?def {name}\(", source, re.MULTILINE), (file, name)


@pytest.mark.parametrize("fault", [fault for fault in ROWS if fault not in IN_ONE_PROCESS])
def test_the_first_one_starts_processes(fault: str) -> None:
    (file, _), *_ = ROWS[fault]
    assert _starts_processes(_file(file)), file


def test_no_test_stands_for_two_failures() -> None:
    names = [name for named in ROWS.values() for name in named]
    assert len(set(names)) == len(names)


def test_the_tests_in_virtual_time_exist() -> None:
    files = re.findall(r"`(test_\w+)`", _section("tests/README.md", "## Virtual time"))
    assert files
    for file in files:
        source = _file(file).read_text(encoding="utf-8")
        assert re.search(r"[Cc]lock|virtual", source), file
