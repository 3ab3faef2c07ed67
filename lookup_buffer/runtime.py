"""Finding this host's node, and starting it where none runs.

One node a runtime directory, by `flock` and not by a file's existence. A node that is started
here belongs to nobody: it is forked twice, has a session of its own, all the machine's cores, and
ends by itself when no client has been there for a while.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lookup_buffer.config import SECRETS, BufferConfig
from lookup_buffer.errors import NodeUnavailable

LOG_TAIL_BYTES = 2000
POLL_SECONDS = 0.01
PROBE_SECONDS = 1.0
_PACKAGES = Path(__file__).resolve().parent.parent


def node_socket(config: BufferConfig, *, timeout: float) -> Path:
    """The unix socket of the node to use; starts the node where the configuration names none.

    Raises:
        NodeUnavailable: there is none and it could not be started within `timeout` seconds.
    """
    path = config.socket_path()
    if config.node_socket is not None or timeout <= 0 or _answers(path):
        return path
    deadline = time.monotonic() + timeout
    directory = config.runtime_directory()
    with lock(directory / "start.lock", timeout=timeout):
        if not _answers(path):
            _start(config, directory, path, deadline)
    return path


@contextmanager
def lock(path: Path, *, timeout: float) -> Iterator[None]:
    """Hold an exclusive `flock` on `path`.

    Raises:
        NodeUnavailable: somebody else holds it for longer than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    """The configuration with its secrets, for a pipe and never for a command line."""
    settings = config.model_dump(mode="json", exclude_none=True)
    for name in SECRETS:
        if name in settings:
            settings[name] = getattr(config, name).get_secret_value()
    return json.dumps(settings)


def _start(config: BufferConfig, directory: Path, path: Path, deadline: float) -> None:
    log = directory / "node.log"
    # -P and an explicit path: a folder named `store` in the working directory must not shadow.
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
    starter.communicate(to_json(config).encode())
    while not _answers(path):
        if time.monotonic() >= deadline:
            tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
            raise NodeUnavailable(f"the node did not start; the end of {log}: {tail}")
        time.sleep(POLL_SECONDS)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full: a node is there, busy or stopped
        except OSError:
            return False
    return True
