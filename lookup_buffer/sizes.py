"""Parses sizes in human-readable form, as `8GiB`.

A pure function without dependencies, for settings and command options, which check the bounds; any
thread.
"""

import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?\s*")
_SIZE_STEPS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(value: object) -> object:
    """The bytes of `8GiB`, `512MB` or a plain number; any other value is returned unchanged, for
    the caller to refuse."""
    if isinstance(value, str) and len(value) < 32 and (match := _SIZE.fullmatch(value)):
        number, step, suffix = match.groups()
        base = 1000 if suffix in ("b", "B") and step else 1024
        return int(float(number) * base ** _SIZE_STEPS[step.lower()])
    return value
