"""Where in an engine a client sits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSeat:
    """Which place in which engine a client has. `rank` None is the scheduler's side, whose
    tickets end when all `world_size` ranks have said done."""

    engine_id: str
    rank: int | None
    world_size: int
