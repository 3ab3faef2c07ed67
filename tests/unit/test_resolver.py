"""The resolver alone: which look-ups it repeats, and which it does not."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lookup_buffer.errors import MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.locator import Answer, Located, Locator
from lookup_buffer.node.resolver import Resolver
from store import Location, Record

ADDRESS = ("namespace", "key")
RECORD = Record(*ADDRESS, "uint8", (1,), 1, "tensor", 1.0)
ABSENT = Located(None, (), MissReason.ABSENT)
FOUND = Located(RECORD, ((Location("node", "boot", 1, 1), "tcp://127.0.0.1:1"),), "")


class Questions(Locator):
    """Keeps the requests, for the test to answer."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.forgotten: list[QualifiedKey] = []

    def start(self) -> None: ...

    def ask(self, addresses: Sequence[QualifiedKey], answer: Answer) -> None:
        self.answers.append(answer)

    def known(self, namespace: str, keys: Sequence[str]) -> list[bool | None]:
        return [None] * len(keys)

    def forget(self, address: QualifiedKey) -> None:
        self.forgotten.append(address)

    def tick(self) -> None: ...

    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def close(self) -> None: ...


class Fetches:
    """In place of the fetcher."""

    def __init__(self) -> None:
        self.asked: list[QualifiedKey] = []

    def fetch(self, address: QualifiedKey, *_: Any) -> None:
        self.asked.append(address)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize("found", [FOUND, ABSENT], ids=["there", "gone again"])
def test_a_key_published_during_its_look_up_is_looked_up_again(
    loop: asyncio.AbstractEventLoop, found: Located
) -> None:
    locator, fetcher = Questions(), Fetches()
    told: list[str] = []
    resolver = Resolver(loop, None, locator, fetcher)  # type: ignore[arg-type]
    resolver.resolve([ADDRESS], lambda _: told.append)
    resolver.published(ADDRESS, located=False)
    assert locator.forgotten == [ADDRESS]
    resolver.resolve([ADDRESS], lambda _: told.append)  # joins a question that is out of date
    locator.answers.pop()([ABSENT])
    assert told == []
    locator.answers.pop()([found])
    assert (fetcher.asked, told) == (([ADDRESS], []) if found is FOUND else ([], ["absent"] * 2))
    assert locator.answers == []
