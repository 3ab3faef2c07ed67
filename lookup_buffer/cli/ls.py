"""`lookup-buffer ls`: what is stored, and where."""

from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import typer

from lookup_buffer.cli.access import opened_store
from lookup_buffer.cli.beat_watch import BeatWatch
from lookup_buffer.cli.options import (
    Directory,
    Json,
    OfNamespace,
    StorePasswordFile,
    StoreUrl,
    configure,
)
from lookup_buffer.cli.output import (
    age_since,
    age_text,
    print_json,
    print_line,
    print_table,
    size_text,
)
from lookup_buffer.cli.records import hits_of, nodes_of, nodes_text, tensor_text, to_json
from lookup_buffer.fields import is_fingerprint
from store import MetadataStore, Record

SHOWN_OF_FINGERPRINT = 8


def ls(
    namespace: OfNamespace = None,
    node: Annotated[
        str | None, typer.Option(metavar="ID", help="Only what this node holds.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most so many records; 0: all.")] = 1000,
    store_url: StoreUrl = None,
    store_password_file: StorePasswordFile = None,
    directory: Directory = None,
    json: Json = False,
) -> None:
    """List records: what is stored, and where.

    + before a node: it is alive. - before a node: it has not beaten for 2 s. ~ before a node: it
    offers a hand-off for which it has no room as yet. A terminal cuts long keys, a pipe does not;
    `show` takes the beginning of a key.
    """
    config = configure(
        store_url=store_url, store_password_file=store_password_file, directory=directory
    )
    with opened_store(config) as store:
        watch = BeatWatch(store)
        found = _distinct(store, namespace or "", node)
        records = list(islice(found, limit or None))
        more = bool(limit) and next(found, None) is not None
        hits = hits_of(store, records)
        watch.settle(nodes_of(records))
    records.sort(key=lambda record: (record.namespace, -record.created))
    if json:
        listed = [to_json(record, hits[record.namespace, record.key], watch) for record in records]
        print_json({"records": listed, "truncated": more})
    else:
        _print(records, hits, watch, more)


def _distinct(store: MetadataStore, namespace: str, node: str | None) -> Iterator[Record]:
    """The records that are asked for, each once: a scan may name one twice."""
    seen = set()
    whole = namespace if is_fingerprint(namespace) else None
    for record in store.scan(whole):
        address = (record.namespace, record.key)
        if address in seen or not record.namespace.startswith(namespace):
            continue
        if node is None or any(location.node == node for location in record.locations):
            seen.add(address)
            yield record


def _print(
    records: list[Record], hits: dict[tuple[str, str], int], watch: BeatWatch, more: bool
) -> None:
    if not records:
        print_line("no records")
        return
    columns = ["KEY", "TENSOR", "SIZE", "NODES", "HITS", "AGE"]
    rows = [
        [
            record.key,
            tensor_text(record),
            size_text(record.nbytes),
            nodes_text(record, watch),
            str(hits[record.namespace, record.key]),
            age_text(age_since(record.created)),
        ]
        for record in records
    ]
    if len({record.namespace for record in records}) > 1:
        columns.insert(0, "SPACE")
        for row, record in zip(rows, records, strict=True):
            row.insert(0, record.namespace[:SHOWN_OF_FINGERPRINT])
    print_table(columns, rows, numeric=("SIZE", "HITS", "AGE"), cut=("KEY",))
    if more:
        print_line(f"the first {len(records)} that were found; --limit 0 lists all")
