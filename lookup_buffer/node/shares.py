"""How much of one kind a client may hold of this node: pins, claims, requests that wait, and so on.

Each limit is far above what an engine needs; it stops a client that is broken or hostile. A client
may open many sessions, so there is one bound for all, and each may hold at most as much as all
leave free. A little is everyone's own, whatever others hold: the bound may be exceeded by that
much for each of `server.CONNECTIONS_MAX` sessions. Connections of other nodes have such a bound as
well. Pure bookkeeping, on the loop's thread. Used by `arena`, `connection`, `held_claims`,
`devices`, `handoffs` and `peers`.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.errors import BufferFull

REQUEST_BYTES: Final = 16 << 10
"""About what a request occupies that waits."""
KEY_BYTES: Final = 512
"""About what each of its keys occupies, beside the key's text."""


@dataclass(slots=True)
class Shares:
    """Counts what each owner holds; `what` names it, for people."""

    what: str
    total: int
    """Bound on what all hold together; one alone may hold half of it."""
    own: int
    """What each may hold in any case."""
    _held: dict[Hashable, int] = field(default_factory=dict)
    _used: int = 0

    def fits(self, owner: Hashable, count: int = 1) -> bool:
        """Whether this owner may hold so many more."""
        return self._held.get(owner, 0) + count <= max(self.own, self.total - self._used)

    def check(self, owner: Hashable, count: int = 1) -> None:
        """Raises BufferFull: this owner may not hold so many more."""
        if not self.fits(owner, count):
            raise BufferFull(
                f"this client has {self._held.get(owner, 0)} {self.what}, all clients of this node "
                f"{self._used}; one may have as many as all leave free of {self.total}"
            )

    def add(self, owner: Hashable, count: int = 1) -> None:
        """It holds so many more; fewer, if negative."""
        self._used += count
        held = self._held.get(owner, 0) + count
        if held:
            self._held[owner] = held
        else:
            self._held.pop(owner, None)


def size_of(keys: Collection[str], each: int = KEY_BYTES) -> int:
    """What a request for these keys counts while it waits: 1, and more if they are many. `each`:
    about what it keeps of one beside its text."""
    return 1 + (sum(map(len, keys)) + each * len(keys)) // REQUEST_BYTES
