"""What the demo's requests came to, and whether that is what the demo promises. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

# What a hit from another engine may cost on top of a repeat on the engine that encoded the image,
# and as a part of an encode.
HIT_OVER_REPEAT_SECONDS = 0.030
HIT_PART_OF_ENCODE = 0.1


class Purpose(StrEnum):
    """Why a request is asked; each has its place in the story."""

    WARM_UP = "warm-up"
    """Shown and compared with the engine without a connector, but in none of the figures."""
    FIRST = "first sight"
    REPEAT = "own repeat"
    OTHER = "other engine"
    AT_ONCE = "both at once"
    AGAIN = "after another image"


class Origin(StrEnum):
    """How an engine came by the image's encoding."""

    ENCODED = "encoded"
    LOADED = "loaded"
    CACHED = "own cache"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request and its answer."""

    purpose: Purpose
    engine: str
    photograph: str
    origin: Origin
    source: str
    """Where a loaded image lay before, in words; empty otherwise."""
    queued_seconds: float
    """The part of the next that the request waited for its turn, or for bytes on their way."""
    ttft_seconds: float
    tokens: tuple[int, ...]
    tokens_expected: tuple[int, ...]
    """Those of the engine without a connector."""

    @property
    def tokens_equal(self) -> bool:
        return self.tokens == self.tokens_expected


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """One record as it stands in Redis."""

    photograph: str
    namespace: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    nodes: tuple[str, ...]
    hits: int


@dataclass(frozen=True, slots=True)
class Promise:
    """Something the demo claims, and what was found."""

    text: str
    kept: bool
    found: str


@dataclass(frozen=True, slots=True)
class Result:
    """All that the demo found out."""

    model: str
    nbytes_per_image: int
    outcomes: tuple[Outcome, ...]
    encoder_runs: dict[str, int]
    """Per engine, without the warm-up."""
    encoder_runs_of_warm_up: dict[str, int]
    records: tuple[KeyFacts, ...]
    seconds: float

    @property
    def tokens_equal(self) -> bool:
        return all(outcome.tokens_equal for outcome in self.outcomes)

    @property
    def tokens_differ(self) -> bool:
        """Whether each photograph has its own tokens: only then does equality mean anything."""
        by_photograph = {o.photograph: o.tokens_expected for o in self.outcomes}
        return len(by_photograph) > 1 and len(set(by_photograph.values())) == len(by_photograph)

    @property
    def hits(self) -> int:
        """Images loaded instead of encoded, without the warm-up."""
        return self._loads(self.outcomes_counted)

    @property
    def hits_of_warm_up(self) -> int:
        return self._loads(self.outcomes) - self.hits

    @property
    def hits_in_redis(self) -> int:
        """What the nodes counted, without the warm-up's photograph."""
        counted = {outcome.photograph for outcome in self.outcomes_counted}
        return sum(record.hits for record in self.records if record.photograph in counted)

    @property
    def outcomes_counted(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.purpose is not Purpose.WARM_UP)

    @staticmethod
    def _loads(outcomes: Sequence[Outcome]) -> int:
        return sum(outcome.origin is Origin.LOADED for outcome in outcomes)

    def ttft(self, purpose: Purpose, origin: Origin) -> float | None:
        """Median seconds to the first token of such requests; None where there was none."""
        seconds = [
            outcome.ttft_seconds
            for outcome in self.outcomes
            if outcome.purpose is purpose and outcome.origin is origin
        ]
        return statistics.median(seconds) if seconds else None

    def ttft_summary(self) -> dict[str, float | None]:
        return {
            "encode": self.ttft(Purpose.FIRST, Origin.ENCODED),
            "own_repeat": self.ttft(Purpose.REPEAT, Origin.CACHED),
            "hit_from_other_engine": self.ttft(Purpose.OTHER, Origin.LOADED),
            "hit_after_another_image": self.ttft(Purpose.AGAIN, Origin.LOADED),
            "waited_for_other_engine": self.ttft(Purpose.AT_ONCE, Origin.LOADED),
            "warm_up_encode": self.ttft(Purpose.WARM_UP, Origin.ENCODED),
            "warm_up_hit": self.ttft(Purpose.WARM_UP, Origin.LOADED),
        }

    def to_json(self, promises: Sequence[Promise]) -> dict[str, Any]:
        """The content of build/demo.json."""
        requests = [
            asdict(outcome) | {"tokens_equal": outcome.tokens_equal} for outcome in self.outcomes
        ]
        return {
            "model": self.model,
            "nbytes_per_image": self.nbytes_per_image,
            "encoder_runs": self.encoder_runs,
            "encoder_runs_of_warm_up": self.encoder_runs_of_warm_up,
            "tokens_equal": self.tokens_equal,
            "tokens_differ_between_images": self.tokens_differ,
            "hits": self.hits,
            "hits_of_warm_up": self.hits_of_warm_up,
            "hits_in_redis": self.hits_in_redis,
            "ttft_seconds": self.ttft_summary(),
            "requests": requests,
            "records": [asdict(record) for record in self.records],
            "promises": [asdict(promise) for promise in promises],
            "seconds": round(self.seconds, 1),
        }


def judge(result: Result, *, times_count: bool) -> list[Promise]:
    """What the demo promises, each kept or not.

    `times_count` is for the heavy model; the tiny one encodes in the time that a hit takes.
    """
    promises = [
        Promise(
            "tokens equal those of an engine without a connector",
            result.tokens_equal,
            "all equal" if result.tokens_equal else "some differ",
        ),
        Promise(
            "and differ between photographs, so that equal proves something",
            result.tokens_differ,
            "all differ" if result.tokens_differ else "not all differ",
        ),
        _origins(result, Purpose.FIRST, {Origin.ENCODED: 1}, "the first engine encodes it"),
        _origins(result, Purpose.OTHER, {Origin.LOADED: 1}, "the second engine only loads it"),
        _origins(result, Purpose.AGAIN, {Origin.LOADED: 1}, "loaded, not encoded again"),
    ]
    if times_count:
        promises += _judge_times(result)
    return promises


def _origins(result: Result, purpose: Purpose, expected: dict[Origin, int], text: str) -> Promise:
    found = [outcome.origin for outcome in result.outcomes if outcome.purpose is purpose]
    counts = {origin: found.count(origin) for origin in set(found)}
    shown = ", ".join(f"{count} × {origin}" for origin, count in sorted(counts.items()))
    return Promise(f"{purpose}: {text}", counts == expected, shown or "no such request")


def _judge_times(result: Result) -> list[Promise]:
    times = result.ttft_summary()
    hit, encode, repeat = times["hit_from_other_engine"], times["encode"], times["own_repeat"]
    if hit is None or encode is None or repeat is None:
        return [Promise("encode, repeat and hit were measured", False, str(times))]
    shown: Callable[[float], str] = lambda seconds: f"{seconds * 1e3:.0f} ms"  # noqa: E731
    return [
        Promise(
            "other engine: first token in a tenth of the time of an encode",
            hit <= HIT_PART_OF_ENCODE * encode,
            f"{shown(hit)} against {shown(encode)}",
        ),
        Promise(
            f"and at most {shown(HIT_OVER_REPEAT_SECONDS)} above the median own repeat",
            hit <= repeat + HIT_OVER_REPEAT_SECONDS,
            f"{shown(hit)} against {shown(repeat)}",
        ),
    ]
