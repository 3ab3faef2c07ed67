"""What all runs of the torture added up to: a file of totals, and the report in `docs/torture.md`.

    python tests/soak/torture_totals.py TOTALS.json     prints the report

A run adds each of its rounds when the round is over, so a run that is stopped loses one round at
most. The file is replaced in one step.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
FRAMES_AIM = 10_000_000
KILLS_AIM = 1_000
SOAK_SECONDS_AIM = 3_600.0
BAD = ("wrong bytes", "lost", "hang", "gauge", "memory", "ended", "other")
"""Kinds of findings, each of which has a row in the report, also where it was never seen."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be."""

    kind: str
    """One of BAD."""
    round: str
    seed: int
    text: str


@dataclass
class Totals:
    """Of one round, of one run, or of all runs so far."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By the kind of round."""
    rounds: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """`killed: node`, `fault: Redis flushed`, `frames: unix`, `acknowledged` and so on."""
    peaks: dict[str, float] = field(default_factory=dict)
    """The largest value seen, by its name with the unit last."""
    findings: list[Finding] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    first_day: str = ""
    last_day: str = ""

    def count(self, name: str, times: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + times

    def peak(self, name: str, value: float) -> None:
        self.peaks[name] = max(self.peaks.get(name, value), value)

    def sum_of(self, prefix: str) -> int:
        return sum(times for name, times in self.counts.items() if name.startswith(prefix))

    def add(self, other: "Totals") -> None:
        self.seconds = _summed(self.seconds, other.seconds)
        self.rounds = {k: int(v) for k, v in _summed(self.rounds, other.rounds).items()}
        self.counts = {k: int(v) for k, v in _summed(self.counts, other.counts).items()}
        for name, value in other.peaks.items():
            self.peak(name, value)
        self.findings += other.findings
        self.commits = list(dict.fromkeys([*self.commits, *other.commits]))
        days = [self.first_day, self.last_day, other.first_day, other.last_day]
        days = sorted(filter(None, days))
        self.first_day, self.last_day = (days[0], days[-1]) if days else ("", "")

    @classmethod
    def of_today(cls) -> "Totals":
        """Empty, with this day and the commit that is checked out."""
        asked = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        today = time.strftime("%Y-%m-%d")
        commits = [asked.stdout.strip()] if asked.returncode == 0 else []
        return cls(commits=commits, first_day=today, last_day=today)

    @classmethod
    def read(cls, path: Path) -> "Totals":
        """What the file holds; nothing, where there is none."""
        if not path.exists():
            return cls()
        stored: dict[str, Any] = json.loads(path.read_text())
        stored["findings"] = [Finding(**one) for one in stored["findings"]]
        return cls(**stored)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")
        written.replace(path)


def _summed(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in [*one, *other]}


def report(totals: Totals) -> str:
    """Markdown: the answers first, then what was done."""
    bad = Counter(finding.kind for finding in totals.findings)
    hours = sum(totals.seconds.values()) / 3600
    lines = [
        f"{sum(totals.rounds.values())} rounds in {hours:.2f} hours, {totals.first_day} to "
        f"{totals.last_day}, commits {', '.join(totals.commits)}.",
        "",
        "| what | aim | so far |",
        "|---|---|---|",
        f"| processes killed | {KILLS_AIM:,} | {totals.sum_of('killed: '):,} |",
        f"| hostile frames | {FRAMES_AIM:,} | {totals.sum_of('frames: '):,} |",
        f"| soak without a killed node | {SOAK_SECONDS_AIM / 60:.0f} min "
        f"| {totals.seconds.get('soak', 0) / 60:.0f} min |",
        f"| publications acknowledged | | {totals.counts.get('acknowledged', 0):,} |",
        f"| reads compared byte for byte | | {totals.counts.get('verified', 0):,} |",
        f"| wrong bytes | 0 | {bad['wrong bytes']} |",
        f"| acknowledged and lost, though the holder lives | 0 | {bad['lost']} |",
        f"| calls that hung | 0 | {bad['hang']} |",
        f"| gauges or open files not back | 0 | {bad['gauge']} |",
        f"| processes that ended by themselves | 0 | {bad['ended']} |",
        f"| other findings | 0 | {bad['other'] + bad['memory']} |",
        "",
        "| round | rounds | minutes |",
        "|---|---|---|",
        *(
            f"| {name} | {totals.rounds[name]} | {totals.seconds.get(name, 0) / 60:.1f} |"
            for name in sorted(totals.rounds)
        ),
        "",
        "| counted | times |",
        "|---|---|",
        *(f"| {name} | {totals.counts[name]:,} |" for name in sorted(totals.counts)),
        "",
        "| largest value | |",
        "|---|---|",
        *(f"| {name} | {totals.peaks[name]:,.1f} |" for name in sorted(totals.peaks)),
        "",
    ]
    if totals.findings:
        lines += ["| finding | round | seed | |", "|---|---|---|---|"]
        lines += [
            f"| {one.kind} | {one.round} | {one.seed} | {_cell(one.text)} |"
            for one in totals.findings
        ]
    else:
        lines.append("No findings.")
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300]


if __name__ == "__main__":
    print(report(Totals.read(Path(sys.argv[1]))), end="")
