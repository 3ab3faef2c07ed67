"""Request: what all that a client says to its node has in common. See `messages`."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final


@dataclass(frozen=True, slots=True)
class Request:
    op: ClassVar[str]
    id: int

    def to_wire(self) -> dict[str, Any]:
        return {"op": self.op} | {name: getattr(self, name) for name in names_of(type(self))}


class DeskRequest(Request):
    """What the desk answers for a session that is open."""

    __slots__ = ()


_names: Final[dict[type[Request], tuple[str, ...]]] = {}


def names_of(kind: type[Request]) -> tuple[str, ...]:
    """The fields of a kind of request, in their order."""
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(item.name for item in fields(kind))
    return names
