"""Whose a connection to the dashboard is, so that no local user takes the places of all others.

Any process of this host can connect to a loopback address. The kernel knows the user of each of its
sockets, and tells that of one by its ends (`sock_diag(7)`), however many there are.
"""

import socket
import struct
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


def user_of(scope: Scope) -> str:
    """The user of the process that connected, if it is one of this host, else its address; that of
    a loopback address which is not found is one for all."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or server[1] is None:
        return "unknown"
    try:
        user = _user_between(tuple(client), tuple(server))
    except OSError:  # there is no such socket, the kernel cannot tell, or the address has a zone
        user = None
    if user is not None:
        return f"user {user}"
    return "unknown" if is_loopback(client[0]) else str(client[0])


def _user_between(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Whose socket connects these ends; None if its process has closed it. One that was made for
    IPv6 and connects addresses of IPv4 is found by those."""
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
        answer = kernel.recv(ANSWER_BYTES_MAX, socket.MSG_DONTWAIT)  # `send` has caused it
    if _NLMSGHDR.unpack_from(answer)[1] != SOCK_DIAG_BY_FAMILY:
        return None
    *_, user, inode = _INET_DIAG_MSG.unpack_from(answer, _NLMSGHDR.size)
    return user if inode else None
