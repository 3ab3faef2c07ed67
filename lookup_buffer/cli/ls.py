"""`lookup-buffer ls`: which records the store holds, and on which nodes.

Records are read from the store page by page, so the first page is shown at once. Runs on the main
thread; blocks on the store only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import click

from lookup_buffer.cli.options import of_namespace, of_store, seconds_of, size_of, store_access
from lookup_buffer.cli.output import TextTable, print_json_list, print_line
from lookup_buffer.inspection.access import opened_store
from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from lookup_buffer.inspection.records import (
    age_since,
    age_text,
    hits_of,
    nodes_of,
    nodes_text,
    size_text,
    tensor_text,
    to_json,
)
from lookup_buffer.protocol.fields import is_fingerprint
from store import BlockingStore, Record

PAGE_RECORDS = 500
"""Records examined together: half a page of a scan, a few milliseconds."""
SHOWN_OF_FINGERPRINT = 8
COLUMNS = ["KEY", "TENSOR", "SIZE", "NODES", "HITS", "AGE"]
COUNT: Final = click.IntRange(min=0)


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records are listed. None is no bound. Ages are in seconds, sizes in bytes."""

    namespace: str = ""
    """A prefix of the namespace."""
    node: str | None = None
    older_than: float | None = None
    younger_than: float | None = None
    larger_than: int | None = None
    smaller_than: int | None = None
    hits_min: int = 0

    def matches(self, record: Record) -> bool:
        """Whether the record passes the filter; hits are not examined here."""
        age = age_since(record.created)
        return (
            record.namespace.startswith(self.namespace)
            and (self.node is None or any(at.node == self.node for at in record.locations))
            and (self.older_than is None or age > self.older_than)
            and (self.younger_than is None or age < self.younger_than)
            and (self.larger_than is None or record.nbytes > self.larger_than)
            and (self.smaller_than is None or record.nbytes < self.smaller_than)
        )


@dataclass(frozen=True, slots=True)
class Page:
    """Some records, none twice, and their hits by (namespace, key)."""

    records: list[Record]
    hits: dict[tuple[str, str], int]


def pages_of(store: BlockingStore, wanted: RecordFilter) -> Iterator[Page]:
    """All records that pass the filter, in the order of the store's scan. No page is empty."""
    whole = wanted.namespace if is_fingerprint(wanted.namespace) else None
    seen: set[int] = set()  # hashes, since there may be millions
    records = iter(store.scan(whole))
    while page := list(islice(records, PAGE_RECORDS)):
        found = [record for record in _unseen(page, seen) if wanted.matches(record)]
        hits = hits_of(store, found)
        if wanted.hits_min:
            found = [one for one in found if hits[one.namespace, one.key] >= wanted.hits_min]
        if found:
            yield Page(found, hits)


def _unseen(records: Iterable[Record], seen: set[int]) -> Iterator[Record]:
    """The records not returned before: a scan may return one twice."""
    for record in records:
        address = hash((record.namespace, record.key))
        if address not in seen:
            seen.add(address)
            yield record


@click.command()
@of_namespace
@click.option("--node", metavar="ID", help="Only what this node holds.")
@click.option("--older-than", metavar="AGE", help="Only what is older: 30s, 5m, 2h, 1d.")
@click.option("--younger-than", metavar="AGE", help="Only what is younger.")
@click.option("--larger-than", metavar="SIZE", help="Only what is larger: 4096, 8MiB.")
@click.option("--smaller-than", metavar="SIZE", help="Only what is smaller.")
@click.option("--min-hits", type=COUNT, default=0, help="Only what has at least so many hits.")
@click.option(
    "--limit", type=COUNT, default=1000, show_default=True, help="Most records listed; 0: all."
)
@of_store
def ls(
    namespace: str | None,
    node: str | None,
    older_than: str | None,
    younger_than: str | None,
    larger_than: str | None,
    smaller_than: str | None,
    min_hits: int,
    limit: int,
    store_url: str | None,
    store_password_file: Path | None,
    directory: Path | None,
    json: bool,
) -> None:
    """List records: what is stored, and where.

    + before a node: it is alive. - before a node: no heartbeat for 2 s. ~ before a node: it offers
    a hand-off that it has no room for yet. A terminal cuts long keys, a pipe does not; `show` takes
    the beginning of a key. Records are shown page by page, each page sorted by age.
    """
    access = store_access(store_url, store_password_file, directory)
    wanted = RecordFilter(
        namespace or "",
        node,
        seconds_of("--older-than", older_than),
        seconds_of("--younger-than", younger_than),
        size_of("--larger-than", larger_than),
        size_of("--smaller-than", smaller_than),
        min_hits,
    )
    with opened_store(access, "ls") as store:
        listing = _Listing(store, wanted, limit)
        if json:
            print_json_list("records", listing.as_json(), lambda: {"truncated": listing.truncated})
        else:
            listing.print()


class _Listing:
    """One run of the command. `truncated` is valid once all pages have been read."""

    def __init__(self, store: BlockingStore, wanted: RecordFilter, limit: int) -> None:
        self.truncated = False
        self._store = store
        self._monitor = store.run(HeartbeatMonitor.begin(store.store))
        self._checked: set[str] = set()
        self._pages = self._limited(pages_of(store, wanted), limit)

    def as_json(self) -> Iterator[dict[str, object]]:
        for page in self._pages:
            for record in page.records:
                yield to_json(record, page.hits[record.namespace, record.key], self._monitor)

    def print(self) -> None:
        table, spaces, count = None, set[str](), 0
        for page in self._pages:
            count += len(page.records)
            spaces |= {record.namespace for record in page.records}
            columns = [*(["SPACE"] if len(spaces) > 1 else []), *COLUMNS]
            if table is None or table.columns != columns:
                table = TextTable(columns, numeric=("SIZE", "HITS", "AGE"), cut=("KEY",))
            table.print([self._row(record, page, table) for record in page.records])
        if not count:
            print_line("no records")
        elif self.truncated:
            print_line(f"the first {count} that were found; --limit 0 lists all")

    def _limited(self, pages: Iterator[Page], limit: int) -> Iterator[Page]:
        """Up to `limit` records (0: all), each page sorted by age.

        Before a page is yielded, the liveness of its nodes is known.
        """
        left = limit
        for page in pages:
            if limit and not left:
                self.truncated = True
                return
            records = page.records[:left] if limit else page.records
            self.truncated = len(records) < len(page.records)
            left -= len(records)
            records.sort(key=lambda record: (record.namespace, -record.created))
            holders = nodes_of(records) - self._checked
            self._checked |= holders
            self._store.run(self._monitor.wait_unless_fresh(holders))
            yield Page(records, page.hits)
            if self.truncated:
                return

    def _row(self, record: Record, page: Page, table: TextTable) -> list[str]:
        space = [record.namespace[:SHOWN_OF_FINGERPRINT]] if "SPACE" in table.columns else []
        return [
            *space,
            record.key,
            tensor_text(record),
            size_text(record.nbytes),
            nodes_text(record, self._monitor),
            str(page.hits[record.namespace, record.key]),
            age_text(age_since(record.created)),
        ]
