"""In which parts two namespaces differ. Pure.

A part may be a JSON object, as the connector's are: then its members are compared one by one.
"""

import json
from collections.abc import Iterable, Mapping
from functools import partial

Described = Mapping[str, Mapping[str, str]]
"""What namespaces stand for: their parts, by fingerprint; nothing where nobody says so."""
Differences = dict[str, tuple[str | None, str | None]]

_SHOWN_CHARACTERS = 32
_NAMED_MAX = 6


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Differences:
    """By name of the part: its value here and there, None where there is no such part."""
    here, there = _flat(ours), _flat(theirs)
    return {
        name: (here.get(name), there.get(name))
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    }


def most_alike(
    described: Described, without: Iterable[str], having: Iterable[str]
) -> dict[str, str]:
    """Beside each of `without` the one of `having` that is most like it; the most alike first.

    That is by how many parts differ, and by fingerprint among equals. Last come those of which
    nobody says what they stand for, or what those stand for that have it.
    """
    holders = sorted(having)
    flat = {
        space: frozenset(_flat(described.get(space, {})).items()) for space in {*without, *holders}
    }

    def unlike(one: str, other: str) -> tuple[bool, bool, int]:
        here, there = flat[one], flat[other]
        return not there, not here, len({name for name, _ in here ^ there})

    nearest = {space: min(holders, key=partial(unlike, space)) for space in without}
    order = sorted(nearest, key=lambda space: (unlike(space, nearest[space]), space))
    return {space: nearest[space] for space in order}


def difference_text(found: Differences) -> str:
    """`dtype (float16 here, bfloat16 there), …`."""
    named = [
        f"{name} ({_shown(here)} here, {_shown(there)} there)"
        for name, (here, there) in list(found.items())[:_NAMED_MAX]
    ]
    if len(found) > len(named):
        named.append(f"and {len(found) - len(named)} more")
    return ", ".join(named)


def _flat(parts: Mapping[str, str]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in parts.items():
        members = _members(value)
        if members:
            flat |= {f"{name}.{member}": text for member, text in _flat(members).items()}
        else:
            flat[name] = value
    return flat


def _members(value: str) -> dict[str, str]:
    if not value.startswith("{"):
        return {}
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return {
        str(name): member if isinstance(member, str) else json.dumps(member, sort_keys=True)
        for name, member in found.items()
    }


def _shown(value: str | None) -> str:
    if not value:
        return "nothing"
    if len(value) <= _SHOWN_CHARACTERS:
        return value
    return value[: _SHOWN_CHARACTERS - 1] + "…"
