"""Items that are stored already, on an engine that only encodes, and the requests that need them.

The counterpart of `ec.pins` on engines that load, but nothing is pinned. `LocatingSource`,
`EcWithoutGate` and `EcScheduler` use it on vLLM's scheduler thread.
"""


class StoredItems:
    """See the module."""

    def __init__(self) -> None:
        self._wanted_by: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._wanted_by)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._wanted_by

    def add(self, identifier: str, request_id: str) -> None:
        """The lookup of this request found the item stored."""
        self._wanted_by.setdefault(identifier, set()).add(request_id)

    def drop(self, identifier: str, request_id: str) -> None:
        """The request no longer needs the item. After the last one the item has to be looked up
        again."""
        wanted_by = self._wanted_by.get(identifier, set())
        wanted_by.discard(request_id)
        if not wanted_by:
            self._wanted_by.pop(identifier, None)
