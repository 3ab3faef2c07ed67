"""Whose a connection to the dashboard is, so that no local user takes the places of all others.

Any process of this host can connect to a loopback address. The kernel lists the user of each of its
sockets in /proc/net. On a host with many sockets it writes that list for long, so it is read on a
thread, which ends with it.
"""

import asyncio
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.types import Scope


async def user_of(scope: Scope) -> str:
    """The user of the process that connected, if it is one of this host, else its address."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or server[1] is None:
        return "unknown"
    table = Path("/proc/net/tcp6" if ":" in client[0] else "/proc/net/tcp")
    thread = ThreadPoolExecutor(1)
    try:
        ends = f" {_listed(*client)} {_listed(*server)} "
        reading = asyncio.get_running_loop().run_in_executor(thread, table.read_text)
        _, found, rest = (await reading).partition(ends)
    except OSError:  # /proc is not mounted, or the address has a zone
        found = rest = ""
    finally:
        thread.shutdown(wait=False)
    return f"user {rest.split(maxsplit=5)[4]}" if found else str(client[0])


def _listed(host: str, port: int) -> str:
    """As the kernel writes it: words of the machine's byte order."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
