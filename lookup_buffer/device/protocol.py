"""Protocol: what two pools must have in common to be connected by a lane, and their messages.

A `ProtocolVersion` is the kind of lane and the version of its library. The library is imported only
when a process has chosen that kind. Any thread may call this module; it does no I/O of its own.

The connecting end sends requests; the listening end replies, under keys with the request's number.
Requests and replies are small messages; the payload goes through the communicator:

    request     without a key: {ask, pool, namespace, key, mark}. Mark 0 is a probe: the pool sends
                bytes that make the communicator before it is needed. A probe has `on_discovery`
                as well: true if no read needs the pair yet. A pool with many pairs then ends it
    reply       under `v<ask>`: {status: ok or stale}; a probe has none
    payload     under `p<ask>`, if the status is ok: the tensor, with the header of its message
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from lookup_buffer.codec import Value, writable_bytes
from lookup_buffer.device.memory import LaneMemory, PoolMemory
from lookup_buffer.errors import ConfigError, ProtocolError
from lookup_buffer.pipes.connect import Upgrade
from lookup_buffer.pipes.stream import HostMemory, Memory
from lookup_buffer.protocol.framing import pack, unpack

REQUEST_BYTES_MAX: Final = 64 << 10
INBOX_BYTES: Final = 4 << 20
"""Bound on the unreceived messages of the other end. An end that follows this protocol has only a
fraction of it in flight."""
PROBE_BYTES: Final = 128 << 10
"""More than the bytes sent inline with an offer, so a probe goes through the communicator."""

MakeUpgrade = Callable[[bool, float], Upgrade]
"""Called with: whether this end listens; how many seconds making a communicator may take."""


@dataclass(frozen=True, slots=True)
class ProtocolVersion:
    lane: str
    """gloo or nccl."""
    library_version: str

    @property
    def library(self) -> str:
        """The version as records carry it: eight hex digits, which differ between versions."""
        return hashlib.blake2b(self.library_version.encode(), digest_size=4).hexdigest()


def version_of(lane: str, memory: PoolMemory) -> ProtocolVersion:
    """The version of this process for that kind of lane.

    Raises:
        ConfigError: this process cannot use that kind of lane; the text has the reason.
    """
    if lane == "gloo":
        from lookup_buffer.pipes import gloo

        if memory.device.type != "cpu":
            raise ConfigError(f"a gloo lane connects host memory, not {memory.device}: choose nccl")
        return ProtocolVersion(lane, gloo.version())
    if lane == "nccl":
        from lookup_buffer.pipes import nccl

        if memory.device.type != "cuda":
            raise ConfigError(f"an nccl lane connects GPUs, not {memory.device}: choose gloo")
        return ProtocolVersion(lane, nccl.version())
    raise ConfigError(f"{lane!r} is no lane; allowed: gloo, nccl")


def make_upgrade(version: ProtocolVersion, memory: PoolMemory) -> MakeUpgrade:
    """Makes the upgrade of a link into one with this version's communicator."""
    if version.lane == "gloo":
        from lookup_buffer.pipes import gloo

        return lambda listen, seconds: gloo.make_upgrade(
            version.library_version, listen=listen, make_seconds=seconds
        )
    from lookup_buffer.pipes import nccl

    return lambda listen, seconds: nccl.make_upgrade(
        version.library_version, memory.device, listen=listen, make_seconds=seconds
    )


def pipe_memory(version: ProtocolVersion, memory: PoolMemory) -> Memory:
    """The memory for the bytes of a lane's pipe."""
    if version.lane == "gloo":
        return LaneMemory(HostMemory())
    from lookup_buffer.pipes.nccl import DeviceMemory

    return LaneMemory(DeviceMemory(memory.device, memory.device))


def message(fields: dict[str, Any]) -> torch.Tensor:
    """The fields as a tensor that a pipe can carry: uint8, one dimension."""
    return torch.frombuffer(bytearray(pack(fields)), dtype=torch.uint8)


def fields_in(value: Value) -> dict[str, Any]:
    """The fields of such a tensor; the reverse of `message`.

    Raises:
        ProtocolError: the value is not a message of this protocol.
    """
    if value is None or value.dtype != torch.uint8 or value.dim() != 1:
        raise ProtocolError("neither a request nor a reply of a pool")
    host = value.cpu()
    fields = unpack(writable_bytes(host))
    if not isinstance(fields, dict):
        raise ProtocolError("neither a request nor a reply of a pool")
    return fields


def reply_key(number: int) -> str:
    return f"v{number}"


def payload_key(number: int) -> str:
    return f"p{number}"
