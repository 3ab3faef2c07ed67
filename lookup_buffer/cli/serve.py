"""`lookup-buffer serve`: be this host's node, in the foreground, until told to stop.

The node runs on the main thread.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lookup_buffer.cli.access import answers, shown_url
from lookup_buffer.cli.exits import CommandError, ExitCode
from lookup_buffer.cli.options import (
    Directory,
    StorePasswordFile,
    StoreSentinelPasswordFile,
    StoreUrl,
    configure,
)

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig
    from lookup_buffer.node.node import Node

StoreSeconds = Annotated[float | None, typer.Option(help="Bound on one call to the store.")]
LeaseSeconds = Annotated[
    float | None, typer.Option(help="How long a taker may keep a hand-off from others.")
]
NodeSocket = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Unix socket for clients, elsewhere than in DIR."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the secret that the fleet's nodes share."),
]
HttpListen = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="http://host:port for /metrics and /healthz."),
]
HttpTokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the secret that who reads /metrics sends."),
]
LogLevel = Annotated[
    str | None, typer.Option(metavar="LEVEL", help="error, warning; info: each hand-off taken.")
]


def serve(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file of settings, named as in BufferConfig."),
    ] = None,
    store_url: StoreUrl = None,
    store_password_file: StorePasswordFile = None,
    store_sentinel_password_file: StoreSentinelPasswordFile = None,
    store_timeout_seconds: StoreSeconds = None,
    mirror: Annotated[
        bool | None,
        typer.Option(help="Keep what the store said, corrected by its push; or ask each time."),
    ] = None,
    capacity_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of the arena, as 8GiB.")
    ] = None,
    directory: Directory = None,
    node_socket: NodeSocket = None,
    node_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Name of the node; none: made from the host's.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="tcp://host:port for other nodes.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address that other nodes are told.")
    ] = None,
    token_file: TokenFile = None,
    http_listen: HttpListen = None,
    http_token_file: HttpTokenFile = None,
    record_ttl_seconds: Annotated[
        float | None, typer.Option(help="How long a record lives that nobody renews.")
    ] = None,
    handoff_lease_seconds: LeaseSeconds = None,
    log_level: LogLevel = None,
    idle_exit_seconds: Annotated[
        float | None, typer.Option(help="End when no client was there for so long; else never.")
    ] = None,
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
        store_url=store_url,
        store_timeout_seconds=store_timeout_seconds,
        mirror=mirror,
        capacity_bytes=capacity_bytes,
        directory=directory,
        node_socket=node_socket,
        node_id=node_id,
        listen=listen,
        advertise=advertise,
        http_listen=http_listen,
        record_ttl_seconds=record_ttl_seconds,
        handoff_lease_seconds=handoff_lease_seconds,
        log_level=log_level,
        idle_exit_seconds=idle_exit_seconds,
    )
    try:
        _run(settings, ends_when_idle=idle_exit_seconds is not None)
    except OSError as error:
        raise CommandError(f"the node cannot run: {error}", ExitCode.USAGE) from error


def _run(config: "BufferConfig", *, ends_when_idle: bool) -> None:
    from lookup_buffer.errors import NodeUnavailable
    from lookup_buffer.launch import lock
    from lookup_buffer.node.main import LOCK_SECONDS
    from lookup_buffer.node.node import Node

    directory, path = config.runtime_directory(), config.socket_path()
    if answers(path):
        raise _taken(directory, path)
    try:
        with lock(directory / "node.lock", timeout=LOCK_SECONDS):
            node = Node(config, ends_when_idle=ends_when_idle)
            node.run(path, lambda: _announce(node, path, shown_url(config)))
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
