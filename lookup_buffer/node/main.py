"""The node's process: reads its configuration as JSON from standard input and serves.

With `--detach` it leaves its parent first; see `runtime`. Exit codes: 0 told to end, or
idle; 1 a part of it did not stop in time (see `node.END_SECONDS`); 2 the configuration is wrong, or
another node serves here already.
"""

import json
import os
import sys
from typing import Any

from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError, NodeUnavailable
from lookup_buffer.node.node import Node
from lookup_buffer.runtime import lock

LOCK_SECONDS = 5.0
"""A node that is just ending gives its lock up within so long."""


def serve(config: BufferConfig, *, ends_when_idle: bool) -> int:
    """Be the node of the configured directory until told to stop; the answer is the exit code."""
    directory = config.runtime_directory()
    try:
        with lock(directory / "node.lock", timeout=LOCK_SECONDS):
            node = Node(config, ends_when_idle=ends_when_idle)
            node.run(config.socket_path())
    except (ConfigError, NodeUnavailable) as error:
        sys.stderr.write(f"lookup-buffer: {error}\n")
        return 2
    return 0


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None  # and no cause: the text may hold secrets
    if not isinstance(settings, dict):
        raise ConfigError("standard input is no JSON map of settings")
    return settings


def main() -> None:
    detach = "--detach" in sys.argv[1:]
    try:
        config = BufferConfig.of(_settings(sys.stdin.read()))
    except ConfigError as error:
        sys.stderr.write(f"lookup-buffer: {error}\n")
        sys.exit(2)
    if detach and os.fork():
        os._exit(0)  # vLLM ends its whole process tree; an orphan is not in it
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # vLLM binds its workers to one core
    os.chdir("/")
    sys.exit(serve(config, ends_when_idle=detach))


if __name__ == "__main__":
    main()
