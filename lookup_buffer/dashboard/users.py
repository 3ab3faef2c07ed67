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

from lookup_buffer.config import is_loopback


async def user_of(scope: Scope) -> str:
    """The user of the process that connected, if it is one of this host, else its address; that of
    a loopback address which is not found is one for all."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or server[1] is None:
        return "unknown"
    ends: tuple[tuple[str, int], tuple[str, int]] = (tuple(client), tuple(server))
    thread = ThreadPoolExecutor(1)
    try:
        user = await asyncio.get_running_loop().run_in_executor(thread, _user_between, *ends)
    except (OSError, ValueError):  # /proc is not mounted, or the address has a zone
        user = None
    finally:
        thread.shutdown(wait=False)
    if user is not None:
        return f"user {user}"
    return "unknown" if is_loopback(client[0]) else str(client[0])


def _user_between(client: tuple[str, int], server: tuple[str, int]) -> str | None:
    """Whose socket connects these ends. One that was made for IPv6 may connect to an address of
    IPv4: then the kernel lists both as such of IPv6."""
    for name, of_ipv6 in (("tcp", False), ("tcp6", True)):
        if not of_ipv6 and ":" in client[0]:
            continue
        ends = f" {_listed(*client, of_ipv6)} {_listed(*server, of_ipv6)} "
        _, found, rest = Path(f"/proc/net/{name}").read_text("ascii").partition(ends)
        if found:
            return rest.split(maxsplit=5)[4]
    return None


def _listed(host: str, port: int, of_ipv6: bool) -> str:
    """As the kernel writes it: words of the machine's byte order."""
    if of_ipv6 and ":" not in host:
        host = f"::ffff:{host}"
    packed = socket.inet_pton(socket.AF_INET6 if of_ipv6 else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
