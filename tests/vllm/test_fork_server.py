"""Programs that the fork server starts are what they would be if they were executed."""

import json
import os
import signal
import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any

import pytest

import fork_server
from leaks import MARK, LeakGuard
from nodes import wait_until
from servers import alive

pytestmark = pytest.mark.vllm

PROGRAM = """
import json, multiprocessing, os, sys

def describe():
    return {"preloaded": "vllm.v1.engine.core" in sys.modules, "session": os.getsid(0),
            "pid": os.getpid(), "setting": os.environ.get("SETTING"),
            "offline": getattr(sys.modules.get("huggingface_hub.constants"),
                               "HF_HUB_OFFLINE", None),
            "path": os.environ.get("PATH") is not None, "files": len(os.listdir("/proc/self/fd")),
            "argv": sys.argv[1:], "home": sys.path[0]}

def tell(there):
    there.send(describe())

if __name__ == "__main__":
    kept = [open(os.devnull) for _ in range(50)]
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=tell, args=(there,))
    process.start()
    print(json.dumps({"own": describe(), "spawned": here.recv(), "main": __name__}), flush=True)
    process.join()
    if len(sys.argv) > 2:
        import socket, time
        socket.socket(fileno=int(sys.argv[2])).sendall(b"hello")
        time.sleep(600)
    sys.exit(3)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "told_program.py").write_text(PROGRAM)
    return tmp_path


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "SETTING": "ours", **more}


def described(log: Path) -> dict[str, Any]:
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("{")]
    described: dict[str, Any] = json.loads(line)
    return described


@pytest.mark.parametrize("forked", [True, False])
def test_a_program_and_what_it_spawns(program: Path, forked: bool) -> None:
    log = program / "log"
    process = fork_server.launch(
        "told_program", ["one"], log=log, environment=environment(program), forked=forked
    )
    assert process.wait(120.0) == 3
    found = described(log)
    own, spawned = found["own"], found["spawned"]
    assert found["main"] == "__main__"
    for each in (own, spawned):
        assert each["preloaded"] == forked
        assert each["session"] == process.pid
        assert (each["setting"], each["path"]) == ("ours", True)
    assert own["argv"] == ["one"]
    assert own["pid"] != spawned["pid"]
    assert spawned["files"] < 20 < own["files"]


def test_a_file_is_kept_and_the_session_is_killed(program: Path) -> None:
    guard = LeakGuard(os.environ[MARK])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = fork_server.launch(
            "told_program", ["two", "{0}"], log=program / "log",
            environment=environment(program), keep=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        ours.settimeout(120.0)
        assert ours.recv(10) == b"hello"
        found = {each.pid for each in guard.processes()}
        assert process.pid in found, "left behind it would be a leak"
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(20.0) == -signal.SIGKILL
        assert ours.recv(10) == b""
    wait_until(lambda: not alive(process.pid), 5.0)


def test_a_variable_that_is_read_early_has_a_fork_server_of_its_own(program: Path) -> None:
    log = program / "log"
    settings = environment(program, HF_HUB_OFFLINE="0")
    assert fork_server.launch("told_program", [], log=log, environment=settings).wait(120.0) == 3
    own = described(log)["own"]
    assert (own["preloaded"], own["offline"]) == (True, False)


def test_variables_are_not_read_while_another_thread_starts_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server gets its early variables from ours, which change for that time."""
    before, readers = dict(os.environ), ThreadPoolExecutor(1)
    reads: list[Future[dict[str, str]]] = []

    def start(_: ForkServer) -> None:
        assert os.environ["HF_HUB_OFFLINE"] == "?"
        reads.append(readers.submit(fork_server.own_environment))
        assert not wait(reads, 0.1).done

    monkeypatch.setattr(fork_server, "_running", {})
    monkeypatch.setattr(ForkServer, "ensure_running", start)
    with readers:
        fork_server._Server("nothing", (("HF_HUB_OFFLINE", "?"),)).running()
    assert [read.result() for read in reads] == [before]
