"""What is published of descriptions of namespaces, which any client may send."""

import asyncio
from collections.abc import Iterator

import pytest

from lookup_buffer.node.descriptions import BYTES_MAX, NEW_MAX, Descriptions
from lookup_buffer.node.storage import FailureLog


@pytest.fixture
def descriptions() -> Iterator[Descriptions]:
    loop = asyncio.new_event_loop()
    yield Descriptions(loop, FailureLog())
    loop.close()


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\U0001f600", "\ud800"])
def test_new_ones_are_bounded_in_bytes(descriptions: Descriptions, letter: str) -> None:
    """A character of four bytes counted as one of one."""
    size = len(letter.encode(errors="replace"))
    text = letter * (BYTES_MAX // size - 100)
    taken = sum(descriptions.add(f"{n:064x}", {"model": text}) for n in range(100))
    assert 0 < taken * len(text) * size <= NEW_MAX
    assert not descriptions.add("f" * 64, {"model": letter * (BYTES_MAX // size)})
