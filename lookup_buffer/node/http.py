"""The node's HTTP: it binds `http_listen`, and keeps the dashboard's process running on it.

What that process computes takes milliseconds of Python for each request, which would delay the
node's loop. A process that ends is started again; connections wait meanwhile, since the listening
socket stays open here. Used on the loop's thread.
"""

import asyncio
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
from typing import Any, Final

from lookup_buffer.config import TLS_FILES, BufferConfig, parse_http
from lookup_buffer.environment import environment_without_token
from lookup_buffer.errors import ConfigError
from lookup_buffer.runtime import to_json

BACKLOG = 32
BIND_SECONDS: Final = 2.0
"""How long the address may be in use: the process of a node that was killed ends a little later."""
AGAIN_SECONDS: Final = 2.0
AGAIN_SECONDS_MAX: Final = 60.0
"""Pause before a process that ended is started again, doubled each time it ends early."""
LOOK_SECONDS: Final = 0.25
"""How often it is checked whether the process has ended."""
STEADY_SECONDS: Final = 30.0
"""A process that ran so long did not end early."""
_PACKAGES: Final = Path(__file__).resolve().parent.parent.parent
_PROGRAM: Final = (
    f"import sys; sys.path.insert(0, {str(_PACKAGES)!r}); "
    "from lookup_buffer.dashboard.main import main; main()"
)
_OF_NODES: Final = frozenset(("token", "token_file", "listen", "advertise", *TLS_FILES))
"""Settings that only connections between nodes need: the process is not told them."""
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

    async def run(self, node: str, socket_path: Path, config: BufferConfig) -> None:
        """Keep the process running, which asks the node at `socket_path`, until cancelled."""
        start = {
            "node": node,
            "node_pid": os.getpid(),
            "socket_path": str(socket_path),
            "listener": self._listener.fileno(),
            "settings": _told(config),
        }
        pause_seconds = AGAIN_SECONDS
        try:
            while True:
                started_at = time.monotonic()
                try:
                    code = await self._run_once(json.dumps(start).encode() + b"\n")
                    _log.error("the dashboard's process ended (code %d); it is started again", code)
                except OSError as error:  # for example at the limit of processes
                    _log.error("the dashboard's process cannot be started; retried: %s", error)
                if time.monotonic() - started_at > STEADY_SECONDS:
                    pause_seconds = AGAIN_SECONDS
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, AGAIN_SECONDS_MAX)
        finally:
            self._listener.close()

    async def _run_once(self, start: bytes) -> int:
        """Start the process and return its exit code; if cancelled, kill it: it only reads, so that
        is safe at any moment."""
        process = subprocess.Popen(
            (sys.executable, "-P", "-c", _PROGRAM),
            stdin=subprocess.PIPE,
            env=environment_without_token(),
            pass_fds=[self._listener.fileno()],
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has ended already
                process.stdin.write(start)
                process.stdin.flush()  # and stays open: its end is that of the node
            while (code := process.poll()) is None:
                await asyncio.sleep(LOOK_SECONDS)
            return code
        finally:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):
                process.stdin.close()


def _told(config: BufferConfig) -> dict[str, Any]:
    """The settings of the dashboard's process, its secrets included."""
    settings = json.loads(to_json(config))
    return {name: value for name, value in settings.items() if name not in _OF_NODES}


def _bound(address: tuple[str, int], family: socket.AddressFamily) -> socket.socket:
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
