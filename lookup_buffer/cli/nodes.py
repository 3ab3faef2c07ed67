"""`lookup-buffer nodes`: the nodes of the fleet, which are alive, and how full they are.

Reads the store only, on the main thread. A node is alive if its description is younger than 2 s.
The heartbeats of the others are read for 2 s at most.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click

from lookup_buffer.cli.options import of_store, store_access
from lookup_buffer.cli.output import print_json, print_line, print_table
from lookup_buffer.inspection.access import opened_store
from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from lookup_buffer.inspection.records import size_text
from store import Beat, NodeInfo


@click.command()
@of_store
def nodes(
    store_url: str | None,
    store_password_file: Path | None,
    directory: Path | None,
    json: bool,
) -> None:
    """List nodes: which are alive, and how full they are.

    A node that was silent for 2 s is not alive. Takes so long only if there is one.
    """
    access = store_access(store_url, store_password_file, directory)
    with opened_store(access, "nodes", browsed=False) as store:
        monitor = store.run(HeartbeatMonitor.begin(store.store))
        store.run(monitor.note_fresh(sorted(monitor.last)))
        store.run(monitor.wait())
        infos = store.node_infos(sorted(monitor.last))
    found = [
        _facts(node, beat, infos.get(node), monitor.alive(node))
        for node, beat in sorted(monitor.last.items())
    ]
    if json:
        print_json({"nodes": found})
    elif not found:
        print_line("no nodes: none has joined this store, or all have left it")
    else:
        _print(found)


def _facts(node: str, beat: Beat, info: NodeInfo | None, alive: bool) -> dict[str, Any]:
    """The stable JSON form of a node. Without a description (`info`) its fields are null."""
    if info is None:
        described = dict.fromkeys(field.name for field in fields(NodeInfo))
    else:
        described = asdict(info) | {"pools": [pool.text for pool in info.pools]}
    return {**described, "node": node, "boot": beat.boot, "alive": alive}


def _print(found: list[dict[str, Any]]) -> None:
    rows = []
    for facts in found:
        row = [facts["node"], "yes" if facts["alive"] else "no"]
        if facts["host"] is None:
            rows.append([*row, *["-"] * 6])
            continue
        rows.append(
            [
                *row,
                facts["host"],
                facts["endpoint"].removeprefix("tcp://"),  # of tls:// all is shown
                facts["version"],
                str(facts["items"]),
                size_text(facts["used_bytes"]),
                size_text(facts["capacity_bytes"]),
            ]
        )
    numeric = ("ITEMS", "USED", "OF")
    print_table(["NODE", "ALIVE", "HOST", "ENDPOINT", "VERSION", *numeric], rows, numeric=numeric)
