"""The engine's intents: items that its requests have claimed and not yet encoded.

A claim belongs to the engine, so its requests share it. It is released when no request wants it any
more. Pure bookkeeping; `EcClaims` uses it on vLLM's scheduler thread.
"""

from collections.abc import Iterable


class Intents:
    """See the module."""

    def __init__(self) -> None:
        self._wanted_by: dict[str, set[str]] = {}
        """Item → requests that claimed it and have not released it."""
        self._granted: set[str] = set()
        """Items whose claim this engine holds, or may hold, and that vLLM has not allocated
        since."""

    def __len__(self) -> int:
        """Tracked items; a granted item counts twice."""
        return len(self._wanted_by) + len(self._granted)

    def __contains__(self, identifier: str) -> bool:
        """Whether this engine holds, or may hold, an intent for the item."""
        return identifier in self._granted

    def want(self, identifiers: Iterable[str], request_id: str) -> None:
        """This request claims these items."""
        for identifier in identifiers:
            self._wanted_by.setdefault(identifier, set()).add(request_id)

    def is_wanted(self, identifier: str, request_id: str) -> bool:
        """Whether this request claimed the item, and no request has begun to encode it since."""
        return request_id in self._wanted_by.get(identifier, ())

    def grant(self, identifiers: Iterable[str]) -> None:
        """This engine holds the claims."""
        self._granted.update(identifiers)

    def may_be_granted(self, identifiers: Iterable[str]) -> None:
        """This engine may hold the claims of those items that are still wanted: the outcome was not
        read."""
        self._granted.update(one for one in identifiers if one in self._wanted_by)

    def release(self, identifier: str, request_id: str) -> bool:
        """The request no longer wants the item. Returns whether the claim was granted and no other
        request wants it."""
        wanted_by = self._wanted_by.get(identifier)
        if wanted_by is None or request_id not in wanted_by:
            return False
        wanted_by.discard(request_id)
        if wanted_by:
            return False
        del self._wanted_by[identifier]
        was_granted = identifier in self._granted
        self._granted.discard(identifier)
        return was_granted

    def begin_encode(self, identifier: str) -> set[str]:
        """The item is encoded and is no longer an intent. Returns the requests that wanted it."""
        self._granted.discard(identifier)
        return self._wanted_by.pop(identifier, set())
