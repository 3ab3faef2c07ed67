"""The engine's intents: items whose claims its requests asked for, and which it did not encode yet.

A claim belongs to the engine, so requests share it, and it is given back when none of them wants it
any more. Pure bookkeeping, of the scheduler's thread.
"""

from collections.abc import Iterable


class Intents:
    def __init__(self) -> None:
        self._wanted_by: dict[str, set[str]] = {}
        """Item → requests that asked for its claim and did not give it up."""
        self._granted: set[str] = set()
        """Items whose claim is, or may be, this engine's, and that were not allocated since."""

    def __len__(self) -> int:
        """Items kept track of, those that are granted twice."""
        return len(self._wanted_by) + len(self._granted)

    def __contains__(self, identifier: str) -> bool:
        """Whether the claim is, or may be, this engine's as an intent."""
        return identifier in self._granted

    def want(self, identifiers: Iterable[str], request_id: str) -> None:
        """This request asks for the claims of these items."""
        for identifier in identifiers:
            self._wanted_by.setdefault(identifier, set()).add(request_id)

    def is_wanted(self, identifier: str, request_id: str) -> bool:
        """Whether this request asked for it, and nobody has come to encode it since."""
        return request_id in self._wanted_by.get(identifier, ())

    def grant(self, identifiers: Iterable[str]) -> None:
        """The claims are this engine's."""
        self._granted.update(identifiers)

    def may_be_granted(self, identifiers: Iterable[str]) -> None:
        """So may those of them be that are wanted still: it was not looked at."""
        self._granted.update(one for one in identifiers if one in self._wanted_by)

    def give_up(self, identifier: str, request_id: str) -> bool:
        """This request wants it no more. Whether it was granted, and nobody else wants it."""
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

    def encode(self, identifier: str) -> set[str]:
        """It is no intent any more, but encoded. The requests that wanted it."""
        self._granted.discard(identifier)
        return self._wanted_by.pop(identifier, set())
