"""The variants of an item: what vLLM's current requests mean by one identifier.

A client may give two contents one name (`uuid`), and an adapter may be loaded again under its old
name. vLLM asks for an item by its identifier alone. Bytes that fit one request could then be loaded
for another, and vLLM's engine dies of an output with too few rows. `EcGate` updates this on vLLM's
scheduler thread.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from lookup_buffer.key import TensorKey

Variant = tuple[TensorKey | None, int]
"""The key under which the item is shared, None where it is not shared, and the rows of its
output."""
RequestVariants = Mapping[str, Iterable[Variant]]
"""By the identifiers of one request's items. An identifier with several variants fits no bytes."""


class ItemVariants:
    """Counts the variants of all requests. `remove` takes what `add` was given."""

    def __init__(self) -> None:
        self._variants: dict[str, Counter[Variant]] = {}
        self.current: RequestVariants | None = None
        """The variants of the request that vLLM is about to schedule. None where it is not known:
        vLLM before 0.30 does not name requests that run."""

    def __len__(self) -> int:
        return len(self._variants)

    def add(self, variants: RequestVariants) -> None:
        for identifier, values in variants.items():
            self._variants.setdefault(identifier, Counter()).update(values)

    def remove(self, variants: RequestVariants) -> None:
        for identifier, values in variants.items():
            left = self._variants[identifier]
            left.subtract(values)
            self._variants[identifier] = left = +left
            if not left:
                del self._variants[identifier]

    def of(self, identifier: str) -> tuple[Variant, ...]:
        """What vLLM may mean by the identifier now; empty where no request with it is known."""
        variants = self._variants if self.current is None else self.current
        return tuple(variants.get(identifier, ()))
