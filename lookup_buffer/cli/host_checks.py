"""What `doctor` asks of this host: variables, runtime directory, node, memory for its arena."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookup_buffer.cli.access import answers
from lookup_buffer.cli.checks import Check, fail, ok, warn
from lookup_buffer.cli.output import size_text
from lookup_buffer.environment import misspelt_variables
from lookup_buffer.errors import ConfigError, LookupBufferError, NodeRefused

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig

ANSWER_SECONDS = 2.0
SOCKET_PATH_BYTES_MAX = 107
MEMORY_PART_MAX = 0.75
"""An arena that takes more of the machine leaves engines too little."""


def host_checks(config: "BufferConfig") -> Iterator[Check]:
    yield from _variables(config)
    try:
        path = config.socket_path()
        yield _directory(config, path)
    except (ConfigError, OSError) as error:
        yield fail(
            "directory", str(error), "chmod 700 it if it is yours, or name another by --directory"
        )
        return
    if answers(path):
        yield from _node(config, path)
    else:
        yield warn(
            "node",
            f"no node answers at {path}",
            "run `lookup-buffer serve`; a client also starts one where node_socket is not set",
        )
        yield _room(config)


def _variables(config: "BufferConfig") -> Iterator[Check]:
    """Others are not refused, for they need not be ours; so who misspells one is told here."""
    for variable, meant in misspelt_variables(type(config).model_fields).items():
        yield warn("variables", f"{variable} is set, and no setting", f"is {meant} meant?")


def _directory(config: "BufferConfig", path: Path) -> Check:
    directory = config.runtime_directory()
    # The longest of the sockets in it.
    longest = max(len(os.fsencode(path)), len(os.fsencode(directory / "valkey" / "server.sock")))
    if longest > SOCKET_PATH_BYTES_MAX:
        return fail(
            "directory",
            f"{directory}: the path of a socket in it has {longest} bytes, the system allows "
            f"{SOCKET_PATH_BYTES_MAX}",
            "choose a shorter --directory",
        )
    return ok("directory", f"{directory}, mode 0700")


def _node(config: "BufferConfig", path: Path) -> Iterator[Check]:
    try:
        facts = ask_node(path, {})
    except LookupBufferError as error:
        yield fail("node", str(error), "end it and start it again; its log is node.log")
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
        ask_node(path, config.expectations())
        yield ok("node's settings", "are those of this configuration")
    except NodeRefused as error:
        yield warn("node's settings", str(error), "clients with this configuration are refused")
    except LookupBufferError as error:
        yield fail("node's settings", str(error), "end it and start it again")
    yield arena_check(stats["capacity_bytes"])
    yield ok(
        "arena in use",
        f"{stats['items']} items, {size_text(stats['used_bytes'])} of "
        f"{size_text(stats['capacity_bytes'])}",
    )


def arena_check(capacity_bytes: int) -> Check:
    """The arena against all the memory there is."""
    from lookup_buffer.config import memory_bytes

    memory = memory_bytes()
    found = f"{size_text(capacity_bytes)} of {size_text(memory)} memory"
    if capacity_bytes > memory:
        return fail("arena", found, "lower capacity_bytes: the node would be killed")
    if capacity_bytes > MEMORY_PART_MAX * memory:
        return warn("arena", found, "lower capacity_bytes: it leaves engines too little")
    return ok("arena", found)


def _room(config: "BufferConfig") -> Check:
    """For a node that is still to be started, what is free counts too."""
    check = arena_check(config.capacity_bytes)
    free = available_bytes()
    if check.advice or free is None or config.capacity_bytes <= free:
        return check
    return warn(
        "arena",
        f"{size_text(config.capacity_bytes)}, while {size_text(free)} of memory are free",
        "lower capacity_bytes, or end other programs first",
    )


def available_bytes() -> int | None:
    """Of memory that programs may still take; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # another kernel; nothing is known then
    return None


def ask_node(path: Path, expects: Mapping[str, str | int]) -> dict[str, Any]:
    """Open a session that expects so much, and end it: node, boot, and its stats.

    Raises:
        NodeRefused: the node has another configuration.
        NodeUnavailable: no answer in time.
    """
    from lookup_buffer.channel import Channel, next_request_id
    from lookup_buffer.protocol.messages import VERSION, Goodbye, Hello, Stats

    deadline = time.monotonic() + ANSWER_SECONDS
    channel = Channel(path, timeout=ANSWER_SECONDS)
    try:
        hello = Hello(next_request_id(), VERSION, None, dict(expects))
        channel.send(hello, deadline=deadline)
        welcome, descriptors = channel.receive_with_descriptors(deadline)
        for descriptor in descriptors:  # of its memory, which we do not read
            os.close(descriptor)
        reply = channel.call(Stats(next_request_id()), ANSWER_SECONDS)
        channel.send_now(Goodbye(next_request_id()))
    finally:
        channel.close()
    return {"node": welcome["node"], "boot": welcome["boot"], "stats": reply["stats"]}
