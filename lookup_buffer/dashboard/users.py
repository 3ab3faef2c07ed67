"""Whose a connection to the dashboard is, so that no local user takes the places of all others.

Any process of this host can connect to a loopback address. The kernel knows the user of each of its
sockets, and tells that of one by its ends (`sock_diag(7)`), however many there are. Before Linux
6.9 it answers one such question of the whole machine after the other, and any process can keep it
busy with its own. So it is asked on a thread, once at a time; WAITING_MAX requests wait for that,
ASK_SECONDS each.
"""

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from typing import Final

from starlette.types import Scope

from lookup_buffer.config import is_loopback

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
NLM_F_REQUEST: Final = 1
NLMSG_ERROR: Final = 2
ALL_STATES: Final = 0xFFFFFFFF
NO_COOKIE: Final = (0xFFFFFFFF, 0xFFFFFFFF)
# The kernel's structures, of <linux/netlink.h>, <linux/inet_diag.h>:
_NLMSGHDR: Final = struct.Struct("=IHHII")  # bytes, type, flags, number, port
_INET_DIAG_REQ_V2: Final = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_INET_DIAG_SOCKID: Final = struct.Struct(">HH16s16s")  # ports and addresses; then:
_INTERFACE_AND_COOKIE: Final = struct.Struct("=III")
_INET_DIAG_MSG: Final = struct.Struct("=4x48xIIIII")  # expires, two queues, user, inode
ANSWER_BYTES_MAX: Final = 8192
ASK_SECONDS: Final = 0.5
"""An answer takes 0.3 ms."""
WAITING_MAX: Final = 4
"""A request that waits takes one of the process' places for connections."""


Ends = tuple[tuple[str, int], tuple[str, int]]


class Users:
    """Used on one loop."""

    def __init__(self) -> None:
        self._asking: asyncio.Future[int | None] | None = None
        self._waiting = 0

    async def user_of(self, scope: Scope) -> str:
        """The user of the process that connected, if it is one of this host, else its address; that
        of a loopback address which is not found in time is one for all."""
        client, server = scope.get("client"), scope.get("server")
        if not client or not server or server[1] is None:
            return "unknown"
        user = None
        if self._waiting < WAITING_MAX:
            self._waiting += 1
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    user = await self._ask((tuple(client), tuple(server)))
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
        if user is not None:
            return f"user {user}"
        return "unknown" if is_loopback(client[0]) else str(client[0])

    async def _ask(self, ends: Ends) -> int | None:
        while self._asking is not None and not self._asking.done():
            await asyncio.wait([self._asking])
        loop = asyncio.get_running_loop()
        asking: asyncio.Future[int | None] = loop.create_future()
        self._asking = asking

        def ask() -> None:
            user = None
            try:
                user = _user_between(*ends)
            finally:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(asking.set_result, user)

        try:
            threading.Thread(target=ask, name="lb-user", daemon=True).start()
        except RuntimeError:  # no thread can be started
            asking.set_result(None)
        await asyncio.wait([asking])
        return asking.result()


def _user_between(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Whose socket connects these ends; None if its process has closed it, there is none, the
    kernel cannot tell, or the address has a zone. One that was made for IPv6 and connects addresses
    of IPv4 is found by those."""
    try:
        answer = _answer(client, server)
    except OSError:
        return None
    if _NLMSGHDR.unpack_from(answer)[1] != SOCK_DIAG_BY_FAMILY:
        return None
    *_, user, inode = _INET_DIAG_MSG.unpack_from(answer, _NLMSGHDR.size)
    return int(user) if inode else None


def _answer(client: tuple[str, int], server: tuple[str, int]) -> bytes:
    """The kernel's. Raises OSError."""
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    packed = [socket.inet_pton(family, host) for host, _ in (client, server)]
    request = (
        _INET_DIAG_REQ_V2.pack(family, socket.IPPROTO_TCP, 0, ALL_STATES)
        + _INET_DIAG_SOCKID.pack(client[1], server[1], *packed)
        + _INTERFACE_AND_COOKIE.pack(0, *NO_COOKIE)
    )
    nbytes = _NLMSGHDR.size + len(request)
    header = _NLMSGHDR.pack(nbytes, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.send(header + request)
        return kernel.recv(ANSWER_BYTES_MAX, socket.MSG_DONTWAIT)  # `send` has caused it
