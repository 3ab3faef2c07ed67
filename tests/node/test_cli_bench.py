"""`bench`: it measures what it prints, within its time; its errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import PROGRAM, assert_refused, environment, run, run_at_terminal, run_json
from lookup_buffer.cli.speeds import Speed
from patience import scaled
from store import EmbeddedServer


def test_every_pipe(valkey_server: EmbeddedServer) -> None:
    arguments = ("--size", "64KiB", "--size", "1MiB", "--seconds", "0.2")
    speeds = run_json("bench", *arguments, "--redis", valkey_server.url)["speeds"]
    assert [(one["pipe"], one["nbytes"]) for one in speeds] == [
        (pipe, nbytes) for pipe in ("inproc", "shm", "tcp", "redis") for nbytes in (65536, 1 << 20)
    ]
    for one in speeds:
        assert one["rounds"] >= 3
        assert one["memcpy_seconds"] > 0
        assert one["seconds"] > 0
        # A median of ratios, and a ratio of medians, which may differ much on a busy machine.
        alike = one["over_memcpy"] * one["seconds"] / one["memcpy_seconds"]
        assert 0.02 < alike < 50
        assert (one["bare_seconds"] is None) == (one["pipe"] == "inproc")
        assert (one["expected_seconds"] is None) == (one["pipe"] == "redis")


def test_it_fits_a_terminal_and_leaves_nothing(tmp_path: Path) -> None:
    lines = run_at_terminal("bench", "--size", "2MiB", "--seconds", "0.3", TMPDIR=str(tmp_path))
    assert [line.split()[:1] for line in lines[:4]] == [["PIPE"], ["inproc"], ["shm"], ["tcp"]]
    assert [line for line in lines if len(line) > 80] == []
    assert list(tmp_path.iterdir()) == []


def test_slow_and_as_expected() -> None:
    def speed(pipe: str, seconds: float) -> Speed:
        return Speed(pipe, 1 << 20, seconds, 0.001, 0.002, 1.0, 1.0, 3)

    assert speed("shm", 0.003).verdict == "ok"
    assert speed("shm", 0.005).verdict == "slow"
    assert speed("tcp", 0.003).verdict == "ok"
    assert speed("tcp", 0.004).verdict == "slow"
    assert speed("redis", 9.0).verdict == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--size", "big"), 2, ("--size", "'big'")),
        (("--size", "2GiB"), 2, ("1GiB",)),
        (("--size", "1"), 2, ("1KiB",)),
        (("--redis", "redis://:geheim@127.0.0.1:1"), 2, ("visible",)),
        (("--size", "4KiB", "--seconds", "0.1", "--redis", "redis://127.0.0.1:1"), 3, ("refused",)),
        (("--size", "4KiB", "--seconds", "0.1", "--redis", "nonsense"), 2, ("nonsense",)),
    ],
)
def test_refusals(arguments: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    done = run("bench", *arguments)
    assert_refused(done, code, *words)
    assert "geheim" not in done.stderr


def test_without_torch(tmp_path: Path) -> None:
    """As where only the node and the commands are installed."""
    hide = (
        "import sys; sys.modules['torch'] = None; from lookup_buffer.cli.commands import app; app()"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide, "bench"],
        capture_output=True, text=True, timeout=scaled(60), check=False, env=environment({}),
    )  # fmt: skip
    assert_refused(done, 2, "torch is not installed", "pip install torch")
    assert Path(PROGRAM).exists()
