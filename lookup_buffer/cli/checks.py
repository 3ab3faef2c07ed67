"""What `doctor` finds: one `Check` for each thing it looked at."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, but perhaps not as well or as long as you think."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """`name` and the verdicts are stable; `found` and `advice` are for people."""

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
