"""A blocking store, with what a test overrides in it, as the asynchronous one that a node calls."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from store import BlockingStore, MetadataStore

T = TypeVar("T")
_PLAIN = ("place_of", "failovers", "has_mirror")


class _Awaited:
    def __init__(self, store: BlockingStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in _PLAIN:
            return method

        async def call(*arguments: Any, **keywords: Any) -> Any:
            return method(*arguments, **keywords)

        return call


def awaited(store: BlockingStore) -> MetadataStore:
    asynchronous: Any = _Awaited(store)
    return asynchronous  # type: ignore[no-any-return]


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing; `asyncio.sleep(0)` is nothing."""
    try:
        while coroutine.send(None) is None:
            pass
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError("it waits for something")
