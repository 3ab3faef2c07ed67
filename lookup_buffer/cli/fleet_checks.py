"""What `doctor` asks of the nodes that beat in the store: whether they live, and can be reached."""

import socket
from collections.abc import Iterator, Sequence

from lookup_buffer.cli.beat_watch import BeatWatch
from lookup_buffer.cli.checks import Check, ok, warn
from store import MetadataStore, NodeInfo

CONNECT_SECONDS = 1.0
TRIED_MAX = 16
"""Nodes whose ports are tried, for one that is cut off takes the whole second."""
NAMED_MAX = 5
LOOPBACK = ("127.", "localhost", "[::1]")


def fleet_checks(store: MetadataStore) -> Iterator[Check]:
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
        yield ports_check(infos)


def _versions(infos: Sequence[NodeInfo]) -> Check:
    found = ", ".join(sorted({info.version for info in infos}))
    if "," in found:
        return warn("versions", f"of nodes: {found}", "install the same lookup-buffer everywhere")
    return ok("versions", f"of all nodes: {found}")


def ports_check(infos: Sequence[NodeInfo]) -> Check:
    """Whether the addresses that nodes tell each other lead to them, tried from this host."""
    tried = sorted(infos, key=lambda info: info.node)[:TRIED_MAX]
    unreached = [f"{info.node} at {info.endpoint} ({why})" for info in tried if (why := _why(info))]
    if not unreached:
        return ok("ports", f"of nodes that were reached from here: {len(tried)}")
    named = ", ".join(unreached[:NAMED_MAX]) + (", …" if len(unreached) > NAMED_MAX else "")
    return warn(
        "ports",
        f"not reached from here: {named}",
        "open the port between the hosts, or correct `listen` and `advertise`: what these nodes "
        "hold cannot be fetched",
    )


def _why(info: NodeInfo) -> str:
    """Why the node is not reached; empty if it is."""
    host, _, port = info.endpoint.removeprefix("tcp://").rpartition(":")
    if host.startswith(LOOPBACK) and info.host != socket.gethostname():
        return "loopback, of another host"
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""
