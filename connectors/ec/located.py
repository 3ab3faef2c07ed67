"""What is stored already, on an engine that only encodes, and which requests asked.

Owned by the scheduler's thread. As `ec.pins` for engines that load, but nothing is held.
"""


class Located:
    def __init__(self) -> None:
        self._askers: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._askers)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._askers

    def add(self, identifier: str, request_id: str) -> None:
        """This request was told that the item is stored."""
        self._askers.setdefault(identifier, set()).add(request_id)

    def drop(self, identifier: str, request_id: str) -> None:
        """This request wants the item no more; with the last one it is to be asked for anew."""
        askers = self._askers.get(identifier, set())
        askers.discard(request_id)
        if not askers:
            self._askers.pop(identifier, None)
