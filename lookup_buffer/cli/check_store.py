"""Checks of the store: client library, server, rights, eviction policy, memory, latency, clock,
records, and the keys of nodes.

Called by `doctor`.
"""

import statistics
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lookup_buffer.access import EMBEDDED
from lookup_buffer.cli.check import NAMED_MAX, Check, Verdict, fail, ok, warn
from lookup_buffer.cli.check_fleet import fleet_checks
from lookup_buffer.errors import ConfigError
from lookup_buffer.inspection.access import CommandError, ExitCode, opened_store, shown_url
from lookup_buffer.inspection.records import size_text
from store import (
    BlockingStore,
    EmbeddedServerError,
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
    yield from fleet_checks(store, config)


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
    rights = rights_check(inspection, read_only=config.read_only, mirrored=config.mirrored)
    yield rights
    if info is not None and rights.verdict is not Verdict.FAIL:
        yield policy_check(info)
        yield memory_check(info)
        yield _latency_check(config, store)
        yield from clock_check(inspection.clock_ahead_seconds())
        yield records_check(inspection)
        yield nodes_check(inspection)
        yield from fleet_checks(store, config)


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


def rights_check(inspection: "BlockingInspection", *, read_only: bool, mirrored: bool) -> Check:
    """Whether the server allows all commands that a node needs; and one that only reads no more."""
    refused = inspection.refused(read_only=read_only, mirrored=mirrored)
    more = inspection.allowed_beyond_reads(mirrored=mirrored) if read_only else ()
    if refused is None and more:
        return warn(
            "store rights",
            f"'read_only' is set, and the user may do more than read: {', '.join(more)}",
            "give it the user for nodes that only read in docs/redis-keys.md",
        )
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
