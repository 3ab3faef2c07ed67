"""Protocol: what two pools must have in common to be connected by a lane, and their messages.

A `ProtocolVersion` is the kind of lane and the version of its library. The library is imported only
when a process has chosen that kind. Any thread may call this module; it does no I/O of its own.

The connecting end sends questions; the listening end replies. The reply's keys contain the
question's number. Questions and verdicts are small messages; the payload goes through the
communicator:

    question    without a key: {ask, pool, namespace, key, mark}. Mark 0 is a probe, which makes the
                communicator before it is needed. With `at_sight` nothing needs that pair yet: a
                pool that has many pairs already ends it instead
    verdict     under `v<ask>`: {status: ok or stale, header}
    payload     under `p<ask>`, if the status is ok
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from lookup_buffer.codec import Value, writable_bytes
from lookup_buffer.device.memory import LaneMemory, PoolMemory
from lookup_buffer.errors import ConfigError, ProtocolError
from lookup_buffer.pipes.connect import Joined
from lookup_buffer.pipes.stream import HostMemory, Memory
from lookup_buffer.protocol.framing import pack, unpack

Joining = Callable[[bool, float], Joined]
"""Called with: whether this end listens; how many seconds making a communicator may take."""


@dataclass(frozen=True, slots=True)
class ProtocolVersion:
    lane: str
    """gloo or nccl."""
    version: str

    @property
    def library(self) -> str:
        """The version as records carry it: eight hex digits, which differ between versions."""
        return hashlib.blake2b(self.version.encode(), digest_size=4).hexdigest()


def dialect_of(lane: str, place: PoolMemory) -> ProtocolVersion:
    """The dialect of this process for that kind of lane.

    Raises:
        ConfigError: this process cannot use that kind of lane; the text says why.
    """
    if lane == "gloo":
        from lookup_buffer.pipes import gloo

        if place.device.type != "cpu":
            raise ConfigError(f"a gloo lane joins host memory, not {place.device}: choose nccl")
        return ProtocolVersion(lane, gloo.dialect())
    if lane == "nccl":
        from lookup_buffer.pipes import nccl

        if place.device.type != "cuda":
            raise ConfigError(f"an nccl lane joins GPUs, not {place.device}: choose gloo")
        return ProtocolVersion(lane, nccl.dialect())
    raise ConfigError(f"{lane!r} is no lane; allowed: gloo, nccl")


def joining(dialect: ProtocolVersion, place: PoolMemory) -> Joining:
    """Returns what turns a link into one that moves payload by this dialect."""
    if dialect.lane == "gloo":
        from lookup_buffer.pipes import gloo

        return lambda listen, seconds: gloo.joining(
            dialect.version, listen=listen, make_seconds=seconds
        )
    from lookup_buffer.pipes import nccl

    return lambda listen, seconds: nccl.joining(
        dialect.version, place.device, listen=listen, make_seconds=seconds
    )


def memory_of(dialect: ProtocolVersion, place: PoolMemory) -> Memory:
    """The memory in which the bytes of a lane's pipe lie."""
    if dialect.lane == "gloo":
        return LaneMemory(HostMemory())
    from lookup_buffer.pipes.nccl import DeviceMemory

    return LaneMemory(DeviceMemory(place.device, place.device))


QUESTION_BYTES_MAX: Final = 64 << 10
INBOX_BYTES: Final = 4 << 20
"""Bound on messages from the other end that were not received yet. An end that follows this
protocol has only a fraction of it in flight."""
PROBE_BYTES: Final = 128 << 10
"""More than the bytes sent inline with an offer, so a probe goes through the communicator."""


def message(fields: dict[str, Any]) -> torch.Tensor:
    """The fields as a tensor that a pipe can carry: uint8, one dimension."""
    return torch.frombuffer(bytearray(pack(fields)), dtype=torch.uint8)


def fields_in(value: Value) -> dict[str, Any]:
    """The fields of such a tensor; the reverse of `message`.

    Raises:
        ProtocolError: the value is not a message of this protocol.
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
