"""The whole demo with the tiny model: two real engines share through a real Redis."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patience import scaled

ROOT = Path(__file__).parents[2]
# Three engines start at once, on as few as two cores.
DEMO_SECONDS = scaled(500)


def _start(directory: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "examples.demo", "--model", "tiny"]
    command += ["--directory", str(directory), "--json", str(directory / "demo.json")]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.vllm
def test_two_engines_share_what_one_of_them_encoded(tmp_path: Path) -> None:
    with _start(tmp_path) as demo:
        output, _ = demo.communicate(timeout=DEMO_SECONDS)
    assert demo.returncode == 0, output
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["tokens_equal"]
    assert figures["tokens_differ_between_images"]
    warm_up = [request for request in figures["requests"] if request["purpose"] == "warm-up"]
    origins = {(request["engine"], request["origin"]) for request in warm_up}
    assert origins - {("host-a", "own cache"), ("host-b", "own cache")} == {
        ("host-a", "encoded"),
        ("host-b", "loaded"),
    }
    assert figures["encoder_runs_of_warm_up"] == {"host-a": 1, "host-b": 0}
    assert figures["hits_of_warm_up"] == 1
    by_purpose = {request["purpose"]: request for request in figures["requests"]}
    assert by_purpose["first sight"]["origin"] == "encoded"
    assert by_purpose["own repeat"]["origin"] == "own cache"
    assert by_purpose["other engine"]["origin"] == "loaded"
    assert by_purpose["other engine"]["source"] == "host-a over TCP"
    assert by_purpose["after another image"]["origin"] == "loaded"
    assert by_purpose["after another image"]["source"] == "arena of host-a"
    # Each photograph once, also the one that both were asked for at the same moment.
    assert figures["encoder_runs"]["host-a"] + figures["encoder_runs"]["host-b"] == 2
    assert {record["nbytes"] for record in figures["records"]} == {figures["nbytes_per_image"]}
    assert {tuple(record["nodes"]) for record in figures["records"]} == {("host-a", "host-b")}
    photographs = {record["photograph"] for record in figures["records"]}
    assert photographs == {"rocket", "cat", "coffee"}
    assert figures["hits_in_redis"] == figures["hits"] == 3


@pytest.mark.vllm
def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    with _start(tmp_path) as demo:
        assert demo.stdout is not None
        while "vLLM engines" not in demo.stdout.readline():
            assert demo.poll() is None
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=scaled(60))
    # That no process is left is checked for every test (tests/conftest.py).
    assert demo.returncode == 130, output
    assert "Interrupted" in output


def test_without_vllm_it_says_so(tmp_path: Path) -> None:
    without = (
        "import runpy, sys; sys.modules['vllm'] = None; "
        "runpy.run_module('examples.demo', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", without, "--directory", str(tmp_path / "build")],
        cwd=ROOT, capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "vLLM is not installed" in done.stdout
    assert "make demo" in done.stdout
    assert not (tmp_path / "build").exists()
