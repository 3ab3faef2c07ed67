"""A logged-in socket to a server, for the `redis` pipe, which has its own RESP client."""

import socket

from store.deployment import open_topology
from store.errors import StoreUrlError
from store.url import parse, redact


def dial(url: str, seconds: float) -> socket.socket:
    """Connect and log in as `url` says, in RESP3. Takes up to `seconds` for each of the two.

    Raises:
        StoreUrlError: the URL is not that of a single server, or has a user without a password.
        Lost: no server listens there.
        StoreUnavailable: it was too slow, or refuses the login.
    """
    address = parse(url).with_passwords(None, None)
    if address.topology != "standalone":
        raise StoreUrlError(
            f"{redact(url)!r} names a deployment; use the URL of one server, such as redis://host"
        )
    topology = open_topology(address, seconds, seconds)
    (server,) = topology.servers(topology.new_budget())
    return server.dial().detach()
