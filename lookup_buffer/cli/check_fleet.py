"""Checks of the nodes with a heartbeat: whether they are alive, reachable, and accept our token
and certificate.

Called by `check_store`, for a store that answers.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lookup_buffer.cli.check import Check, fail, named, ok, warn
from lookup_buffer.cli.check_addresses import LOOPBACK, address_checks
from lookup_buffer.errors import ConfigError, LookupBufferError, NodeRefused, PipeBroken
from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from lookup_buffer.inspection.records import age_text
from store import BlockingStore, NodeInfo

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig
    from lookup_buffer.protocol.tls import Tls

CONNECT_SECONDS = 1.0
"""Timeout for connecting to a node, and again for the handshake."""
EXPIRES_SOON_SECONDS = 14 * 86_400.0
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
    """Whether nodes are reachable at the endpoints that they publish, and accept the token and
    certificate of this configuration. Each node is tried from this host, as another node would do
    it."""
    from lookup_buffer.config import is_tls
    from lookup_buffer.protocol.tls import Tls, TlsRefused

    infos = sorted(infos, key=lambda info: info.node)
    by_tls = [info for info in infos if is_tls(info.endpoint)]
    tls, files = None, config.tls_files()
    try:
        if files and config.node_id:
            tls = Tls(files, config.node_id, read_only=config.read_only)
    except ConfigError as error:
        yield fail(
            "tls", str(error), "correct the file: with it the node of this host does not start"
        )
    yield from _schemes_checks(infos, by_tls, has_files=files is not None)
    tried = [info for info in infos if (tls is not None) == (info in by_tls)][:TRIED_MAX]
    try:
        token = config.read_peer_token(make=False)
    except ConfigError as error:
        yield fail(
            "token", str(error), "correct the file: with it the node of this host does not start"
        )
        return
    unreached, refusing, uncertified = [], [], []
    for info in tried:
        try:
            _try_handshake(info, token, tls)
        except TlsRefused as error:
            uncertified.append(f"{info.node} at {info.endpoint} ({error})")
        except NodeRefused as error:
            refusing.append(f"{info.node} at {info.endpoint} ({error})")
        except (LookupBufferError, OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            unreached.append(f"{info.node} at {info.endpoint} ({why})")
    reached = len(tried) - len(unreached)
    yield _ports_check(unreached, len(tried))
    is_set = config.token is not None or config.token_file is not None
    if tls is not None:
        yield _certificates_check(uncertified, reached, tls)
    yield _token_check(refusing, reached - len(uncertified), is_set=is_set)


def _schemes_checks(
    infos: Sequence[NodeInfo], by_tls: Sequence[NodeInfo], *, has_files: bool
) -> Iterator[Check]:
    without = [info.node for info in infos if info not in by_tls]
    if by_tls and without:
        yield fail(
            "tls",
            f"nodes without TLS: {named(without)}; with TLS: "
            f"{named([info.node for info in by_tls])}",
            "set `listen` of all nodes to tls://, or of all to tcp://: they do not fetch from "
            "each other",
        )
    elif by_tls and not has_files:
        yield warn(
            "tls",
            "all nodes use TLS; no certificate is set here",
            "set the variables of this host's node, LOOKUP_BUFFER_LISTEN, _NODE_ID and those of "
            "its TLS files, to test it",
        )
    elif without and has_files:
        yield fail(
            "tls",
            f"nodes without TLS, which this configuration demands: {named(without)}",
            "set `listen` of all nodes to tls://: they do not fetch from each other",
        )


def _certificates_check(uncertified: Sequence[str], reached: int, tls: "Tls") -> Check:
    """`tls`: with the certificate that is set here."""
    seconds, authority_seconds = tls.expires - time.time(), tls.authority_expires - time.time()
    if not uncertified and authority_seconds < EXPIRES_SOON_SECONDS:
        return warn(
            "tls",
            f"the authority's certificate expires in {age_text(authority_seconds)}, and with it "
            "all that it signed",
            "make a new authority, and add its certificate to the authority file of all nodes, "
            "then replace their own: docs/operations.md, 'Rotating certificates'",
        )
    if not uncertified and seconds < EXPIRES_SOON_SECONDS:
        return warn(
            "tls",
            f"the certificate set here expires in {age_text(seconds)}",
            "renew it: replace its files, which the node reads again",
        )
    if not uncertified:
        return ok("tls", f"nodes that accept this certificate, and whose own is valid: {reached}")
    return fail(
        "tls",
        f"no TLS with {named(uncertified)}",
        "give each node a valid certificate with its id as a DNS or URI name, of an authority "
        "that all nodes know: what these nodes hold is a miss here",
    )


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


def _try_handshake(info: NodeInfo, token: str | None, tls: "Tls | None") -> None:
    """Connect to the node and do the handshake.

    Raises:
        TlsRefused: there is no TLS with the node.
        NodeRefused: the node refuses the token.
        LookupBufferError, OSError, ValueError: the node is not reached, or another program listens
            there.
    """
    import ssl

    from lookup_buffer.config import parse_address
    from lookup_buffer.protocol.auth import Purpose, request_handshake
    from lookup_buffer.protocol.tls import TlsRefused, explained

    host, port = parse_address(info.endpoint)
    if host.startswith(LOOPBACK) and info.host != socket.gethostname():
        raise ValueError("loopback, of another host")
    stream = socket.create_connection((host, port), CONNECT_SECONDS)
    purpose = Purpose("tensors", info.endpoint, info.node)
    if tls is not None:
        stream = tls.connected(stream, info.node, CONNECT_SECONDS)
        purpose = purpose._replace(client=tls.node)
    try:
        request_handshake(stream, token=token, timeout=CONNECT_SECONDS, purpose=purpose).close()
    except PipeBroken as error:
        if isinstance(error.__cause__, ssl.SSLError):  # it looks at our certificate after its own
            raise TlsRefused(explained(error.__cause__)) from error
        raise
