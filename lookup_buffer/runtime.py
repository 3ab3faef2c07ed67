"""Finds this host's node, and starts one if none runs.

Each runtime directory has one node, guaranteed by `flock` and not by a file's existence. A node
started here is independent of its starter: it is forked twice, has its own process session and all
the machine's cores, and ends after `idle_exit_seconds` without clients. Runs on the threads of its
callers and starts none.
"""

import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lookup_buffer.config import SECRETS, BufferConfig
from lookup_buffer.errors import NodeUnavailable

LOG_FORMAT = "%(asctime)s lookup-buffer %(levelname)s: %(message)s"
"""Of the node's log, into which the dashboard's process writes, too."""
LOG_TAIL_BYTES = 2000
POLL_SECONDS = 0.01
PROBE_SECONDS = 1.0
_PACKAGES = Path(__file__).resolve().parent.parent


def node_socket(config: BufferConfig, *, timeout: float) -> Path:
    """The unix socket of the node to use; starts the node if the configuration names none.

    Raises:
        NodeUnavailable: no node runs and none could be started within `timeout` seconds.
    """
    path = config.socket_path()
    if config.node_socket is not None or timeout <= 0 or _accepts_connections(path):
        return path
    deadline = time.monotonic() + timeout
    directory = config.runtime_directory()
    with lock(directory / "start.lock", timeout=timeout):
        if not _accepts_connections(path):
            _start(config, directory, path, deadline)
    return path


def start_log(level: str) -> None:
    """Log to stderr from this level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter(LOG_FORMAT))
    logging.basicConfig(handlers=[handler], level=level.upper())


class _LogFormatter(logging.Formatter):
    """Escapes what is not printable: what others have chosen (names, texts of servers) begins no
    line of the log, and controls no terminal. Only the lines of a traceback follow, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {escaped(line)}" for line in lines)


def escaped(text: str) -> str:
    """`text` with what is not printable as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


@contextmanager
def lock(path: Path, *, timeout: float) -> Iterator[None]:
    """Hold an exclusive `flock` on `path`. The file cannot be opened for reading: from a container
    that has the folder read-only, who did so could take the lock and keep it.

    Raises:
        NodeUnavailable: another process holds it for longer than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o200)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise NodeUnavailable(f"another process holds {path}") from error
                time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def to_json(config: BufferConfig) -> str:
    """The configuration with its secrets. Send it through a pipe, never on a command line."""
    settings = config.model_dump(mode="json", exclude_none=True)
    for name in SECRETS:
        if name in settings:
            settings[name] = getattr(config, name).get_secret_value()
    return json.dumps(settings)


def _start(config: BufferConfig, directory: Path, path: Path, deadline: float) -> None:
    log = directory / "node.log"
    # -P and an explicit path: a folder `store` in the working directory must not shadow ours.
    program = (
        f"import sys; sys.path.insert(0, {str(_PACKAGES)!r}); "
        "from lookup_buffer.node.main import main; main()"
    )
    with log.open("ab") as output:
        starter = subprocess.Popen(
            [sys.executable, "-P", "-c", program, "--detach"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        starter.communicate(to_json(config).encode(), max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:  # it reads files that may not answer, such as 'token_file'
        starter.kill()
        starter.communicate()
        raise _not_started(log) from None
    while not _accepts_connections(path):
        if starter.returncode or time.monotonic() >= deadline:
            raise _not_started(log)
        time.sleep(POLL_SECONDS)


def _not_started(log: Path) -> NodeUnavailable:
    tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return NodeUnavailable(f"the node did not start; the end of {log}: {tail}")


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its backlog is full: a node exists, busy or stopped
        except OSError:
            return False
    return True
