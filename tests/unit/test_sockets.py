"""Connecting: to addresses and names, cheap from the first connection on."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lookup_buffer.errors import PipeBroken
from lookup_buffer.protocol.sockets import connected_socket

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_addresses_and_names_are_connected_to(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with connected_socket(host, port, time.monotonic() + 5.0) as stream:
            assert stream.getpeername() == ("127.0.0.1", port)


def test_a_name_that_does_not_exist_is_named() -> None:
    with pytest.raises(PipeBroken, match=r"no-such-host\.invalid"):
        connected_socket("no-such-host.invalid", 1, time.monotonic() + 5.0)


@pytest.mark.processes
def test_a_first_connection_imports_nothing() -> None:
    program = (
        "import socket, sys, time\n"
        "from lookup_buffer.protocol.sockets import connected_socket\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "before = set(sys.modules)\n"
        "connected_socket(*listener.getsockname(), time.monotonic() + 5.0).close()\n"
        "print(*(set(sys.modules) - before))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []
