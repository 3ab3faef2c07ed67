"""What `doctor` asks of the store: the client library, the server, the nodes that beat there."""

import statistics
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lookup_buffer.cli.access import opened_store, shown_url
from lookup_buffer.cli.checks import Check, Verdict, fail, ok, warn
from lookup_buffer.cli.exits import CommandError, ExitCode
from lookup_buffer.cli.fleet_checks import fleet_checks
from lookup_buffer.cli.output import size_text
from lookup_buffer.errors import ConfigError
from store import EmbeddedServerError, MetadataStore, ServerInfo, StoreError, layout
from store.embedded import find_server
from store.url import parse

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig
    from store.inspection import Inspection

OLDEST = {"redis": (7, 0), "valkey": (8, 0)}
MEMORY_PART_MAX = 0.8
RECORDS_MAX = 10_000
"""Records looked at; the server names them in no order, so they stand for all."""
NAMED_MAX = 5
PINGS = 5
CLOCK_SECONDS_MAX = 2.0
PING_SECONDS_MAX = 0.005
"""A look-up is one round trip; slower than this a hit is no longer nearly free."""


def store_checks(config: "BufferConfig") -> Iterator[Check]:
    yield from _client()
    access = config.store_access()
    try:
        access.check_files()
    except ConfigError as error:
        yield fail("store", str(error), "correct the file, or the URL")
        return
    try:
        with opened_store(access) as store:
            store.ping()
            yield ok("store", f"{shown_url(access)} answers")
            yield from _answering(config, store)
    except CommandError as error:
        if error.code is ExitCode.UNREACHABLE:  # the embedded one, which a node would start
            yield _embedded(str(error))
        # Else it is the directory's fault, which the checks of this host explain.
    except ConfigError:
        pass  # likewise
    except StoreError as error:
        yield fail(
            "store",
            str(error),
            "start the server, or correct the URL, password, certificates or firewall",
        )


def _embedded(found: str) -> Check:
    """Of the embedded server, which does not run."""
    try:
        find_server()
    except EmbeddedServerError as error:
        return fail("store", str(error), "a node starts without, and shares nothing")
    return warn("store", found, "it starts with the node")


def _client() -> Iterator[Check]:
    try:
        yield ok("store client", f"hiredis {version('hiredis')}")
    except PackageNotFoundError:
        yield fail("store client", "hiredis is not installed", "pip install hiredis")


def _answering(config: "BufferConfig", store: MetadataStore) -> Iterator[Check]:
    """Checks of a store that answers. What makes the later ones pointless is the last of them."""
    inspection = _inspection(store)
    try:
        info = store.server_info()
    except StoreError:
        info = None  # not allowed to ask, as the next check will tell
    if info is not None:
        first = (mode_check(config.store_url, info), version_check(info))
        yield from first
        if any(check.verdict is Verdict.FAIL for check in first):
            return
    rights = rights_check(inspection)
    yield rights
    if info is not None and rights.verdict is Verdict.OK:
        yield from _server(config, store, info)
        yield from clock_check(inspection.clock_ahead_seconds())
        yield records_check(inspection)
        yield nodes_check(inspection)
        token = config.token.get_secret_value() if config.token else None
        yield from fleet_checks(store, token)


def mode_check(url: str, info: ServerInfo) -> Check:
    """Whether the URL names the server as what it is."""
    topology = "standalone" if url == "embedded" else parse(url).topology
    if (topology == "cluster") == (info.mode == "cluster") and info.mode != "sentinel":
        return ok("store mode", topology)
    return fail(
        "store mode",
        f"the URL says {topology}, the server runs as {info.mode or 'unknown'}",
        "name a cluster by redis-cluster://host,host, the sentinels by "
        "redis-sentinel://host,host/service",
    )


def _server(config: "BufferConfig", store: MetadataStore, info: ServerInfo) -> Iterator[Check]:
    yield policy_check(info)
    yield memory_check(info)
    seconds = statistics.median(store.ping() for _ in range(PINGS))
    found = f"{seconds * 1000:.2f} ms for one round trip"
    if seconds > config.store_timeout_seconds / 2:
        yield fail(
            "store latency",
            f"{found}, store_timeout_seconds is {config.store_timeout_seconds:g}",
            "bring the server nearer, or raise store_timeout_seconds",
        )
    elif seconds > PING_SECONDS_MAX:
        yield warn("store latency", found, "bring the server nearer: each look-up takes so long")
    else:
        yield ok("store latency", found)


def _inspection(store: MetadataStore) -> "Inspection":
    from store.redis_store import RedisStore  # slow to import, and by now it is

    assert isinstance(store, RedisStore)  # all that a node may be configured with
    return store.inspection()


def rights_check(inspection: "Inspection") -> Check:
    """All commands that a node needs, tried."""
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


def records_check(inspection: "Inspection") -> Check:
    """Records of another version, or written by hand, are a miss to every node."""
    examined = inspection.examine_records(RECORDS_MAX)
    found = f"looked at: {examined.looked_at}"
    if not examined.unreadable:
        return ok("records", found)
    named = [f"{name} ({why})" for name, why in examined.unreadable.items()][:NAMED_MAX]
    if (more := len(examined.unreadable) - len(named)) > 0:
        named.append(f"and {more} more")
    return warn(
        "records",
        f"{found}; nobody can read: {len(examined.unreadable)}: {', '.join(named)}",
        "UNLINK what was written by hand; those of another version expire by themselves",
    )


def nodes_check(inspection: "Inspection") -> Check:
    """Where something foreign stands in their place, nodes cannot say that they live, or where."""
    foreign = inspection.foreign_nodes()
    if not foreign:
        return ok("nodes", "their keys are theirs")
    named = ", ".join(f"{name} is a {kind}" for name, kind in list(foreign.items())[:NAMED_MAX])
    verdict = Verdict.FAIL if layout.NODES in foreign else Verdict.WARN
    return Check("nodes", verdict, f"not theirs: {named}", f"UNLINK it: {' '.join(foreign)}")


def version_check(info: ServerInfo) -> Check:
    found = f"{info.product} {info.version}"
    oldest = OLDEST.get(info.product)
    wanted = "use Redis 7.0 or newer, or Valkey 8 or newer"
    if oldest is None:
        return warn("store version", f"{found} was never tried", wanted)
    if version_tuple(info.version) < oldest:
        return fail("store version", f"{found} is too old", wanted)
    return ok("store version", found)


def policy_check(info: ServerInfo) -> Check:
    """Records may be evicted; the beats of nodes and claims must not go at random."""
    advice = "CONFIG SET maxmemory-policy volatile-lru, and in the server's configuration file"
    if "random" in info.policy or info.policy == "volatile-ttl":
        return fail(
            "store policy", f"{info.policy} evicts what is in use as soon as what is not", advice
        )
    if info.policy == "noeviction":
        found = "noeviction: a full server refuses new records, and renewals until records expire"
        return warn("store policy", found, advice)
    if info.policy.startswith("allkeys-"):
        found = f"{info.policy} may also evict what never expires, as the list of nodes"
        return warn("store policy", found, advice)
    return ok("store policy", info.policy)


def memory_check(info: ServerInfo) -> Check:
    used = size_text(info.used_memory_bytes)
    if info.maxmemory_bytes == 0:
        return warn(
            "store memory",
            f"{used} in use, and no limit",
            "CONFIG SET maxmemory 256mb: without a limit the server never evicts",
        )
    found = f"{used} of {size_text(info.maxmemory_bytes)} in use"
    if info.used_memory_bytes > MEMORY_PART_MAX * info.maxmemory_bytes:
        return warn("store memory", found, "raise maxmemory")
    return ok("store memory", found)


def clock_check(ahead_seconds: float | None) -> Iterator[Check]:
    """Nothing rests on clocks but what is told to people; nothing is told where we may not ask."""
    if ahead_seconds is None:
        return
    found = (
        f"{abs(ahead_seconds):.1f} s {'ahead of' if ahead_seconds > 0 else 'behind'} this host's"
    )
    if abs(ahead_seconds) > CLOCK_SECONDS_MAX:
        yield warn(
            "store clock",
            f"the server's clock is {found}",
            "let both hosts follow one time server: ages in `ls`, `show` and `why` are wrong else",
        )
    else:
        yield ok("store clock", found)


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (7, 0, 15) of `7.0.15-rc1`."""
    numbers = []
    for piece in text.split("."):
        digits = piece[: len(piece) - len(piece.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
