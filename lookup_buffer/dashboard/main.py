"""The dashboard's process, which a node with `http_listen` starts: page, `/metrics`, `/healthz`.

Standard input is one line, `Start` as JSON: secrets must not be on a command line. The process
listens on a socket that the node has bound and hands down. It asks the node over its unix socket
and reads the store; so what it computes delays no client. It ends when its input ends, as the node
has ended.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from lookup_buffer.config import BufferConfig
from lookup_buffer.dashboard.app import make_app
from lookup_buffer.dashboard.exposition import Exposition
from lookup_buffer.dashboard.feed import Feed
from lookup_buffer.dashboard.http import server_of
from lookup_buffer.dashboard.node import NodeView
from lookup_buffer.inspection.access import CALL_SECONDS_MIN
from lookup_buffer.runtime import start_log
from store import MetadataStore


@dataclass(frozen=True, slots=True)
class Start:
    """What the process is told (by `node/http.py`). `settings` are those of the node."""

    node: str
    node_pid: int
    socket_path: str
    listener: int
    """The descriptor of the listening socket."""
    settings: dict[str, Any] = field(repr=False)


def main() -> None:
    start = Start(**json.loads(sys.stdin.readline()))
    config = BufferConfig.of(start.settings)
    start_log(config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    asyncio.run(serve(start, config))


async def serve(start: Start, config: BufferConfig) -> None:
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), os._exit, 0)  # the node has ended

    def open_store() -> MetadataStore:
        access = config.store_access()
        name = f"{start.node}:dashboard"
        return access.open_async(access.actual_url(), CALL_SECONDS_MIN, name=name)

    feed = Feed(start.node, open_store)
    app = make_app(
        NodeView(Path(start.socket_path)),
        Exposition(start.node, start.node_pid),
        feed,
        config.read_http_token(),
    )
    await run(server_of(app), feed, socket.socket(fileno=start.listener))


async def run(server: uvicorn.Server, feed: Feed, listener: socket.socket) -> None:
    """Serve on `listener`, which it closes, and sample, until the server is told to exit."""
    try:
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(feed.run())
            await server.serve(sockets=[listener])
            sampling.cancel()
    finally:
        await feed.close()
