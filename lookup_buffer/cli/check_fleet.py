"""Checks of the nodes with a heartbeat: whether they are alive, reachable, and accept our token.

Called by `check_store`, for a store that answers.
"""

import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lookup_buffer.cli.check import Check, fail, named, ok, warn
from lookup_buffer.cli.check_addresses import LOOPBACK, address_checks
from lookup_buffer.errors import LookupBufferError, NodeRefused
from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from store import BlockingStore, NodeInfo

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig

CONNECT_SECONDS = 1.0
"""Timeout for connecting to a node, and again for the handshake."""
TRIED_MAX = 16
"""Most nodes whose ports are tried: an unreachable one takes all of CONNECT_SECONDS."""


def fleet_checks(store: BlockingStore, config: "BufferConfig") -> Iterator[Check]:
    """Checks of the nodes with a heartbeat. Reads heartbeats for 2 s at most; then the nodes dial
    each other, see `address_checks`."""
    monitor = store.run(HeartbeatMonitor.begin(store.store))
    store.run(monitor.wait())
    alive = [node for node in monitor.last if monitor.alive(node)]
    silent = sorted(monitor.last.keys() - set(alive))
    infos = list(store.node_infos(alive).values())
    if silent:
        yield warn(
            "fleet",
            f"nodes alive: {len(alive)}; silent for 2 s: {', '.join(silent)}",
            "start them again if they should run: what only they held is a miss",
        )
    else:
        yield ok("fleet", f"nodes alive: {len(alive)}")
    if infos:
        yield _versions_check(infos)
        yield from _peer_checks(infos, config)
        yield from address_checks(config, infos)


def _versions_check(infos: Sequence[NodeInfo]) -> Check:
    found = ", ".join(sorted({info.version for info in infos}))
    if "," in found:
        return warn("versions", f"of nodes: {found}", "install the same lookup-buffer everywhere")
    return ok("versions", f"of all nodes: {found}")


def _peer_checks(infos: Sequence[NodeInfo], config: "BufferConfig") -> Iterator[Check]:
    """Whether nodes are reachable at the endpoints that they publish, and accept this token.

    Each node is tried from this host, as another node would do it.
    """
    token = config.read_token()
    tried = sorted(infos, key=lambda info: info.node)[:TRIED_MAX]
    unreached, refusing = [], []
    for info in tried:
        try:
            _try_handshake(info, token)
        except NodeRefused as error:
            refusing.append(f"{info.node} at {info.endpoint} ({error})")
        except (LookupBufferError, OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            unreached.append(f"{info.node} at {info.endpoint} ({why})")
    yield _ports_check(unreached, len(tried))
    is_set = config.token is not None or config.token_file is not None
    yield _token_check(refusing, len(tried) - len(unreached), is_set=is_set)


def _ports_check(unreached: Sequence[str], tried: int) -> Check:
    if not unreached:
        return ok("ports", f"nodes reached from here: {tried}")
    return warn(
        "ports",
        f"not reached from here: {named(unreached)}",
        "open the port between the hosts, or correct `listen` and `advertise`: what these nodes "
        "hold cannot be fetched",
    )


def _token_check(refusing: Sequence[str], reached: int, *, is_set: bool) -> Check:
    if not refusing:
        return ok("token", f"nodes that accept this configuration's: {reached}")
    found = f"refused by {named(refusing)}"
    if not is_set:  # this host's nodes may have one that this configuration lacks
        return warn(
            "token", f"{found}; none is set here", "set LOOKUP_BUFFER_TOKEN_FILE to test it"
        )
    return fail(
        "token",
        found,
        "give all hosts one token, and restart nodes and engines that have another: what these "
        "nodes hold is a miss here",
    )


def _try_handshake(info: NodeInfo, token: str) -> None:
    """Connect to the node and do the handshake.

    Raises:
        NodeRefused: the node refuses the token.
        LookupBufferError, OSError, ValueError: the node is not reached, or another program listens
            there.
    """
    from lookup_buffer.protocol.auth import Purpose, request_handshake

    host, _, port = info.endpoint.removeprefix("tcp://").rpartition(":")
    if host.startswith(LOOPBACK) and info.host != socket.gethostname():
        raise ValueError("loopback, of another host")
    stream = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    purpose = Purpose("tensors", info.endpoint, info.node)
    request_handshake(stream, token=token, timeout=CONNECT_SECONDS, purpose=purpose).close()
