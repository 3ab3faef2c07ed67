"""The node's process: reads its settings as JSON from standard input and serves until it is
stopped.

Started by `runtime.py` (for an engine) and by `lookup-buffer serve`. With `--detach` it first
leaves its parent's process tree, see `runtime`. Runs on the main thread, which becomes the loop's
thread. Exit codes: 0 stopped or idle; 1 a part did not stop within `node.END_SECONDS`; 2 the
configuration is wrong, or another node already serves this directory.
"""

import json
import logging
import os
import resource
import sys
from contextlib import suppress
from typing import Any

from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError, NodeUnavailable
from lookup_buffer.node.node import Node
from lookup_buffer.runtime import lock
from lookup_buffer.shm.index import IS_ORDERED, WITHOUT_ORDER

_log = logging.getLogger(__name__)

LOCK_SECONDS = 5.0
"""How long to wait for the lock on the directory: a node that is shutting down releases it
within this time."""
DESCRIPTORS = 65_536
"""A connection of another node takes two, and the usual limit of 1,024 is for programs that use
`select`."""


def serve(config: BufferConfig, *, ends_when_idle: bool) -> int:
    """Run the node of the configured directory until it is stopped. Returns the exit code."""
    _allow_descriptors()
    directory = config.runtime_directory()
    if not IS_ORDERED:
        _log.warning("lookup buffer: %s", WITHOUT_ORDER)
    try:
        with lock(directory / "node.lock", timeout=LOCK_SECONDS):
            node = Node(config, ends_when_idle=ends_when_idle)
            node.run(config.socket_path())
    except (ConfigError, NodeUnavailable) as error:
        sys.stderr.write(f"lookup-buffer: {error}\n")
        return 2
    return 0


def _allow_descriptors() -> None:
    """As many as this process may allow itself, up to DESCRIPTORS."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    if resource.RLIM_INFINITY != allowed < wanted:
        with suppress(ValueError, OSError):  # a container's rules
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None  # no cause is chained: the text may hold secrets
    if not isinstance(settings, dict):
        raise ConfigError("standard input is not a JSON object of settings")
    return settings


def main() -> None:
    detach = "--detach" in sys.argv[1:]
    try:
        config = BufferConfig.of(_settings(sys.stdin.read()))
    except ConfigError as error:
        sys.stderr.write(f"lookup-buffer: {error}\n")
        sys.exit(2)
    if detach and os.fork():
        os._exit(0)  # vLLM kills its whole process tree; an orphan is not in it
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # vLLM binds its workers to one core
    os.chdir("/")
    sys.exit(serve(config, ends_when_idle=detach))


if __name__ == "__main__":
    main()
