"""The end of the demo's output: what a reader has to find there, however narrow the terminal."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from examples.demo.outcome import Origin, Outcome, Promise, Purpose, Result
from examples.demo.report import describe, summary, verdict


def _outcome(purpose: Purpose, engine: str, origin: Origin, source: str = "") -> Outcome:
    tokens = (123, 45, 67, 89)
    return Outcome(purpose, engine, "cat", origin, source, 0.0, 3.6414, tokens, tokens)


RESULT = Result(
    model="heavy",
    nbytes_per_image=8,
    outcomes=(
        _outcome(Purpose.WARM_UP, "host-a", Origin.ENCODED),
        _outcome(Purpose.OTHER, "host-b", Origin.LOADED, "host-a over TCP"),
        _outcome(Purpose.AT_ONCE, "host-a", Origin.ENCODED),
        _outcome(Purpose.AT_ONCE, "host-b", Origin.ENCODED),
    ),
    encoder_runs={"host-a": 2, "host-b": 1},
    encoder_runs_of_warm_up={"host-a": 1, "host-b": 0},
    records=(),
    seconds=1.0,
)


def _shown(result: Result, *promises: Promise, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(*summary(result, promises), sep="\n")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_nothing_is_cut_off(width: int) -> None:
    shown = _shown(RESULT, width=width)
    assert max(map(len, shown.splitlines())) <= width
    for word in ("warm-up", "host-b", "loaded:", "TCP", "3,641 ms", "123 45 67…", "yes"):
        assert word in shown


def test_each_answered_request_has_a_line() -> None:
    line = describe(RESULT.outcomes[1])
    assert "other engine: cat to host-b: loaded: host-a over TCP" in line
    assert "3,641 ms" in line


def test_tokens_that_differ_are_seen() -> None:
    wrong = replace(RESULT.outcomes[1], tokens=(123, 45, 67, 90))
    assert "NO" not in _shown(RESULT)
    assert "NO" in _shown(replace(RESULT, outcomes=(wrong,)))


def test_a_broken_promise_is_seen() -> None:
    assert "NO" not in _shown(RESULT, Promise("it is fast", True, "1 ms"))
    assert "NO" in _shown(RESULT, Promise("it is true", False, "it is not"))


def test_a_missed_deadline_is_reported_and_is_no_failed_check() -> None:
    missed = Promise("it is fast", False, "9 s", is_time=True)
    shown = _shown(RESULT, missed)
    assert "missed" in shown
    assert "9 s" in shown
    assert "NO" not in shown
    (line,) = verdict([missed, Promise("it is faster", True, "1 s", is_time=True)])
    assert "Time missed" in line
    assert "it is fast (9 s)" in line


def test_that_both_encode_is_explained_only_where_both_did() -> None:
    assert "both engines encoded it" in _shown(RESULT)
    loaded = _outcome(Purpose.AT_ONCE, "host-b", Origin.LOADED, "host-a over TCP")
    assert "both engines encoded it" not in _shown(
        replace(RESULT, outcomes=(*RESULT.outcomes[:3], loaded))
    )


def test_encodes_of_the_warm_up_are_counted_apart() -> None:
    shown = _shown(RESULT)
    assert "host-a 2, host-b 1" in shown
    assert "to warm up: host-a 1, host-b 0" in shown
