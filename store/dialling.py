"""A logged-in socket to a server, for who moves bytes through it himself: the `redis` pipe."""

import socket

from store.deployment import open_topology
from store.errors import StoreUrlError
from store.url import parse, redact


def dial(url: str, seconds: float) -> socket.socket:
    """Connect, with TLS and the user that the URL names, and speak RESP3 from then on.

    Takes at most `seconds` twice: for the connection, and for logging in.

    Raises:
        StoreUrlError: the URL names no server, or a user without a password; deployments of
            several are not for this.
        Lost: nobody listens there.
        StoreUnavailable: too slow, or it refuses us.
    """
    address = parse(url).with_passwords(None, None)
    if address.topology != "standalone":
        raise StoreUrlError(f"{redact(url)!r} is not the URL of one server")
    topology = open_topology(address, seconds, seconds)
    (server,) = topology.servers(topology.new_budget())
    return server.dial().detach()
