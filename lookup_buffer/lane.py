"""Lanes: ways from one process's device to another's, beside the one over the hosts. Plain data.

What the node, its clients and the metrics have to agree on; how bytes take a lane is `device`'s.
"""

from enum import StrEnum
from typing import Final, Literal

LANES: Final = ("gloo", "nccl")


class Fallback(StrEnum):
    """Why what could have come by a lane came over the hosts:

    cold, abandoned     no communicator with that pool yet; or it failed, and is left alone a while
    version             the other end has another kind of lane, or another version of its library
    stale               the pool has it no more
    checksum            other bytes came than the record tells of
    peer_failed         the other process died, closed, or broke off
    timeout             it did not come in the time given
    no_room, device     no room in the pool, or never any; or the device had none, or failed
    busy, ended         too many are on their way; the process that was to receive it has gone
    """

    COLD = "cold"
    ABANDONED = "abandoned"
    VERSION = "version"
    STALE = "stale"
    CHECKSUM = "checksum"
    PEER_FAILED = "peer_failed"
    TIMEOUT = "timeout"
    NO_ROOM = "no_room"
    DEVICE = "device"
    BUSY = "busy"
    ENDED = "ended"


MaybeFallback = Fallback | Literal[""]
"""Empty: it comes by the lane."""
