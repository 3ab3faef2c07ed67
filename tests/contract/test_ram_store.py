"""The store of another package, which has only the core: the contract, by its URL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from store import BlockingStore, StoreNotBrowsable, open_store
from store.testing import CoreContract
from store.testing.samples import a_mark

PACKAGE = Path(__file__).parents[1] / "packages" / "ram_store"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE)


@pytest.fixture
def store() -> Iterator[BlockingStore]:
    with open_store("ram://tests") as store:
        yield store


class TestRamStore(CoreContract):
    @pytest.fixture
    def store(self) -> Iterator[BlockingStore]:
        with open_store("ram://tests") as store:
            yield store


def test_it_takes_what_nodes_write_for_people(store: BlockingStore) -> None:
    store.describe_namespace("ns", {"model": "m"})
    store.add_hits("ns", {"k": 1})
    store.add_stats("node-1", {"hits_local": 1})
    store.note_failures([])
    assert store.invalidations() == {}
    assert store.failovers() == 0
    assert store.place_of("ns", "k") == ""


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("stats", ()), ("namespaces", ()), ("node_ages", (["n"],)), ("hits", ("ns", ["k"])),
        ("gone", ("ns", "k")), ("failure", ("ns", "k")), ("clear", ("ns",)), ("server_info", ()),
        ("ping", ()), ("mark_invalid", ("ns", a_mark())), ("scan", ()), ("traces", ()),
        ("inspection", ()),
    ],
)  # fmt: skip
def test_it_cannot_be_browsed(
    store: BlockingStore, method: str, arguments: tuple[object, ...]
) -> None:
    assert not store.browsable
    with pytest.raises(StoreNotBrowsable, match="RamStore cannot be browsed"):
        list(getattr(store, method)(*arguments))
