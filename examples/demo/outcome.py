"""The results of the demo's requests, and which of the demo's promises they keep. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

# Most time of a hit from another engine: beyond that of a repeat on the engine that encoded the
# image, and as a part of an encode's.
HIT_OVER_REPEAT_SECONDS = 0.030
HIT_PART_OF_ENCODE = 0.1


class Purpose(StrEnum):
    """The purpose of a request in the demo."""

    WARM_UP = "warm-up"
    """Shown and compared with the engine without a connector, but in none of the figures."""
    FIRST = "first sight"
    REPEAT = "own repeat"
    OTHER = "other engine"
    AT_ONCE = "both at once"
    AGAIN = "after another image"


class Origin(StrEnum):
    """How an engine got the encoding of the image."""

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
    """Where the encoding of a loaded image was before, as text; otherwise empty."""
    queued_seconds: float
    """The part of `ttft_seconds` in which the request waited for its turn or for a transfer."""
    ttft_seconds: float
    tokens: tuple[int, ...]
    tokens_expected: tuple[int, ...]
    """The tokens of the engine without a connector."""

    @property
    def tokens_equal(self) -> bool:
        return self.tokens == self.tokens_expected


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """One record as it is in Redis."""

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
    """A claim of the demo, and what was found."""

    text: str
    kept: bool
    found: str
    is_time: bool = False
    """Times depend on other load of the machine: a missed one is reported, but is not a failure."""


@dataclass(frozen=True, slots=True)
class Result:
    """All results of the demo."""

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
        """Whether each photograph has its own tokens; if not, equal tokens prove nothing."""
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
        """The hits that the nodes counted, without the warm-up's photograph."""
        counted = self.photographs_counted
        return sum(record.hits for record in self.records if record.photograph in counted)

    @property
    def photographs_counted(self) -> set[str]:
        """All photographs except the warm-up's."""
        return {outcome.photograph for outcome in self.outcomes_counted}

    @property
    def outcomes_counted(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.purpose is not Purpose.WARM_UP)

    @staticmethod
    def _loads(outcomes: Sequence[Outcome]) -> int:
        return sum(outcome.origin is Origin.LOADED for outcome in outcomes)

    def ttft(self, purpose: Purpose, origin: Origin) -> float | None:
        """Median seconds to the first token of such requests; None if there are none."""
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
            "times_missed": [p.text for p in promises if p.is_time and not p.kept],
            "seconds": round(self.seconds, 1),
        }


def judge(result: Result, *, times_count: bool) -> list[Promise]:
    """The promises of the demo, each kept or broken.

    `times_count`: whether promises about times are included. They are for the heavy model; the
    tiny one encodes in the time that a hit takes.
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
        _origins(
            result,
            Purpose.AT_ONCE,
            {Origin.ENCODED: 1, Origin.LOADED: 1},
            "one engine encodes, the other waits and loads it",
        ),
        _origins(result, Purpose.AGAIN, {Origin.LOADED: 1}, "loaded, not encoded again"),
        _encodes(result),
        _hits(result),
    ]
    if times_count:
        promises += _judge_times(result)
    return promises


def exit_code(promises: Sequence[Promise]) -> int:
    """1 if a promise other than one about times is broken, else 0."""
    return int(any(not promise.kept and not promise.is_time for promise in promises))


def _origins(result: Result, purpose: Purpose, expected: dict[Origin, int], text: str) -> Promise:
    found = [outcome.origin for outcome in result.outcomes if outcome.purpose is purpose]
    counts = {origin: found.count(origin) for origin in set(found)}
    shown = ", ".join(f"{count} × {origin}" for origin, count in sorted(counts.items()))
    return Promise(f"{purpose}: {text}", counts == expected, shown or "no such request")


def _encodes(result: Result) -> Promise:
    runs, images = sum(result.encoder_runs.values()), len(result.photographs_counted)
    return Promise(
        "each image is encoded once in the whole fleet",
        runs == images,
        f"{runs} encodes of {images} images",
    )


def _hits(result: Result) -> Promise:
    found = f"{result.hits_in_redis} of {result.hits}"
    return Promise("Redis counts every hit", 0 < result.hits <= result.hits_in_redis, found)


def _judge_times(result: Result) -> list[Promise]:
    times = result.ttft_summary()
    hit, encode, repeat = times["hit_from_other_engine"], times["encode"], times["own_repeat"]
    if hit is None or encode is None or repeat is None:
        return [Promise("encode, repeat and hit were measured", False, str(times), is_time=True)]
    shown: Callable[[float], str] = lambda seconds: f"{seconds * 1e3:.0f} ms"  # noqa: E731
    return [
        Promise(
            "other engine: first token in a tenth of the time of an encode",
            hit <= HIT_PART_OF_ENCODE * encode,
            f"{shown(hit)} against {shown(encode)}",
            is_time=True,
        ),
        Promise(
            f"and at most {shown(HIT_OVER_REPEAT_SECONDS)} above the median own repeat",
            hit <= repeat + HIT_OVER_REPEAT_SECONDS,
            f"{shown(hit)} against {shown(repeat)}",
            is_time=True,
        ),
    ]
