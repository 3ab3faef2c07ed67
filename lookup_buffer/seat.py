"""Where in an engine a client sits."""

from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineSeat:
    """Which place in which engine a client has. `rank` None is the scheduler's side, whose
    tickets end when all `world_size` ranks have said done."""

    engine_id: str
    rank: int | None
    world_size: int
    encodes: bool = False
    """Whether what the engine gets here spares it an encode: outputs of its encoder."""
    device: str = ""
    """On what this client's tensors were computed: up to 12 printable ASCII characters."""

    def to_wire(self) -> list[Any]:
        return list(astuple(self))
