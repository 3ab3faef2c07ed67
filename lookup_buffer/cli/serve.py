"""`lookup-buffer serve`: run this host's node in the foreground until SIGTERM or Ctrl-C.

The node runs on the main thread. Raises a CommandError if another node runs in the directory.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookup_buffer.cli.options import (
    FILE,
    configure,
    directory,
    store_password_file,
    store_sentinel_password_file,
    store_url,
)
from lookup_buffer.inspection.records import CommandError, ExitCode, answers, shown_url

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig
    from lookup_buffer.node.node import Node


@click.command()
@click.option(
    "--config",
    type=FILE,
    metavar="FILE",
    help="JSON file of settings, named as in BufferConfig.",
)
@store_url
@store_password_file
@store_sentinel_password_file
@click.option("--store-timeout-seconds", type=float, help="Bound on one call to the store.")
@click.option(
    "--mirror/--no-mirror",
    default=None,
    help="Keep what the store said, corrected by its push; or ask each time.",
)
@click.option("--capacity-bytes", metavar="SIZE", help="Size of the arena, as 8GiB.")
@directory
@click.option(
    "--node-socket",
    type=FILE,
    metavar="FILE",
    help="Unix socket for clients, elsewhere than in DIR.",
)
@click.option("--node-id", metavar="ID", help="Name of the node; none: made from the host's.")
@click.option("--listen", metavar="ADDRESS", help="tcp://host:port for other nodes.")
@click.option("--advertise", metavar="ADDRESS", help="Address that other nodes are told.")
@click.option(
    "--token-file",
    type=FILE,
    metavar="FILE",
    help="File with the secret that the fleet's nodes share.",
)
@click.option(
    "--http-listen", metavar="ADDRESS", help="http://host:port for /metrics and /healthz."
)
@click.option(
    "--http-token-file",
    type=FILE,
    metavar="FILE",
    help="File with the secret that who reads /metrics sends.",
)
@click.option(
    "--record-ttl-seconds", type=float, help="How long a record lives that nobody renews."
)
@click.option(
    "--handoff-lease-seconds",
    type=float,
    help="How long a taker may keep a hand-off from others.",
)
@click.option("--log-level", metavar="LEVEL", help="error, warning; info: each hand-off taken.")
@click.option(
    "--idle-exit-seconds",
    type=float,
    help="End when no client was there for so long; else never.",
)
def serve(
    config: Path | None,
    token_file: Path | None,
    http_token_file: Path | None,
    store_password_file: Path | None,
    store_sentinel_password_file: Path | None,
    idle_exit_seconds: float | None,
    **said: Any,
) -> None:
    """Run a node in the foreground.

    It says one line when it answers. SIGTERM or Ctrl-C ends it in good order.
    """
    settings = configure(
        config_file=config,
        token_file=token_file,
        http_token_file=http_token_file,
        store_password_file=store_password_file,
        store_sentinel_password_file=store_sentinel_password_file,
        **said,
        idle_exit_seconds=idle_exit_seconds,
    )
    try:
        _run(settings, ends_when_idle=idle_exit_seconds is not None)
    except OSError as error:
        raise CommandError(f"the node cannot run: {error}", ExitCode.USAGE) from error


def _run(config: "BufferConfig", *, ends_when_idle: bool) -> None:
    from lookup_buffer.errors import NodeUnavailable
    from lookup_buffer.node.main import LOCK_SECONDS
    from lookup_buffer.node.node import Node
    from lookup_buffer.runtime import lock

    directory, path = config.runtime_directory(), config.socket_path()
    if answers(path):
        raise _taken(directory, path)
    try:
        with lock(directory / "node.lock", timeout=LOCK_SECONDS):
            node = Node(config, ends_when_idle=ends_when_idle)
            node.run(path, lambda: _announce(node, path, shown_url(config.store_access())))
    except NodeUnavailable as error:
        raise _taken(directory, path) from error


def _taken(directory: Path, path: Path) -> CommandError:
    return CommandError(
        f"a node already runs in {directory} (socket {path}); end it, or choose another place by "
        "--directory",
        ExitCode.USAGE,
    )


def _announce(node: "Node", path: Path, store: str) -> None:
    identity = node.identity
    line = f"node {identity.node} is ready: socket {path}, endpoint {identity.endpoint}"
    if node.http_address is not None:
        line += f", dashboard {node.http_address}/, metrics {node.http_address}/metrics"
    sys.stdout.write(f"{line}, store {store}\n")
    sys.stdout.flush()
