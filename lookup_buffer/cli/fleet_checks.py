"""What `doctor` asks of the nodes that beat in the store: whether they live, and let us in."""

import socket
from collections.abc import Iterator, Sequence

from lookup_buffer.cli.beat_watch import BeatWatch
from lookup_buffer.cli.checks import Check, fail, ok, warn
from lookup_buffer.errors import LookupBufferError, NodeRefused
from store import MetadataStore, NodeInfo

CONNECT_SECONDS = 1.0
"""To be reached, and again to be let in."""
TRIED_MAX = 16
"""Nodes whose ports are tried, for one that is cut off takes all of that time."""
NAMED_MAX = 5
LOOPBACK = ("127.", "localhost", "[::1]")


def fleet_checks(store: MetadataStore, token: str | None) -> Iterator[Check]:
    watch = BeatWatch(store)
    watch.settle()
    alive = [node for node in watch.last if watch.alive(node)]
    silent = sorted(watch.last.keys() - set(alive))
    infos = list(store.node_infos(alive).values())
    if silent:
        yield warn(
            "fleet",
            f"nodes alive: {len(alive)}; silent for 2 s: {', '.join(silent)}",
            "start them again, or let it be: what only they held is a miss",
        )
    else:
        yield ok("fleet", f"nodes alive: {len(alive)}")
    if infos:
        yield _versions(infos)
        yield from peers_checks(infos, token)


def _versions(infos: Sequence[NodeInfo]) -> Check:
    found = ", ".join(sorted({info.version for info in infos}))
    if "," in found:
        return warn("versions", f"of nodes: {found}", "install the same lookup-buffer everywhere")
    return ok("versions", f"of all nodes: {found}")


def peers_checks(infos: Sequence[NodeInfo], token: str | None) -> Iterator[Check]:
    """Whether the addresses that nodes tell each other lead to them, and whether they let in who
    has this configuration's token: tried from this host, as one node does with another."""
    tried = sorted(infos, key=lambda info: info.node)[:TRIED_MAX]
    unreached, refusing = [], []
    for info in tried:
        try:
            _knock(info, token)
        except NodeRefused as error:
            refusing.append(f"{info.node} at {info.endpoint} ({error})")
        except (LookupBufferError, OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            unreached.append(f"{info.node} at {info.endpoint} ({why})")
    yield _ports(unreached, len(tried))
    yield _token(refusing, len(tried) - len(unreached), token)


def _ports(unreached: Sequence[str], tried: int) -> Check:
    if not unreached:
        return ok("ports", f"of nodes that were reached from here: {tried}")
    return warn(
        "ports",
        f"not reached from here: {_named(unreached)}",
        "open the port between the hosts, or correct `listen` and `advertise`: what these nodes "
        "hold cannot be fetched",
    )


def _token(refusing: Sequence[str], reached: int, token: str | None) -> Check:
    if not refusing:
        return ok("token", f"of nodes that take this configuration's: {reached}")
    found = f"not let in by {_named(refusing)}"
    if token is None:  # the nodes of this host may have one, which we were not told
        return warn(
            "token", f"{found}; none is set here", "set LOOKUP_BUFFER_TOKEN_FILE to have it tried"
        )
    return fail(
        "token",
        found,
        "give all hosts one token, and restart nodes and engines that have another: what these "
        "nodes hold is a miss here",
    )


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:NAMED_MAX]) + (", …" if len(nodes) > NAMED_MAX else "")


def _knock(info: NodeInfo, token: str | None) -> None:
    """Raises NodeRefused, or of another kind: the node is not reached, or somebody else is."""
    from lookup_buffer.protocol.auth import request_handshake

    host, _, port = info.endpoint.removeprefix("tcp://").rpartition(":")
    if host.startswith(LOOPBACK) and info.host != socket.gethostname():
        raise ValueError("loopback, of another host")
    stream = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    request_handshake(stream, token=token, timeout=CONNECT_SECONDS).close()
