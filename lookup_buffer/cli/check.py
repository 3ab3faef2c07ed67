"""Check: one result of `lookup-buffer doctor`, with advice if something is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

NAMED_MAX = 5
"""Most names that one result lists."""


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, but perhaps slowly or not for long."""
    FAIL = "fail"


def named(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED_MAX]) + (", …" if len(names) > NAMED_MAX else "")


@dataclass(frozen=True, slots=True)
class Check:
    """One result. `name` and `verdict` are stable; `found` and `advice` are for people."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    return Check(name, Verdict.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    return Check(name, Verdict.FAIL, found, advice)
