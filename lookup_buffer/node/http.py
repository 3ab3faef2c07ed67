"""The node's HTTP: it binds `http_listen`, and keeps the dashboard's process running on it.

What that process computes takes milliseconds of Python for each request, which would delay the
node's loop. A process that ends is started again; connections wait meanwhile, since the listening
socket stays open here. Used on the loop's thread.
"""

import errno
import json
import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from lookup_buffer.config import BufferConfig, parse_http
from lookup_buffer.errors import ConfigError
from lookup_buffer.runtime import to_json

BACKLOG = 32
BIND_SECONDS: Final = 2.0
"""How long the address may be in use: the process of a node that was killed ends a little later."""
AGAIN_SECONDS: Final = 2.0
AGAIN_SECONDS_MAX: Final = 60.0
"""Pause before a process that ended is started again, doubled each time it ends early."""
STEADY_SECONDS: Final = 30.0
"""A process that ran so long did not end early."""
_PACKAGES: Final = Path(__file__).resolve().parent.parent.parent
_PROGRAM: Final = (
    f"import sys; sys.path.insert(0, {str(_PACKAGES)!r}); "
    "from lookup_buffer.dashboard.main import main; main()"
)
_log = logging.getLogger(__name__)


class HttpProcess:
    """Owned by the node."""

    def __init__(self, address: str) -> None:
        """Bind.

        Raises:
            ConfigError: the address is in use, or not of this host.
        """
        host, port = parse_http(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = _bound((host, port), family)
        except OSError as error:
            raise ConfigError(
                f"setting 'http_listen' is {address!r}: {error.strerror}; "
                "allowed: a free address of this host"
            ) from error
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"http://{shown}:{self._listener.getsockname()[1]}"
        """The URL, with the actual port."""
        self._input = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = self._start_at = 0.0
        self._pause_seconds = AGAIN_SECONDS
        self._closed = False

    def start(self, node: str, socket_path: Path, config: BufferConfig) -> None:
        """Start the process, which asks the node at `socket_path`."""
        start = {
            "node": node,
            "node_pid": os.getpid(),
            "socket_path": str(socket_path),
            "listener": self._listener.fileno(),
            "settings": json.loads(to_json(config)),
        }
        self._input = json.dumps(start).encode() + b"\n"
        self._launch()

    def tick(self) -> None:
        """To be called a few times a second: starts the process again after it has ended."""
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            _log.error("the dashboard's process ended (code %d); it is started again", code)
            self._end()
            self._pause()
        elif self._process is None and not self._closed and time.monotonic() >= self._start_at:
            self._launch()

    def close(self) -> None:
        """Kill the process: it only reads, so that is safe at any moment. Idempotent."""
        self._closed = True
        self._end()
        self._listener.close()

    def _launch(self) -> None:
        """Without waiting for its program to load."""
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-c", _PROGRAM),
                stdin=subprocess.PIPE,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,
            )
        except OSError as error:  # for example at the limit of processes
            _log.error("the dashboard's process cannot be started; retried: %s", error)
            self._pause()
            return
        self._started_at = time.monotonic()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.write(self._input)
            self._process.stdin.flush()  # and stays open: its end is that of the node

    def _pause(self) -> None:
        now = time.monotonic()
        if now - self._started_at > STEADY_SECONDS:
            self._pause_seconds = AGAIN_SECONDS
        self._start_at = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, AGAIN_SECONDS_MAX)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()


def _bound(address: tuple[str, int], family: socket.AddressFamily) -> socket.socket:
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
