"""One batch of changes while `registrar` writes it: which are not written, and why.

Pure bookkeeping around the calls of the store that it is given.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lookup_buffer.key import is_handoff
from lookup_buffer.node.dirty_set import Change
from store import MetadataStore, Publication, StoreUnavailable

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(slots=True)
class WriteBatch:
    """Changes that are being written, in up to four steps: each is one call of the store for all
    of them. A change whose server was not reached in one step takes no part in the next ones."""

    store: MetadataStore
    missed: dict[Change, str] = field(default_factory=dict)
    """By change the server that was not reached."""
    refused: list[Change] = field(default_factory=list)
    """Those that are not published because their server has no memory."""

    def held(self) -> dict[Change, str]:
        """By change that is to be tried again the name under which it is held: that of its server,
        or one of what its server refused. Hand-offs are apart there, since they end soon."""
        held = {}
        for change in self.refused:
            kind = "hand-offs" if is_handoff(change.address[1]) else "items"
            held[change] = f"no memory for {kind}: {self.store.place_of(*change.address)}"
        return held | self.missed

    async def step(
        self,
        call: Callable[[list[_T]], Awaitable[Sequence[_R | None]]],
        requests: Sequence[tuple[Change, _T]],
    ) -> list[tuple[Change, _T, _R | None]]:
        """The requests with their results; None if the server was not reached.

        Raises:
            StoreUnavailable: no server was reached, and there is only one, as far as it is known.
        """
        requests = [(change, one) for change, one in requests if change not in self.missed]
        results: Sequence[_R | None] = [None] * len(requests)
        try:
            if requests:
                results = await call([one for _, one in requests])
        except StoreUnavailable:
            if not all(self.store.place_of(*change.address) for change, _ in requests):
                raise
        done = [(*request, result) for request, result in zip(requests, results, strict=True)]
        for change, _, result in done:
            if result is None or result is Publication.UNREACHED:
                self.missed[change] = self.store.place_of(*change.address)
        return done
