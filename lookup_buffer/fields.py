"""What a field of a request may hold, by its name, and the limits. Pure.

All that comes from outside is checked by this before anything is done with it (see `messages`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from lookup_buffer.lane import LANES, Fallback
from store import DEVICE, LOCATIONS_MAX, ClaimState

KEYS_MAX: Final = 4096
"""Bound on the keys or tickets of one request."""
KEYS_BYTES_MAX: Final = 256 << 10
"""Bound on the keys of one request together, that `split` keeps; a frame takes four times that."""
COUNT_MAX: Final = (1 << 31) - 1
"""Bound on the hits of a key that one request can tell: no sum of them outgrows a counter."""
TEXT_MAX: Final = 4096
PARTS_MAX: Final = 256
"""Bound on the entries of a map: parts of a namespace, what a client expects, a header."""
SECONDS_MAX: Final = 86_400.0


def is_fingerprint(value: object) -> bool:
    return isinstance(value, str) and _FINGERPRINT.fullmatch(value) is not None


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= TEXT_MAX


def is_seconds(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= SECONDS_MAX  # which infinity and NaN are not


def _list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, list) and len(value) <= KEYS_MAX and all(map(check, value))
    )


def _is_small_map(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= PARTS_MAX and all(map(_is_text, value))


def _is_reads(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > KEYS_MAX or not all(map(_is_text, value)):
        return False
    return all(is_count(count) and 0 < count <= COUNT_MAX for count in value.values())


def _is_seat(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, list) or len(value) != 5:
        return False
    engine_id, rank, world_size, encodes, device = value
    in_world = is_count(world_size) and 0 < world_size <= 4096
    if not _is_text(engine_id) or not in_world or not isinstance(encodes, bool):
        return False
    if not isinstance(device, str) or (device and not DEVICE.match(device)):
        return False
    return rank is None or (is_count(rank) and rank < world_size)


def is_parts(value: object) -> bool:
    """Whether these are parts of a namespace that a node takes."""
    return _is_small_map(value) and all(isinstance(part, str) for part in value.values())  # type: ignore[attr-defined]


_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_LIBRARY, _POOL = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]{12}")
_CLAIM_STATES = [state.value for state in ClaimState]  # a list: what is looked up may be unhashable
CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "id": is_count,
    "version": is_count,
    "seat": _is_seat,
    "expects": _is_small_map,
    "session": is_count,
    "namespace": is_fingerprint,
    "key": _is_text,
    "keys": _list_of(_is_text),
    "budget_seconds": is_seconds,
    "header": _is_small_map,
    "ttl_seconds": lambda value: value is None or is_seconds(value),
    "wait_seconds": is_seconds,
    "lease_seconds": is_seconds,
    "state": _CLAIM_STATES.__contains__,
    "waiter": is_count,
    "claimer": is_count,
    "tickets": _list_of(is_count),
    "reads": _is_reads,
    "token": is_count,
    "take": is_count,
    "rank": is_count,
    "parts": is_parts,
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
