"""The records that `ls` lists: found page by page, so that the first can be shown at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from lookup_buffer.cli.output import age_since
from lookup_buffer.fields import is_fingerprint
from lookup_buffer.inspection.records import hits_of
from store import MetadataStore, Record

LOOKED_AT = 500
"""Records that are looked at together: half a page of a scan, a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records are asked for; None is no bound. Ages are in seconds."""

    namespace: str = ""
    """How it begins."""
    node: str | None = None
    older_than: float | None = None
    younger_than: float | None = None
    larger_than: int | None = None
    smaller_than: int | None = None
    hits_min: int = 0

    def matches(self, record: Record) -> bool:
        """Whether all but its hits are as asked for."""
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
    """Some records, each listed once, and their hits by (namespace, key)."""

    records: list[Record]
    hits: dict[tuple[str, str], int]


def pages_of(store: MetadataStore, wanted: Wanted) -> Iterator[Page]:
    """All records that are wanted, in the order in which the store finds them. None is empty."""
    whole = wanted.namespace if is_fingerprint(wanted.namespace) else None
    seen: set[int] = set()  # hashes, for there may be millions
    records = iter(store.scan(whole))
    while looked_at := list(islice(records, LOOKED_AT)):
        found = [record for record in _unseen(looked_at, seen) if wanted.matches(record)]
        hits = hits_of(store, found)
        if wanted.hits_min:
            found = [one for one in found if hits[one.namespace, one.key] >= wanted.hits_min]
        if found:
            yield Page(found, hits)


def _unseen(records: Iterable[Record], seen: set[int]) -> Iterator[Record]:
    """A scan may name one twice."""
    for record in records:
        address = hash((record.namespace, record.key))
        if address not in seen:
            seen.add(address)
            yield record
