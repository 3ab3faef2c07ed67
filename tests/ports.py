"""TCP ports for the servers of tests, on which nothing listens yet.

Below those that the kernel gives to clients, so that no connection takes one before its server
does; and each of the processes that run tests side by side has a range of its own.
"""

import random
import socket
from contextlib import suppress

from workers import worker_number

_FIRST, _END = 15_000, 32_000
_WORKERS_MAX = 8


def free_ports(count: int) -> list[int]:
    """So many different ones."""
    share = (_END - _FIRST) // _WORKERS_MAX
    first = _FIRST + worker_number() % _WORKERS_MAX * share
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(first, first + share)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in ports:
                ports.append(port)
    return ports


def free_port() -> int:
    (port,) = free_ports(1)
    return port
