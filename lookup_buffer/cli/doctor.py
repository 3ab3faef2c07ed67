"""`lookup-buffer doctor`: check store, fleet, host and node, with advice for each problem.

It makes one `Check` for each subject:
- the store: client library, server, rights, eviction policy, memory, latency, clock, records, and
  the keys of nodes;
- the fleet: whether the nodes with a heartbeat are alive, reachable, and accept our token;
- this host: variables, runtime directory, node, memory for its arena.

Runs on the main thread. Network calls have timeouts. A failed check is a result, not an exception.
"""

import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookup_buffer.access import EMBEDDED
from lookup_buffer.cli.options import configure, of_store
from lookup_buffer.cli.output import print_json, print_outline
from lookup_buffer.environment import misspelt_variables
from lookup_buffer.errors import ConfigError, LookupBufferError, NodeRefused
from lookup_buffer.inspection.access import (
    CommandError,
    ExitCode,
    is_listening,
    opened_store,
    shown_url,
)
from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from lookup_buffer.inspection.records import size_text
from lookup_buffer.shm.index import IS_ORDERED, WITHOUT_ORDER
from store import (
    BlockingStore,
    EmbeddedServerError,
    NodeInfo,
    ServerInfo,
    StoreError,
    StoreNotBrowsable,
    layout,
)
from store.embedded import find_server
from store.schemes import is_foreign
from store.url import parse

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig
    from store.blocking import BlockingInspection

OLDEST_VERSIONS = {"redis": (7, 0), "valkey": (8, 0)}
SERVER_MEMORY_PART_MAX = 0.8
RECORDS_MAX = 10_000
"""Most records examined. The server lists them in no order, so they are a sample of all."""
PINGS = 5
CLOCK_SECONDS_MAX = 2.0
PING_SECONDS_MAX = 0.005
"""Round trip above which there is a warning: a look-up takes one, and a hit should cost little."""
CONNECT_SECONDS = 1.0
"""Timeout for connecting to a node, and again for the handshake."""
TRIED_MAX = 16
"""Most nodes whose ports are tried: an unreachable one takes all of CONNECT_SECONDS."""
NAMED_MAX = 5
LOOPBACK = ("127.", "localhost", "[::1]")
ANSWER_SECONDS = 2.0
SOCKET_PATH_BYTES_MAX = 107
ARENA_PART_MAX = 0.75
"""Largest part of the machine's memory for an arena; a larger one leaves engines too little."""


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, but perhaps slowly or not for long."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One result. `name` and `verdict` are stable; `found` and `advice` are for people."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    return Check(name, Verdict.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    return Check(name, Verdict.FAIL, found, advice)


@click.command()
@of_store
def doctor(
    store_url: str | None,
    store_password_file: Path | None,
    directory: Path | None,
    json: bool,
) -> None:
    """Check the store, this host and its node.

    Advises what to do about each problem. The exit code is 1 if a check fails.
    """
    config = configure(
        store_url=store_url, store_password_file=store_password_file, directory=directory
    )
    checks = [*store_checks(config), *host_checks(config)]
    failed = any(check.verdict is Verdict.FAIL for check in checks)
    if json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    if failed:
        raise click.exceptions.Exit(ExitCode.FOUND)


def _print(checks: list[Check]) -> None:
    styles = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    print_outline(
        [
            (
                (check.verdict.value, styles[check.verdict]),
                check.name,
                f"{check.found}\n-> {check.advice}" if check.advice else check.found,
            )
            for check in checks
        ]
    )


def store_checks(config: "BufferConfig") -> Iterator[Check]:
    """Checks of the client library and the store, and of the fleet if the store is usable."""
    if not is_foreign(config.store_url):
        yield from _client_check()
    access = config.store_access()
    try:
        access.check_files()
    except ConfigError as error:
        yield fail("store", str(error), "correct the file, or the URL")
        return
    try:
        with opened_store(access, "doctor", browsed=False) as store:
            if store.browsable:
                store.ping()
            else:
                store.beats()
            yield ok("store", f"{shown_url(access)} answers")
            if is_foreign(config.store_url):
                yield from _foreign_store_checks(config, store)
            else:
                yield from tls_checks(config.store_url)
                yield from _usable_store_checks(config, store)
    except CommandError as error:
        if error.code is ExitCode.UNREACHABLE:  # the embedded server, which a node would start
            yield _embedded_check(str(error))
        # Otherwise the directory is the cause; the checks of this host report it.
    except ConfigError:
        pass  # the directory, as above
    except StoreError as error:
        yield fail(
            "store",
            str(error),
            "start the server, or correct the URL, password, certificates or firewall",
        )


def tls_checks(url: str) -> Iterator[Check]:
    """A warning if the URL takes servers whose certificate does not prove who they are."""
    options = {} if url == EMBEDDED else parse(url).tls_options
    unverified = [
        f"{name}={value}".lower()
        for name, value in options.items()
        if (name, value) in (("ssl_cert_reqs", "none"), ("ssl_check_hostname", False))
    ]
    if unverified:
        yield warn(
            "store TLS",
            f"{', '.join(unverified)}: another server could pose as this one, and get the password",
            "name the certificate of its authority by ssl_ca_certs",
        )


def _client_check() -> Iterator[Check]:
    try:
        yield ok("store client", f"redis-py {version('redis')}, hiredis {version('hiredis')}")
    except PackageNotFoundError:
        yield fail("store client", "not installed", "pip install 'redis[hiredis]'")


def _embedded_check(found: str) -> Check:
    """The check of an embedded server that does not run. `found` is the store's error."""
    try:
        find_server()
    except EmbeddedServerError as error:
        return fail("store", str(error), "a node starts without it and shares nothing")
    return warn("store", found, "it starts with the node")


def _foreign_store_checks(config: "BufferConfig", store: BlockingStore) -> Iterator[Check]:
    """Checks of a package's store. Only the package knows what its servers need."""
    if store.browsable:
        info = store.server_info()
        yield ok("store version", f"{info.product} {info.version}")
        yield _latency_check(config, store)
    else:
        found = str(StoreNotBrowsable(store.store))
        yield warn("store version", found, "use the tools of its package to check its servers")
    yield from fleet_checks(store, _token_of(config))


def _token_of(config: "BufferConfig") -> str | None:
    return config.token.get_secret_value() if config.token else None


def _usable_store_checks(config: "BufferConfig", store: BlockingStore) -> Iterator[Check]:
    """Checks of a store that answers. They end at a failure that makes the later ones pointless."""
    inspection = store.inspection()
    try:
        info = store.server_info()
    except StoreError:
        info = None  # not permitted; the next check reports it
    if info is not None:
        first = (mode_check(config.store_url, info), version_check(info))
        yield from first
        if any(check.verdict is Verdict.FAIL for check in first):
            return
    if inspection is None:
        return
    rights = rights_check(inspection)
    yield rights
    if info is not None and rights.verdict is Verdict.OK:
        yield policy_check(info)
        yield memory_check(info)
        yield _latency_check(config, store)
        yield from clock_check(inspection.clock_ahead_seconds())
        yield records_check(inspection)
        yield nodes_check(inspection)
        yield from fleet_checks(store, _token_of(config))


def mode_check(url: str, info: ServerInfo) -> Check:
    """Whether the URL's scheme fits the mode in which the server runs."""
    topology = "standalone" if url == "embedded" else parse(url).topology
    if (topology == "cluster") == (info.mode == "cluster") and info.mode != "sentinel":
        return ok("store mode", topology)
    return fail(
        "store mode",
        f"the URL is for {topology}, the server runs as {info.mode or 'unknown'}",
        "name a cluster by redis-cluster://host,host, the sentinels by "
        "redis-sentinel://host,host/service",
    )


def version_check(info: ServerInfo) -> Check:
    found = f"{info.product} {info.version}"
    oldest = OLDEST_VERSIONS.get(info.product)
    wanted = "use Redis 7.0 or newer, or Valkey 8 or newer"
    if oldest is None:
        return warn("store version", f"{found} is untested", wanted)
    if version_tuple(info.version) < oldest:
        return fail("store version", f"{found} is too old", wanted)
    return ok("store version", found)


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (7, 0, 15) of `7.0.15-rc1`."""
    numbers = []
    for piece in text.split("."):
        digits = piece[: len(piece) - len(piece.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def rights_check(inspection: "BlockingInspection") -> Check:
    """Whether the server allows all commands that a node needs."""
    refused = inspection.refused()
    if refused is None:
        return ok("store rights", "every command that a node needs is allowed")
    advice = "give the user the rights in docs/redis-keys.md: ACL SETUSER ... ~lb:* ..."
    if not refused.reason.startswith("NOPERM"):
        advice = (
            "use Redis 7.0 or newer, or Valkey 8 or newer, with scripting and without renamed "
            "commands"
        )
    names = ", ".join(refused.commands)
    return fail("store rights", f"the server refuses {names}: {refused.reason}", advice)


def _latency_check(config: "BufferConfig", store: BlockingStore) -> Check:
    seconds = statistics.median(store.ping() for _ in range(PINGS))
    found = f"{seconds * 1000:.2f} ms for one round trip"
    if seconds > config.store_timeout_seconds / 2:
        return fail(
            "store latency",
            f"{found}, store_timeout_seconds is {config.store_timeout_seconds:g}",
            "bring the server nearer, or raise store_timeout_seconds",
        )
    if seconds > PING_SECONDS_MAX:
        advice = "bring the server nearer: each look-up takes one round trip"
        return warn("store latency", found, advice)
    return ok("store latency", found)


def policy_check(info: ServerInfo) -> Check:
    """The eviction policy: the server may evict records, but not heartbeats or claims at random."""
    advice = "CONFIG SET maxmemory-policy volatile-lru, and in the server's configuration file"
    if "random" in info.policy or info.policy == "volatile-ttl":
        return fail(
            "store policy", f"{info.policy} evicts keys in use as readily as unused ones", advice
        )
    if info.policy == "noeviction":
        found = "noeviction: a full server refuses new records, and renewals until records expire"
        return warn("store policy", found, advice)
    if info.policy.startswith("allkeys-"):
        found = f"{info.policy} may also evict keys that never expire, such as the list of nodes"
        return warn("store policy", found, advice)
    return ok("store policy", info.policy)


def memory_check(info: ServerInfo) -> Check:
    used = size_text(info.used_memory_bytes)
    if info.maxmemory_bytes == 0:
        return warn(
            "store memory",
            f"{used} in use, without a limit",
            "CONFIG SET maxmemory 256mb: without a limit the server never evicts",
        )
    found = f"{used} of {size_text(info.maxmemory_bytes)} in use"
    if info.used_memory_bytes > SERVER_MEMORY_PART_MAX * info.maxmemory_bytes:
        return warn("store memory", found, "raise maxmemory")
    return ok("store memory", found)


def clock_check(ahead_seconds: float | None) -> Iterator[Check]:
    """The server's clock against this host's. Only the ages that commands show depend on it.

    `ahead_seconds` is None if the user has no right to read the time: then there is no check.
    """
    if ahead_seconds is None:
        return
    found = (
        f"{abs(ahead_seconds):.1f} s {'ahead of' if ahead_seconds > 0 else 'behind'} this host's"
    )
    if abs(ahead_seconds) > CLOCK_SECONDS_MAX:
        yield warn(
            "store clock",
            f"the server's clock is {found}",
            "synchronize both hosts with one time server: ages in `ls`, `show` and `why` are wrong",
        )
    else:
        yield ok("store clock", found)


def records_check(inspection: "BlockingInspection") -> Check:
    """Unreadable records: of another version, or written by hand. Each node reads a miss there."""
    examined = inspection.examine_records(RECORDS_MAX)
    found = f"examined: {examined.looked_at}"
    if not examined.unreadable:
        return ok("records", found)
    named = [f"{name} ({why})" for name, why in examined.unreadable.items()][:NAMED_MAX]
    if (more := len(examined.unreadable) - len(named)) > 0:
        named.append(f"and {more} more")
    return warn(
        "records",
        f"{found}; unreadable: {len(examined.unreadable)}: {', '.join(named)}",
        "UNLINK those written by hand; those of another version expire by themselves",
    )


def nodes_check(inspection: "BlockingInspection") -> Check:
    """Foreign values under the nodes' keys.

    Such a value keeps a node from publishing its heartbeat or its endpoint.
    """
    foreign = inspection.foreign_nodes()
    if not foreign:
        return ok("nodes", "no foreign values under their keys")
    named = ", ".join(f"{name} is a {kind}" for name, kind in list(foreign.items())[:NAMED_MAX])
    verdict = Verdict.FAIL if layout.NODES in foreign else Verdict.WARN
    return Check("nodes", verdict, f"foreign values: {named}", f"UNLINK it: {' '.join(foreign)}")


def fleet_checks(store: BlockingStore, token: str | None) -> Iterator[Check]:
    """Checks of the nodes with a heartbeat. Reads heartbeats for 2 s at most."""
    monitor = HeartbeatMonitor(store)
    monitor.wait()
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
        yield from _peer_checks(infos, token)


def _versions_check(infos: Sequence[NodeInfo]) -> Check:
    found = ", ".join(sorted({info.version for info in infos}))
    if "," in found:
        return warn("versions", f"of nodes: {found}", "install the same lookup-buffer everywhere")
    return ok("versions", f"of all nodes: {found}")


def _peer_checks(infos: Sequence[NodeInfo], token: str | None) -> Iterator[Check]:
    """Whether nodes are reachable at the endpoints that they publish, and accept this token.

    `token` is this configuration's. Each node is tried from this host, as another node would do it.
    """
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
    yield _token_check(refusing, len(tried) - len(unreached), token)


def _ports_check(unreached: Sequence[str], tried: int) -> Check:
    if not unreached:
        return ok("ports", f"nodes reached from here: {tried}")
    return warn(
        "ports",
        f"not reached from here: {_named(unreached)}",
        "open the port between the hosts, or correct `listen` and `advertise`: what these nodes "
        "hold cannot be fetched",
    )


def _token_check(refusing: Sequence[str], reached: int, token: str | None) -> Check:
    if not refusing:
        return ok("token", f"nodes that accept this configuration's: {reached}")
    found = f"refused by {_named(refusing)}"
    if token is None:  # this host's nodes may have one that this configuration lacks
        return warn(
            "token", f"{found}; none is set here", "set LOOKUP_BUFFER_TOKEN_FILE to test it"
        )
    return fail(
        "token",
        found,
        "give all hosts one token, and restart nodes and engines that have another: what these "
        "nodes hold is a miss here",
    )


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:NAMED_MAX]) + (", …" if len(nodes) > NAMED_MAX else "")


def _try_handshake(info: NodeInfo, token: str | None) -> None:
    """Connect to the node and do the handshake.

    Raises:
        NodeRefused: the node refuses the token.
        LookupBufferError, OSError, ValueError: the node is not reached, or another program listens
            there.
    """
    from lookup_buffer.protocol.auth import request_handshake

    host, _, port = info.endpoint.removeprefix("tcp://").rpartition(":")
    if host.startswith(LOOPBACK) and info.host != socket.gethostname():
        raise ValueError("loopback, of another host")
    stream = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    request_handshake(stream, token=token, timeout=CONNECT_SECONDS).close()


def host_checks(config: "BufferConfig") -> Iterator[Check]:
    """Checks of this host: variables, runtime directory, node and arena."""
    yield from _variable_checks(config)
    if not IS_ORDERED:
        yield warn("index", WITHOUT_ORDER, "expect slower lookups; only x86-64 is supported")
    try:
        path = config.socket_path()
        yield _directory_check(config, path)
    except (ConfigError, OSError) as error:
        yield fail(
            "directory",
            str(error),
            "chmod 700 it if it is yours, or choose another with --directory",
        )
        return
    if is_listening(path):
        yield from _node_checks(config, path)
    else:
        yield warn(
            "node",
            f"no node answers at {path}",
            "run `lookup-buffer serve`; a client also starts one where node_socket is not set",
        )
        yield _planned_arena_check(config)


def _variable_checks(config: "BufferConfig") -> Iterator[Check]:
    """Warnings of misspelt variables. Unknown ones are allowed: they may be another program's."""
    for variable, meant in misspelt_variables(type(config).model_fields).items():
        yield warn("variables", f"{variable} is set, but is not a setting", f"is {meant} meant?")


def _directory_check(config: "BufferConfig", path: Path) -> Check:
    directory = config.runtime_directory()
    # The longest path of a socket in the directory.
    longest = max(len(os.fsencode(path)), len(os.fsencode(directory / "valkey" / "server.sock")))
    if longest > SOCKET_PATH_BYTES_MAX:
        return fail(
            "directory",
            f"{directory}: the path of a socket in it has {longest} bytes, the system allows "
            f"{SOCKET_PATH_BYTES_MAX}",
            "choose a shorter --directory",
        )
    return ok("directory", f"{directory}, mode 0700")


def _node_checks(config: "BufferConfig", path: Path) -> Iterator[Check]:
    try:
        facts = node_facts(path, {})
    except LookupBufferError as error:
        yield fail("node", str(error), "restart it; its log is node.log")
        return
    stats = facts["stats"]
    yield ok("node", f"{facts['node']} answers at {path}")
    if not stats.get("store_up", 1):
        yield fail(
            "node's store",
            "the node does not reach its store",
            "start the server; the node connects again by itself",
        )
    try:
        node_facts(path, config.expectations())
        yield ok("node's settings", "equal this configuration")
    except NodeRefused as error:
        yield warn("node's settings", str(error), "clients with this configuration are refused")
    except LookupBufferError as error:
        yield fail("node's settings", str(error), "restart the node")
    yield arena_check(stats["capacity_bytes"])
    yield ok(
        "arena in use",
        f"{stats['items']} items, {size_text(stats['used_bytes'])} of "
        f"{size_text(stats['capacity_bytes'])}",
    )


def arena_check(capacity_bytes: int) -> Check:
    """The arena against all memory of the machine."""
    from lookup_buffer.config import memory_bytes

    memory = memory_bytes()
    found = f"{size_text(capacity_bytes)} of {size_text(memory)} memory"
    if capacity_bytes > memory:
        return fail("arena", found, "lower capacity_bytes: the node would be killed")
    if capacity_bytes > ARENA_PART_MAX * memory:
        return warn("arena", found, "lower capacity_bytes: too little is left for engines")
    return ok("arena", found)


def _planned_arena_check(config: "BufferConfig") -> Check:
    """The arena of a node that does not run yet: free memory is checked too."""
    check = arena_check(config.capacity_bytes)
    free = available_bytes()
    if check.advice or free is None or config.capacity_bytes <= free:
        return check
    return warn(
        "arena",
        f"{size_text(config.capacity_bytes)}, but only {size_text(free)} of memory are free",
        "lower capacity_bytes, or end other programs first",
    )


def available_bytes() -> int | None:
    """Memory that programs can still allocate; None if the system does not report it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # another kernel: unknown
    return None


def node_facts(path: Path, expects: Mapping[str, str | int]) -> dict[str, Any]:
    """Open a session with the expectations `expects`, and end it. Returns node, boot and stats.

    Raises:
        NodeRefused: the node has another configuration.
        NodeUnavailable: no answer in time.
    """
    from lookup_buffer.client.session import NodeConnection, next_request_id
    from lookup_buffer.protocol.messages import VERSION, Goodbye, Hello, Stats

    deadline = time.monotonic() + ANSWER_SECONDS
    connection = NodeConnection(path, timeout=ANSWER_SECONDS)
    try:
        hello = Hello(next_request_id(), VERSION, None, dict(expects))
        connection.send(hello, deadline=deadline)
        welcome, descriptors = connection.receive_with_descriptors(deadline)
        for descriptor in descriptors:  # of the node's memory, unused here
            os.close(descriptor)
        reply = connection.call(Stats(next_request_id()), ANSWER_SECONDS)
        connection.send_now(Goodbye(next_request_id()))
    finally:
        connection.close()
    return {"node": welcome["node"], "boot": welcome["boot"], "stats": reply["stats"]}
