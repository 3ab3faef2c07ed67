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
from lookup_buffer.inspection.access import (
    CommandError,
    ExitCode,
    is_listening,
    shown_url,
)

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig
    from lookup_buffer.node.main import Node


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
@click.option(
    "--store-credential-provider",
    metavar="IMPORT_PATH",
    help="package.module:attribute of a redis-py CredentialProvider.",
)
@click.option("--store-timeout-seconds", type=float, help="Bound on one call to the store.")
@click.option(
    "--store-opentelemetry/--no-store-opentelemetry",
    default=None,
    help="Export redis-py's OpenTelemetry metrics.",
)
@click.option(
    "--mirror/--no-mirror",
    default=None,
    help="Cache what the store returns, kept true by its push; or read it each time.",
)
@click.option("--capacity-bytes", metavar="SIZE", help="Size of the arena, as 8GiB.")
@directory
@click.option(
    "--node-socket",
    type=FILE,
    metavar="FILE",
    help="Unix socket for clients, if not in DIR.",
)
@click.option(
    "--node-uid",
    type=int,
    metavar="UID",
    help="For clients: user of the node at that socket, if not theirs and not root.",
)
@click.option("--node-id", metavar="ID", help="Name of the node; default: from the host's name.")
@click.option(
    "--listen", metavar="ADDRESS", help="tcp://host:port or tls://host:port for other nodes."
)
@click.option("--advertise", metavar="ADDRESS", help="Address that other nodes connect to.")
@click.option(
    "--token-file",
    type=FILE,
    metavar="FILE",
    help="File with the secret that the fleet's nodes share.",
)
@click.option(
    "--tls-certificate-file",
    type=FILE,
    metavar="FILE",
    help="Certificate in PEM with the name of this node; for tls:// addresses.",
)
@click.option(
    "--tls-key-file", type=FILE, metavar="FILE", help="Private key of this certificate in PEM."
)
@click.option(
    "--tls-authority-file",
    type=FILE,
    metavar="FILE",
    help="Certificates in PEM of the authorities of all nodes.",
)
@click.option(
    "--read-only/--no-read-only",
    default=None,
    help="Store, take and claim nothing, and write nothing to the store.",
)
@click.option(
    "--http-listen", metavar="ADDRESS", help="http://host:port for /metrics and /healthz."
)
@click.option(
    "--http-token-file",
    type=FILE,
    metavar="FILE",
    help="File with the token for reading /metrics.",
)
@click.option(
    "--record-ttl-seconds", type=float, help="Time to live of a record that is not renewed."
)
@click.option(
    "--handoff-lease-seconds",
    type=float,
    help="Lease of the taker of a hand-off.",
)
@click.option("--log-level", metavar="LEVEL", help="error, warning; info: each hand-off taken.")
@click.option(
    "--idle-exit-seconds",
    type=float,
    help="Exit after so long without a client; default: never.",
)
def serve(
    config: Path | None,
    idle_exit_seconds: float | None,
    **options: Any,
) -> None:
    """Run a node in the foreground.

    Prints one line when it is ready. SIGTERM or Ctrl-C shuts it down cleanly.
    """
    settings = configure(
        config_file=config,
        **options,
        idle_exit_seconds=idle_exit_seconds,
    )
    try:
        _run(settings, ends_when_idle=idle_exit_seconds is not None)
    except OSError as error:
        raise CommandError(f"the node cannot run: {error}", ExitCode.USAGE) from error


def _run(config: "BufferConfig", *, ends_when_idle: bool) -> None:
    from lookup_buffer.errors import NodeUnavailable
    from lookup_buffer.node.main import LOCK_SECONDS, Node
    from lookup_buffer.runtime import lock

    directory, path = config.runtime_directory(), config.socket_path()
    if is_listening(path):
        raise _already_runs(directory, path)
    try:
        with lock(directory / "node.lock", timeout=LOCK_SECONDS):
            node = Node(config, ends_when_idle=ends_when_idle)
            node.run(path, lambda: _print_ready(node, path, shown_url(config.store_access())))
    except NodeUnavailable as error:
        raise _already_runs(directory, path) from error


def _already_runs(directory: Path, path: Path) -> CommandError:
    return CommandError(
        f"a node already runs in {directory} (socket {path}); end it, or choose another "
        "--directory",
        ExitCode.USAGE,
    )


def _print_ready(node: "Node", path: Path, store: str) -> None:
    identity = node.identity
    line = f"node {identity.node} is ready: socket {path}, endpoint {identity.endpoint}"
    if node.http_address is not None:
        line += f", dashboard {node.http_address}/, metrics {node.http_address}/metrics"
    sys.stdout.write(f"{line}, store {store}\n")
    sys.stdout.flush()
