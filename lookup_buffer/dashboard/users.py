"""Whose a connection to the dashboard is, so that no local user takes the places of all others.

Any process of this host can connect to a loopback address. The kernel lists the user of each of its
sockets in /proc/net.
"""

import socket
import struct
from pathlib import Path

from starlette.types import Scope


def user_of(scope: Scope) -> str:
    """The user of the process that connected, if it is one of this host, else its address."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or server[1] is None:
        return "unknown"
    table = Path("/proc/net/tcp6" if ":" in client[0] else "/proc/net/tcp")
    try:
        ends = f" {_listed(*client)} {_listed(*server)} "
        for line in table.read_text().splitlines():
            if ends in line:
                return f"user {line.split()[7]}"
    except OSError:  # /proc is not mounted, or the address has a zone
        pass
    return str(client[0])


def _listed(host: str, port: int) -> str:
    """As the kernel writes it: words of the machine's byte order."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
