"""The limits of `scripts/run-tests`: larger on a slow machine, and never without a bound."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nodes import ROOT
from patience import ENVIRONMENT, SLOWNESS_MAX, scaled

IDLE_MINUTES = [5, 30, 7, 40]


def minutes_of_each_stage(tmp_path: Path, **settings: str) -> list[int]:
    """In a checkout whose checks and tests do nothing."""
    for folder, name in (("scripts", "run-tests"), ("tests/support", "patience.py")):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(ROOT / folder / name, tmp_path / folder / name)
    for nothing in ("scripts/run-checks", "bin/python"):
        path = tmp_path / nothing
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            '#!/bin/sh\n[ "$1" != tests/support/patience.py ] || echo "$TESTS_SLOWNESS"\n'
        )
        path.chmod(0o700)
    inherited = {name: value for name, value in os.environ.items() if name != "TEST_MINUTES"}
    done = subprocess.run(
        [tmp_path / "scripts/run-tests", "bin"], env={**inherited, **settings},
        capture_output=True, text=True, timeout=scaled(30), check=True,
    )  # fmt: skip
    return [int(minutes) for minutes in re.findall(r"\(at most (\d+) min\)", done.stdout)]


def test_an_idle_machine_has_the_usual_limits(tmp_path: Path) -> None:
    assert minutes_of_each_stage(tmp_path, TESTS_SLOWNESS="1.0") == IDLE_MINUTES


@pytest.mark.parametrize("slowness", ["1.5", "2.7", "4.0"])
def test_a_slow_machine_has_more_within_the_limit_of_the_whole(
    tmp_path: Path, slowness: str
) -> None:
    limits = minutes_of_each_stage(tmp_path, TESTS_SLOWNESS=slowness)
    assert all(limit >= idle for limit, idle in zip(limits, IDLE_MINUTES, strict=True))
    assert sum(limits) > sum(IDLE_MINUTES)
    # Nothing took any time here, so each stage could have all that the later ones leave.
    for number, limit in enumerate(limits):
        assert limit + sum(IDLE_MINUTES[number + 1 :]) <= 90


def test_another_limit_of_the_whole(tmp_path: Path) -> None:
    limits = minutes_of_each_stage(tmp_path, TESTS_SLOWNESS="3", TEST_MINUTES="400")
    assert limits == [3 * minutes for minutes in IDLE_MINUTES]


def test_deadlines_of_tests_are_longer_on_a_slow_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "1.0")
    idle = scaled(5.0)
    monkeypatch.setenv(ENVIRONMENT, "3.0")
    assert idle > 5.0
    assert scaled(5.0) == pytest.approx(3 * idle)


def test_the_factor_is_measured_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import patience

    monkeypatch.delenv(ENVIRONMENT)
    factor = patience.slowness()
    assert 1.0 <= factor <= SLOWNESS_MAX
    assert os.environ[ENVIRONMENT] == f"{factor:.2f}", "for all processes of the run"
