"""Dialect: what two pools have to have in common so that a lane can join them.

Names the kind of lane and the version of its library, and imports what is behind it only when a
process has chosen it.

What two pools say to each other over the pipe of their pair.

The end that connected asks; the end that listens answers, under keys that the question's number
makes. Both are small messages beside the payload, which goes through the communicator:

    question    without a key: {ask, pool, namespace, key, mark}; mark 0: a probe, to make the
                communicator before it is needed; with `at_sight` where nobody needs it as yet:
                whoever has many already ends that pair instead
    verdict     under `v<ask>`: {status: ok or stale, header}
    payload     under `p<ask>`, where the status is ok
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from lookup_buffer.codec import Value, writable_bytes
from lookup_buffer.device.memory import LaneMemory, Place
from lookup_buffer.errors import ConfigError, ProtocolError
from lookup_buffer.pipes.connect import Joined
from lookup_buffer.pipes.stream import HostMemory, Memory
from lookup_buffer.protocol.framing import pack, unpack

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


QUESTION_BYTES_MAX: Final = 64 << 10
INBOX_BYTES: Final = 4 << 20
"""Of what the other end sent and nobody here asked for, or not yet; ends that do as this module
says have a fraction of it under way."""
PROBE_BYTES: Final = 128 << 10
"""More than what comes with its offer: so it takes the communicator."""


def message(fields: dict[str, Any]) -> torch.Tensor:
    """Fields as a value that a pipe carries."""
    return torch.frombuffer(bytearray(pack(fields)), dtype=torch.uint8)


def fields_in(value: Value) -> dict[str, Any]:
    """The reverse.

    Raises:
        ProtocolError: it is nothing of that kind.
    """
    if value is None or value.dtype != torch.uint8 or value.dim() != 1:
        raise ProtocolError("that is neither a question nor a verdict")
    host = value.cpu()
    fields = unpack(writable_bytes(host))
    if not isinstance(fields, dict):
        raise ProtocolError("that is neither a question nor a verdict")
    return fields


def verdict_key(ask: int) -> str:
    return f"v{ask}"


def payload_key(ask: int) -> str:
    return f"p{ask}"
