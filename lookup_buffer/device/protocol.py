"""Dialect: what two pools have to have in common so that a lane can join them.

Names the kind of lane and the version of its library, and imports what is behind it only when a
process has chosen it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from lookup_buffer.device.memory import LaneMemory
from lookup_buffer.device.place import Place
from lookup_buffer.errors import ConfigError
from lookup_buffer.pipes.connect import Joined
from lookup_buffer.pipes.stream import HostMemory, Memory

Joining = Callable[[bool, float], Joined]
"""Of whether this end listens, and how long a communicator may take to be made."""


@dataclass(frozen=True, slots=True)
class Dialect:
    lane: str
    """gloo or nccl."""
    version: str

    @property
    def library(self) -> str:
        """The version as records carry it: eight hex digits that differ where it does."""
        return hashlib.blake2b(self.version.encode(), digest_size=4).hexdigest()


def dialect_of(lane: str, place: Place) -> Dialect:
    """What this process speaks.

    Raises:
        ConfigError: it cannot speak that, and why.
    """
    if lane == "gloo":
        from lookup_buffer.pipes import gloo

        if place.device.type != "cpu":
            raise ConfigError(f"a gloo lane joins host memory, not {place.device}: choose nccl")
        return Dialect(lane, gloo.dialect())
    if lane == "nccl":
        from lookup_buffer.pipes import nccl

        if place.device.type != "cuda":
            raise ConfigError(f"an nccl lane joins GPUs, not {place.device}: choose gloo")
        return Dialect(lane, nccl.dialect())
    raise ConfigError(f"{lane!r} is no lane; allowed: gloo, nccl")


def joining(dialect: Dialect, place: Place) -> Joining:
    """How a link becomes one that moves payload by this dialect."""
    if dialect.lane == "gloo":
        from lookup_buffer.pipes import gloo

        return lambda listen, seconds: gloo.joining(
            dialect.version, listen=listen, make_seconds=seconds
        )
    from lookup_buffer.pipes import nccl

    return lambda listen, seconds: nccl.joining(
        dialect.version, place.device, listen=listen, make_seconds=seconds
    )


def memory_of(dialect: Dialect, place: Place) -> Memory:
    """Where the bytes of a lane's pipe lie."""
    if dialect.lane == "gloo":
        return LaneMemory(HostMemory())
    from lookup_buffer.pipes.nccl import DeviceMemory

    return LaneMemory(DeviceMemory(place.device, place.device))
