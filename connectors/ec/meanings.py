"""What the requests that vLLM has now mean by an item's identifier.

A client may give two contents one name (`uuid`), and an adapter may be loaded anew under its name.
vLLM asks for an item by its identifier alone, so bytes that fit one request would be loaded for the
other, and an engine dies of an output with too few rows. Owned by the scheduler's thread.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from lookup_buffer.key import TensorKey

Meaning = tuple[TensorKey | None, int]
"""Under which key it is shared, None where it is not, and how many rows its output has."""
Meant = Mapping[str, Iterable[Meaning]]
"""By the identifiers of one request's items. More than one meaning fits nothing."""


class Meanings:
    """Counted by request: `add` and `remove` are given the same."""

    def __init__(self) -> None:
        self._meanings: dict[str, Counter[Meaning]] = {}
        self.asking: Meant | None = None
        """Of the request that vLLM is about to schedule, and asks for items of; None where it did
        not say, as hosts before 0.30 do not of requests that run."""

    def __len__(self) -> int:
        return len(self._meanings)

    def add(self, meant: Meant) -> None:
        for identifier, meanings in meant.items():
            self._meanings.setdefault(identifier, Counter()).update(meanings)

    def remove(self, meant: Meant) -> None:
        for identifier, meanings in meant.items():
            left = self._meanings[identifier]
            left.subtract(meanings)
            self._meanings[identifier] = left = +left
            if not left:
                del self._meanings[identifier]

    def of(self, identifier: str) -> tuple[Meaning, ...]:
        """What vLLM may mean by it now; nothing where no request with it is known."""
        meant = self._meanings if self.asking is None else self.asking
        return tuple(meant.get(identifier, ()))
