"""What all parts of the contract share: their fixtures, and sample records."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from store import BlockingStore, Invalidation, Location, Record

BOOT, OTHER_BOOT = "b" * 16, "c" * 16

ODD_KEYS = [
    "a" * 64,
    "a" * 64 + "#layer.3@chatcmpl-1",
    "x" * 5000,
    "h." + "0" * 32,
    "}{",
    "{tag}rest",
    "with space:and:colons",
    "Ω*?[a-z]",
    "line\r\nbreak\0",
    "\udcff not decodable",
]


def a_location(node: str = "node-1", **changes: Any) -> Location:
    return Location(node, BOOT, 1, 0xFEED)._replace(**changes)


def a_record(namespace: str, key: str, **changes: Any) -> Record:
    record = Record(namespace, key, "bfloat16", (729, 1152), 1_679_616, "tensor", 1763718000.125)
    return record._replace(**changes)


def a_mark(at: int = 1_763_718_000) -> Invalidation:
    return Invalidation(secrets.token_hex(8), at)


class StoreContract:
    """Subclasses override `store`. It is empty at the start of each test, and patient: its
    time-outs do not end a call on a slow machine."""

    @pytest.fixture
    def store(self) -> Iterator[BlockingStore]:
        raise NotImplementedError

    @pytest.fixture
    def namespace(self) -> str:
        """A fingerprint that no other test uses."""
        return secrets.token_hex(32)
