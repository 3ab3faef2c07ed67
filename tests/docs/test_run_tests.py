"""The stages of `scripts/run_tests.py`, and their limits: larger on a slow machine, never without a
bound."""

import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from groups import FOLDERS
from nodes import ROOT
from patience import ENVIRONMENT, SLOWNESS_MAX, scaled, slowness
from scripts import run_tests
from scripts.run_tests import (
    IMPORT_VLLM,
    ONLY_PROCESSES,
    Limits,
    Stage,
    main,
    marked_alone,
    part_of_commit,
    parts_by_name,
    run,
    stages_of,
)

WHOLE_SECONDS = 85 * 60.0


def limits_of(slowness: float, whole_seconds: float) -> list[float]:
    """Of the stages of `make test`, none of which takes any time."""
    limits = Limits(usual(), slowness, whole_seconds)
    return [limits.next(0.0) for _ in usual()]


def usual() -> list[float]:
    return [stage.seconds for stage in stages_of("test", "0")]


def test_the_folders_that_the_first_stage_ignores_have_only_tests_with_processes() -> None:
    assert {Path(path).name for path in ONLY_PROCESSES} == FOLDERS


def test_an_idle_machine_has_the_usual_limits() -> None:
    assert limits_of(1.0, WHOLE_SECONDS) == usual()


def test_with_time_enough_each_stage_has_its_factor() -> None:
    assert limits_of(3.0, 400 * 60.0) == [3.0 * seconds for seconds in usual()]


def test_another_limit_of_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits: list[float] = []

    def record(_: Stage, seconds: float) -> str:
        limits.append(seconds)
        return ""

    monkeypatch.setattr(run_tests, "run", record)
    monkeypatch.setattr(run_tests, "TIMES", tmp_path / "times.json")
    for name, value in {"TEST_MINUTES": "400", ENVIRONMENT: "3.0", "TEST_TIMES": ""}.items():
        monkeypatch.setenv(name, value)  # restored, whatever `main` sets
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert main(["test"], commit="0") == 0
    assert limits == pytest.approx([3.0 * seconds for seconds in usual()], rel=0.01)


@pytest.mark.parametrize("slowness", [1.5, 2.7, SLOWNESS_MAX])
def test_a_slow_machine_has_more_within_the_limit_of_the_whole(slowness: float) -> None:
    seconds = usual()
    limits = limits_of(slowness, WHOLE_SECONDS)
    assert all(limit >= idle for limit, idle in zip(limits, seconds, strict=True))
    assert sum(limits) > sum(seconds)
    for number, limit in enumerate(limits):
        assert limit + sum(seconds[number + 1 :]) <= WHOLE_SECONDS


def test_a_stage_that_took_long_leaves_the_later_ones_their_usual_time() -> None:
    limits = Limits([60.0, 60.0, 60.0], 4.0, 240.0)
    assert limits.next(0.0) == 120.0
    assert limits.next(120.0) == 60.0
    assert limits.next(230.0) == 60.0


def test_each_part_has_its_turn() -> None:
    parts = list(parts_by_name())
    chosen = [part_of_commit(f"{number:040x}", parts) for number in range(len(parts))]
    assert sorted(chosen) == sorted(parts)


def test_every_test_belongs_to_a_stage_of_all() -> None:
    """A marker's value that no part has would keep a test from ever being run."""
    sources = [path.read_text() for path in (ROOT / "tests").glob("*/test_*.py")]
    marks = set(itertools.chain(*(re.findall(r'mark\.part\(name="(\w+)"\)', s) for s in sources)))
    commands = [" ".join(stage.command) for stage in stages_of("all", "0")]
    assert marks
    for mark in marks:
        assert any(f"part(name='{mark}')" in command for command in commands), mark


def test_what_imports_vllm_is_in_the_stage_of_its_own() -> None:
    """Elsewhere each of eight workers would import it."""
    importing = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").glob("*/test_*.py")
        if re.search(
            r"^(from|import) (vllm|host_checks|connector_standins)\b", path.read_text(), re.M
        )
    }
    assert importing
    for path in importing:
        assert any(path.is_relative_to(apart) for apart in IMPORT_VLLM), path
    assert all((ROOT / apart).exists() for apart in IMPORT_VLLM)


def test_every_test_that_runs_alone_is_in_a_file_of_that_stage() -> None:
    """No suite that others inherit has one, nor is the mark spelt another way."""
    of_stage = marked_alone()
    assert of_stage
    for path in (ROOT / "tests").glob("*/*.py"):
        if re.search(r"\bmark\.alone\b", path.read_text()):
            assert str(path.relative_to(ROOT)) in of_stage


def test_all_begins_with_what_test_runs() -> None:
    names = {
        command: [stage.name for stage in stages_of(command, "0")] for command in ("test", "all")
    }
    assert names["all"][: len(names["test"]) - 1] == names["test"][:-1]
    assert names["test"][-1] in names["all"]


@pytest.mark.parametrize(
    ("stage", "wider"), [("this process", "without vLLM"), ("this process, vLLM", "vLLM")]
)
def test_what_quick_runs_is_in_test_too(stage: str, wider: str) -> None:
    """The tests that need only this process, in a stage with others."""
    quick, test = (
        {stage.name: list(stage.command) for stage in stages_of(command, "0")}
        for command in ("quick", "test")
    )
    assert quick["static checks"] == test["static checks"]
    assert f"not processes and {_selected(test[wider])}" == _selected(quick[stage])
    of_quick, of_test = _paths(quick[stage]), _paths(test[wider])
    assert of_test <= of_quick <= of_test | {f"--ignore={path}" for path in ONLY_PROCESSES}


def _selected(command: list[str]) -> str:
    return command[command.index("-m", command.index("pytest")) + 1]


def _paths(command: list[str]) -> set[str]:
    """What is chosen, and what is left out."""
    return {word for word in command if word.startswith(("tests/", "--ignore="))}


@pytest.mark.parametrize("arguments", [[], ["everything"], ["part"], ["part", "nothing"]])
def test_a_command_that_does_not_exist_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, commit="0") == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.processes
def test_a_failed_stage_and_one_over_its_limit_are_reported() -> None:
    assert run(Stage("good", 5.0, [sys.executable, "-c", ""]), 60.0) == ""
    assert run(Stage("bad", 5.0, [sys.executable, "-c", "raise SystemExit(3)"]), 60.0) == "exit 3"
    assert run(Stage("none", 5.0, [sys.executable, "-c", "raise SystemExit(5)"]), 60.0) == (
        "no test was collected"
    )
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert run(Stage("slow", 5.0, sleeping), 0.5) == "over its time limit"


@pytest.mark.processes
def test_ctrl_c_ends_the_stage_that_runs(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    stage = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    program = textwrap.dedent(f"""
        import sys
        from scripts.run_tests import Stage, run
        run(Stage("slow", 5.0, [sys.executable, "-c", {stage!r}]), 600.0)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + scaled(20.0)
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2 * slowness())  # until the runner has its own end of what has begun
        process.send_signal(signal.SIGINT)
        assert process.wait(scaled(20.0)) != 0


def test_deadlines_of_tests_are_longer_on_a_slow_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "1.0")
    idle = scaled(5.0)
    monkeypatch.setenv(ENVIRONMENT, "3.0")
    assert idle > 5.0
    assert scaled(5.0) == pytest.approx(3 * idle)


@pytest.mark.processes
def test_the_factor_is_measured_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import patience

    monkeypatch.delenv(ENVIRONMENT)
    factor = patience.slowness()
    assert 1.0 <= factor <= SLOWNESS_MAX
    assert os.environ[ENVIRONMENT] == f"{factor:.2f}", "for all processes of the run"
