"""The fleet as the page shows it, sampled each second from the store only.

Counters are given as differences since the last sample (`point`), which the page sums over its
window, and as totals (`now`). `explain` returns the findings of `why` for the page, or the error
that the command would print. It must not depend on HTTP or the page.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lookup_buffer.dashboard.metrics import FAMILIES
from lookup_buffer.errors import InvalidKey
from lookup_buffer.inspection.access import CommandError, traces_of
from lookup_buffer.inspection.findings import IN_PROGRESS, PRESENT, Finding
from lookup_buffer.inspection.history import Activity, Address, Sample, history_of, take_sample
from lookup_buffer.node.counters import MISS_REASONS
from lookup_buffer.node.membership import Liveness
from lookup_buffer.times import DEAD_AFTER_SECONDS
from store import BrowsableStore, StoreError, StoreRefused, StoreUnavailable
from store.record import SAFE_NAME
from store.trace import hottest_of

RATE_SECONDS = 10
"""The period of the rates of nodes."""
HOTTEST_SHOWN = 12
HOT_SECONDS = 60
"""The period of the hit rates of keys."""
SPACES_MAX = 64
"""Namespaces whose hits one sample reads. Of more, each has its turn."""
SCAN_SECONDS = 5.0
"""Least pause between two scans for namespaces. Each scan reads all keys of the server."""
SCAN_SHARE = 0.02
"""Largest part of the time that scans may take: it lengthens the pause on a large server."""
GONE_SECONDS = 15 * 60.0
"""How long nodes that left are shown."""
GONE_MAX = 50
"""Most nodes that left and are shown."""
_SERIES = {family.name: family.series for family in FAMILIES}
TRANSFERS = _SERIES["transfer_bytes"]
"""The counter of transferred bytes, by direction and pipe."""
HITS = tuple(_SERIES["hits"].values())
HIT_BYTES = tuple(_SERIES["hit_bytes"].values())
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """One sample for the page: the present state, and what was counted since the last sample."""

    now: dict[str, Any]
    point: dict[str, Any] | None
    """None for the first sample."""


class FleetSampler:
    """Samples the fleet; keeps the samples of the last minute. Whoever made it calls `close`."""

    def __init__(self, store: BrowsableStore) -> None:
        self._store = store
        self._samples: deque[Sample] = deque(maxlen=HOT_SECONDS + 1)
        self._liveness = Liveness()
        self._first: dict[str, tuple[str, int]] = {}
        """The first heartbeat read of each node. A node is not alive while its heartbeat equals it.

        It is ("", 0) once the heartbeat has changed, or the description of the node was fresh.
        """
        self._gone: dict[str, float] = {}
        """Nodes that left, and when that was found (clock of the samples, seconds)."""
        self._spaces: list[str] = []
        self._turn = 0
        """The first of them whose hits are read next."""
        self._scan: asyncio.Task[tuple[list[str], float]] | None = None
        self._scan_at = 0.0

    async def sample(self) -> PageUpdate:
        """Take a sample: the present state, and what was counted since the last one.

        Raises:
            StoreError: the store cannot be reached or refuses the request.
        """
        self._scan_namespaces()
        began = time.monotonic()
        sample = await self._take(began)
        ages = await self._store.node_ages(sorted(sample.beats))
        read_seconds = time.monotonic() - began
        self._observe(sample, ages)
        before = self._samples[-1] if self._samples else None
        self._samples.append(sample)
        totals = sum(map(Counter, sample.counters.values()), Counter[str]())
        now = {
            "at": round(time.time(), 3),
            "asked_seconds": round(read_seconds, 4),
            "nodes": self._nodes(sample, ages) + await self._departed(sample),
            "hits": _hits(totals),
            "hit_bytes": sum(totals[name] for name in HIT_BYTES),
            "misses": _misses(totals),
            "transfers": self._transfers(sample),
            "claims": sum(info.claims or 0 for info in sample.infos.values()),
            "hottest": self._hottest(sample),
        }
        return PageUpdate(now, None if before is None else _point(Activity(before, sample), now))

    async def _take(self, now: float) -> Sample:
        """A sample, with the hits that were last read in namespaces which are not read this time.

        Samples share the texts of keys: each of a minute would else have its own.
        """
        turn = self._spaces[self._turn :] + self._spaces[: self._turn]
        spaces, others = turn[:SPACES_MAX], set(turn[SPACES_MAX:])
        self._turn = (self._turn + len(spaces)) % max(1, len(turn))
        sample = await take_sample(self._store, spaces, now)
        before = self._samples[-1].hits if self._samples else {}
        hits = {at: count for at, count in before.items() if at[0] in others}
        known = {at: at for at in before}
        hits |= {known.get(at, at): count for at, count in sample.hits.items()}
        return replace(sample, hits=hottest_of(hits) if others else hits)

    def close(self) -> None:
        if self._scan is not None:
            self._scan.cancel()

    # -- nodes

    def _observe(self, sample: Sample, ages: Mapping[str, float]) -> None:
        beats = {node: (beat.boot, beat.sequence) for node, beat in sample.beats.items()}
        previous = self._samples[-1].beats if self._samples else {}
        for node in previous.keys() - beats.keys():
            self._gone[node] = sample.at
        self._gone = {
            node: at
            for node, at in list(self._gone.items())[-GONE_MAX:]
            if node not in beats and sample.at - at < GONE_SECONDS
        }
        for node, beat in beats.items():
            if self._first.setdefault(node, beat) != beat or _is_fresh(ages.get(node)):
                self._first[node] = ("", 0)
        self._first = {node: first for node, first in self._first.items() if node in beats}
        self._liveness.observe(beats, sample.at)

    def _nodes(self, sample: Sample, ages: Mapping[str, float]) -> list[dict[str, Any]]:
        recent = Activity(self._since(RATE_SECONDS), sample)
        found = []
        for node, beat in sorted(sample.beats.items()):
            info, counted = sample.infos.get(node), recent.of_node(node)
            alive = self._first[node] != (beat.boot, beat.sequence) and self._liveness.alive(
                node, beat.boot, sample.at
            )
            silent = ages.get(node)
            found.append(
                {
                    "node": node,
                    "state": "alive" if alive else "dead",
                    "silent_seconds": None if alive or silent is None else round(silent, 1),
                    "host": info.host if info else None,
                    "endpoint": info.endpoint if info else None,
                    "version": info.version if info else None,
                    "items": info.items if info else None,
                    "used_bytes": info.used_bytes if info else None,
                    "capacity_bytes": info.capacity_bytes if info else None,
                    "claims": info.claims if info else None,
                    "hits_per_second": round(_hits(counted) / recent.seconds, 2),
                    "misses_per_second": round(sum(_misses(counted).values()) / recent.seconds, 2),
                }
            )
        return found

    async def _departed(self, sample: Sample) -> list[dict[str, Any]]:
        if not self._gone:
            return []
        departures = await traces_of(self._store).departures(sorted(self._gone))
        return [
            {
                "node": node,
                "state": "stopped" if departures[node].reason == "stopped" else "gone",
                "silent_seconds": round(sample.at - at, 1),
            }
            for node, at in sorted(self._gone.items())
        ]

    # -- counters

    def _since(self, seconds: int) -> Sample:
        return self._samples[max(0, len(self._samples) - 1 - seconds)]

    def _transfers(self, sample: Sample) -> list[dict[str, Any]]:
        """Bytes by direction and pipe: total, and per second over RATE_SECONDS."""
        recent = Activity(self._since(RATE_SECONDS), sample)
        counted = recent.of_all()
        return [
            {
                "direction": direction,
                "pipe": pipe,
                "bytes": sum(node.get(name, 0) for node in sample.counters.values()),
                "bytes_per_second": round(counted[name] / recent.seconds),
            }
            for (direction, pipe), name in TRANSFERS.items()
        ]

    def _hottest(self, sample: Sample) -> list[dict[str, Any]]:
        """The hottest keys: most hits per second first; among equals, most total hits."""
        rates = {address: self._hit_rate(address, sample) for address in sample.hits}
        hottest = sorted(rates, key=lambda one: (-rates[one], -sample.hits[one], one))
        return [
            {
                "namespace": address[0],
                "key": address[1],
                "hits": sample.hits[address],
                "hits_per_second": round(rates[address], 3),
            }
            for address in hottest[:HOTTEST_SHOWN]
        ]

    def _hit_rate(self, address: Address, sample: Sample) -> float:
        """Hits per second, since the first sample of the last minute that has the key."""
        first = next(one for one in self._samples if address in one.hits)
        hits = max(0, sample.hits[address] - first.hits[address])
        return hits / max(1.0, sample.at - first.at)

    # -- namespaces

    def _scan_namespaces(self) -> None:
        """Start a scan for namespaces if one is due, or take the result of a finished one."""
        if self._scan is None:
            if time.monotonic() >= self._scan_at:
                self._scan = asyncio.create_task(_namespaces(self._store))
            return
        if self._scan.done():
            scan, self._scan = self._scan, None
            self._scan_at = time.monotonic() + SCAN_SECONDS
            self._spaces, took_seconds = scan.result()
            self._scan_at += took_seconds / SCAN_SHARE


async def _namespaces(store: BrowsableStore) -> tuple[list[str], float]:
    began = time.monotonic()
    names = sorted(name for name in await store.namespaces() if SAFE_NAME.match(name))
    return names, time.monotonic() - began


def _point(activity: Activity, now: Mapping[str, Any]) -> dict[str, Any]:
    counted = activity.of_all()
    return {
        "at": now["at"],
        "seconds": round(activity.seconds, 3),
        "hits": _hits(counted),
        "misses": _misses(counted),
        "bytes": {
            f"{direction} {pipe}": counted[name]
            for (direction, pipe), name in TRANSFERS.items()
            if counted[name]
        },
        "claims": now["claims"],
    }


def _hits(counted: Mapping[str, int]) -> int:
    return sum(counted.get(name, 0) for name in HITS)


def _misses(counted: Mapping[str, int]) -> dict[str, int]:
    """The number of misses by reason, without reasons that did not occur."""
    found = {reason: counted.get(f"misses_{reason}", 0) for reason in MISS_REASONS}
    return {reason: count for reason, count in found.items() if count}


def _is_fresh(age_seconds: float | None) -> bool:
    """Whether a node with a description of this age is alive when its heartbeat is first read."""
    return age_seconds is not None and age_seconds <= DEAD_AFTER_SECONDS


async def explain(store: BrowsableStore, key: str, namespace: str) -> dict[str, Any]:
    """The findings of `key`, or the error under `problem`; never raises."""
    try:
        history = await history_of(store, key, namespace)
        findings = list(history.findings())
    except (CommandError, InvalidKey, ValueError) as error:
        return {"key": key, "problem": str(error)}
    except StoreError as error:
        return {"key": key, "problem": store_error_text(error)}
    except Exception:  # noqa: BLE001 -- a bug of ours must not keep the page waiting
        _log.exception("a question of the page failed: this is a bug, please report it")
        return {"key": key, "problem": "the question failed; see the node's log"}
    return {
        "key": history.key,
        "found": any(one.code in PRESENT for one in findings),
        "findings": [{**asdict(one), "state": _state(one)} for one in findings],
    }


def store_error_text(error: StoreError) -> str:
    """The error of the store, and what to do."""
    text = " ".join(str(error).split())
    if isinstance(error, StoreRefused) and error.forbidden:
        return f"{text}; give the user the rights in docs/redis-keys.md"
    if isinstance(error, StoreUnavailable):
        return f"Redis is not reached: {text}"
    return text


def _state(finding: Finding) -> str:
    if finding.code in PRESENT:
        return "there"
    return "coming" if finding.code in IN_PROGRESS else "missing"
