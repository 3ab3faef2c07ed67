"""One Redis or Valkey server on TCP, for tests of clusters, Sentinel and TLS.

The kernel kills it with the thread that started it, so tests start it from their main thread.
"""

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nodes import wait_until
from resp import RespConnection, RespError
from store import run_with_owner

START_SECONDS = 10.0
QUIET = ("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "notice")


class ServerProcess:
    """Answers when the constructor returns, unless `wait` is False."""

    def __init__(
        self,
        program: str,
        directory: Path,
        port: int,
        options: Sequence[str],
        *,
        tls: ssl.SSLContext | None = None,
        wait: bool = True,
    ) -> None:
        self.port = port
        self.directory = directory
        self._tls = tls
        directory.mkdir(parents=True, exist_ok=True)
        self._arguments = [
            sys.executable, "-I", "-S", os.path.abspath(run_with_owner.__file__),
            str(os.getpid()), program, *options,
        ]  # fmt: skip
        self._process = self._spawn()
        if wait:
            self.wait_until_it_answers()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> None:
        """Start it again after `kill`, at the same port and without data."""
        self._process = self._spawn()
        self.wait_until_it_answers()

    def kill(self) -> None:
        """As a crash ends it; also works while it is stopped. Idempotent."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Freeze it: it still accepts connections, and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def connect(self) -> RespConnection:
        return RespConnection(self.port, tls=self._tls)

    def command(self, *parts: str | bytes | int) -> Any:
        """The reply to one command on a connection of its own. Raises RespError."""
        with self.connect() as connection:
            return connection(*parts)

    def wait_until_it_answers(self) -> None:
        def answers() -> bool:
            assert self.running, f"the server ended: {self.last_words()}"
            try:
                self.command("PING")
            except RespError:
                pass  # it wants a password first
            except OSError:
                return False
            return True

        wait_until(answers, START_SECONDS, f"the server on port {self.port} answers")

    def last_words(self) -> str:
        return (self.directory / "server.log").read_text("utf-8", "replace")[-1000:]

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with (self.directory / "server.log").open("ab") as output:
            return subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
