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


class Meanings:
    """Counted by request: `add` and `remove` are given the same."""

    def __init__(self) -> None:
        self._meanings: dict[str, Counter[Meaning]] = {}

    def __len__(self) -> int:
        return len(self._meanings)

    def add(self, meant: Mapping[str, Iterable[Meaning]]) -> None:
        for identifier, meanings in meant.items():
            self._meanings.setdefault(identifier, Counter()).update(meanings)

    def remove(self, meant: Mapping[str, Iterable[Meaning]]) -> None:
        for identifier, meanings in meant.items():
            left = self._meanings[identifier]
            left.subtract(meanings)
            self._meanings[identifier] = left = +left
            if not left:
                del self._meanings[identifier]

    def disputed(self, identifier: str) -> bool:
        """Whether two requests, or one, mean different things by it: then it is nobody's."""
        return len(self._meanings.get(identifier, ())) > 1
