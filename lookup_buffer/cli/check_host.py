"""Checks of this host: variables, runtime directory, node, and memory for its arena.

Called by `doctor`.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookup_buffer.cli.check import Check, fail, ok, warn
from lookup_buffer.environment import misspelt_variables
from lookup_buffer.errors import ConfigError, LookupBufferError, NodeRefused
from lookup_buffer.inspection.access import is_listening
from lookup_buffer.inspection.records import size_text
from lookup_buffer.shm.index import IS_ORDERED, WITHOUT_ORDER

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig

ANSWER_SECONDS = 2.0
SOCKET_PATH_BYTES_MAX = 107
ARENA_PART_MAX = 0.75
"""Largest part of the machine's memory for an arena; a larger one leaves engines too little."""


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
    directory = config.runtime_directory(make=False)
    # The longest path of a socket in the directory.
    longest = max(len(os.fsencode(path)), len(os.fsencode(directory / "valkey" / "server.sock")))
    if longest > SOCKET_PATH_BYTES_MAX:
        return fail(
            "directory",
            f"{directory}: the path of a socket in it has {longest} bytes, the system allows "
            f"{SOCKET_PATH_BYTES_MAX}",
            "choose a shorter --directory",
        )
    if not directory.exists():
        return ok("directory", f"{directory}, which the node makes when it starts")
    return ok("directory", f"{directory}, mode 0700")


def _node_checks(config: "BufferConfig", path: Path) -> Iterator[Check]:
    try:
        facts = node_facts(path, {}, config.node_uid)
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
        node_facts(path, config.expectations(), config.node_uid)
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


def node_facts(
    path: Path, expects: Mapping[str, str | int], node_uid: int | None
) -> dict[str, Any]:
    """Open a session with the expectations `expects`, and end it. Returns node, boot and stats.

    Raises:
        NodeRefused: the node has another configuration, or runs as a user that is not trusted.
        NodeUnavailable: no answer in time.
    """
    from lookup_buffer.client.session import NodeConnection, next_request_id
    from lookup_buffer.protocol.messages import VERSION, Goodbye, Hello, Stats

    deadline = time.monotonic() + ANSWER_SECONDS
    connection = NodeConnection(path, ANSWER_SECONDS, node_uid=node_uid)
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
