"""The fields of requests: their bounds, their checks, and values that several modules share.

`CHECKS` has one check per field name, so a name means the same in every request. Also here: the
functions that bring a client's arguments within these bounds, and the reasons why a transfer did
not use a lane. Pure data and functions; any thread.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal

from lookup_buffer.errors import ConfigError
from store import DEVICE, LOCATIONS_MAX, ClaimState
from store.record import BOOT

KEYS_MAX: Final = 4096
"""Bound on the keys or tickets of one request."""
KEYS_BYTES_MAX: Final = 256 << 10
"""Bound on the characters of all keys of one request, which `split` keeps. A frame may hold four
times as much."""
COUNT_MAX: Final = (1 << 31) - 1
"""Bound on the reads of a key in one request."""
EXCHANGED_BYTES: Final = 64 << 10
"""Size of the frames by which a node finds out whether it reaches another: more than a packet of
any size, and what a transfer must move in PEER_PROGRESS_SECONDS."""
TEXT_MAX: Final = 4096
"""Bound on the characters of one text: a key, an engine's id, a name in a map."""
PARTS_MAX: Final = 256
"""Bound on the entries of a map: parts of a namespace, a client's `expects`, a header."""
SECONDS_MAX: Final = 86_400.0
"""Bound on every duration in a request: a day."""

LANES: Final = ("gloo", "nccl")


class Fallback(StrEnum):
    """Why a transfer that could have used a lane went through the memory of the hosts:

    cold, abandoned     no communicator with that pool yet; or it failed, and the retry is not due
    version             the remote end has another kind of lane, or another version of its library
    stale               the pool no longer holds the tensor
    checksum            the received bytes differ from the record's checksum
    peer_failed         the remote process died, closed the connection, or ended the transfer
    timeout             the bytes did not arrive in the given time
    no_room, device     no room in the pool, now or ever; or no memory on the device, or it failed
    busy, ended         too many transfers in flight; the receiving process has ended
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
"""Empty: the transfer uses the lane."""


def is_fingerprint(value: object) -> bool:
    return isinstance(value, str) and _FINGERPRINT.fullmatch(value) is not None


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= TEXT_MAX


def is_key_text(value: object) -> bool:
    """Whether it may be the text of a key: printable ASCII. Nearly all of `TensorKey.parse` at a
    tenth of its cost."""
    return is_text(value) and value.isascii() and value.isprintable()  # type: ignore[attr-defined]


def is_boot(value: object) -> bool:
    return isinstance(value, str) and BOOT.match(value) is not None


def is_seconds(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= SECONDS_MAX  # excludes infinity and NaN


def _list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, list) and len(value) <= KEYS_MAX and all(map(check, value))
    )


def _is_small_map(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= PARTS_MAX and all(map(is_text, value))


def _is_reads(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > KEYS_MAX or not all(map(is_key_text, value)):
        return False
    return all(is_count(count) and 0 < count <= COUNT_MAX for count in value.values())


def _is_seconds_or_none(value: object) -> bool:
    return value is None or is_seconds(value)


def _is_seat(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, list) or len(value) != 5:
        return False
    engine_id, rank, world_size, encodes, device = value
    in_world = is_count(world_size) and 0 < world_size <= 4096
    if not is_text(engine_id) or not in_world or not isinstance(encodes, bool):
        return False
    if not isinstance(device, str) or (device and not DEVICE.match(device)):
        return False
    return rank is None or (is_count(rank) and rank < world_size)


def is_parts(value: object) -> bool:
    """Whether these are valid parts of a namespace."""
    return _is_small_map(value) and all(isinstance(part, str) for part in value.values())  # type: ignore[attr-defined]


_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_LIBRARY, _POOL = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]{12}")
_CLAIM_STATES = [state.value for state in ClaimState]
"""A list, because the value to check may be unhashable."""
CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "id": is_count,
    "version": is_count,
    "seat": _is_seat,
    "expects": _is_small_map,
    "session": is_count,
    "namespace": is_fingerprint,
    "key": is_key_text,
    "keys": _list_of(is_key_text),
    "budget_seconds": _is_seconds_or_none,
    "headers": _list_of(_is_small_map),
    "offsets": _list_of(is_count),
    "ttl_seconds": _is_seconds_or_none,
    "wait_seconds": is_seconds,
    "lease_seconds": is_seconds,
    "state": _CLAIM_STATES.__contains__,
    "waiter": is_count,
    "claimer": is_count,
    "prefetch": is_count,
    "indexes": _list_of(is_count),
    "tickets": _list_of(is_count),
    "reads": _is_reads,
    "token": is_count,
    "take": is_count,
    "rank": is_count,
    "parts": is_parts,
    "dialler": is_text,
    "node": is_text,
    "boot": is_boot,
    "data": lambda value: isinstance(value, bytes) and len(value) <= EXCHANGED_BYTES,
    "lane": LANES.__contains__,
    "library": lambda value: isinstance(value, str) and _LIBRARY.fullmatch(value) is not None,
    "port": lambda value: is_count(value) and 0 < value < 1 << 16,
    "pool": lambda value: isinstance(value, str) and _POOL.fullmatch(value) is not None,
    "pool_bytes": is_count,
    "receives": lambda value: isinstance(value, bool),
    "offers": lambda value: isinstance(value, bool),
    "checksum": lambda value: type(value) is int and 0 <= value < 1 << 64,
    "mark": lambda value: is_count(value) and 0 < value < 1 << 53,
    "ticket": is_count,
    "reason": ("", *Fallback).__contains__,
    "source": lambda value: is_count(value) and value <= LOCATIONS_MAX,
}


_OWNER_STATES = ["leased", "absent", "present", "won", "lost"]
REPLY_CHECKS: Final = (
    _OWNER_STATES.__contains__, is_count, is_seconds, is_count, CHECKS["checksum"], is_count
)  # fmt: skip
"""For the fields of an `OwnerReply`, in their order."""


def split(keys: Sequence[str], nbytes_max: int = KEYS_BYTES_MAX) -> Iterator[Sequence[str]]:
    """Any number of keys, split into parts that fit one request each."""
    start = nbytes = 0
    for index, key in enumerate(keys):
        nbytes += len(key)
        if nbytes > nbytes_max or index - start == KEYS_MAX:
            yield keys[start:index]
            start, nbytes = index, len(key)
    if start < len(keys):
        yield keys[start:]


def checked_seconds(name: str, value: float) -> float:
    """`value` in seconds, if it is in the range that a request may carry.

    Raises:
        ConfigError: it is negative, not a number, or more than a day.
    """
    if not is_seconds(value):
        raise ConfigError(f"{name} is {value!r}; allowed: 0 to {SECONDS_MAX:.0f} seconds")
    return float(value)


def clamped_seconds(timeout: float) -> float:
    """A caller's timeout in seconds, limited to the range that a request may carry.

    Raises:
        ConfigError: it is not a number.
    """
    if math.isnan(timeout):
        raise ConfigError(f"a timeout is {timeout!r}; allowed: any number of seconds")
    return min(max(0.0, float(timeout)), SECONDS_MAX)
