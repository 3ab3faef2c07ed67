"""The checks of the demo: each of them can fail, and the figures are right."""

import json
from dataclasses import replace

import pytest

from examples.demo.outcome import (
    KeyFacts,
    Origin,
    Outcome,
    Promise,
    Purpose,
    Result,
    exit_code,
    judge,
)

TOKENS = {"cat": (1, 2, 3), "coffee": (4, 5, 6), "rocket": (7, 8, 9)}
CAT = TOKENS["cat"]


def _outcome(
    purpose: Purpose,
    engine: str,
    origin: Origin,
    seconds: float,
    photograph: str = "cat",
) -> Outcome:
    tokens = TOKENS[photograph]
    source = "host-a over TCP" if origin is Origin.LOADED else ""
    return Outcome(purpose, engine, photograph, origin, source, 0.0, seconds, tokens, tokens)


GOOD = Result(
    model="heavy",
    nbytes_per_image=8,
    outcomes=(
        _outcome(Purpose.FIRST, "a", Origin.ENCODED, 4.0),
        _outcome(Purpose.REPEAT, "a", Origin.CACHED, 0.090),
        _outcome(Purpose.REPEAT, "a", Origin.CACHED, 0.010),
        _outcome(Purpose.REPEAT, "a", Origin.CACHED, 0.011),
        _outcome(Purpose.OTHER, "b", Origin.LOADED, 0.040),
        _outcome(Purpose.AT_ONCE, "a", Origin.ENCODED, 4.0, "coffee"),
        _outcome(Purpose.AT_ONCE, "b", Origin.LOADED, 4.1, "coffee"),
        _outcome(Purpose.AGAIN, "a", Origin.LOADED, 0.015),
        # Last, so that the places above are easy to count; slow, so that it would be noticed.
        _outcome(Purpose.WARM_UP, "a", Origin.ENCODED, 60.0, "rocket"),
        _outcome(Purpose.WARM_UP, "b", Origin.LOADED, 50.0, "rocket"),
    ),
    encoder_runs={"a": 2, "b": 0},
    encoder_runs_of_warm_up={"a": 1, "b": 0},
    records=(
        KeyFacts("rocket", "n", "j", "float32", (1, 2), 8, ("a", "b"), 1),
        KeyFacts("cat", "n", "k", "float32", (1, 2), 8, ("a", "b"), 2),
        KeyFacts("coffee", "n", "l", "float32", (1, 2), 8, ("a", "b"), 1),
    ),
    seconds=1.0,
)


def _broken(result: Result, *, times_count: bool = True) -> list[Promise]:
    return [promise for promise in judge(result, times_count=times_count) if not promise.kept]


def _with(index: int, outcome: Outcome) -> Result:
    outcomes = list(GOOD.outcomes)
    outcomes[index] = outcome
    return replace(GOOD, outcomes=tuple(outcomes))


def test_a_good_run_keeps_every_promise() -> None:
    assert _broken(GOOD) == []


def test_one_other_token_breaks_the_first_promise() -> None:
    (broken,) = _broken(_with(4, replace(GOOD.outcomes[4], tokens=(1, 2, 9))))
    assert "tokens equal" in broken.text


def test_the_warm_ups_tokens_count_too() -> None:
    (broken,) = _broken(_with(9, replace(GOOD.outcomes[9], tokens=(7, 8, 1))))
    assert "tokens equal" in broken.text


def test_equal_tokens_for_both_photographs_prove_nothing() -> None:
    same = tuple(replace(o, tokens=CAT, tokens_expected=CAT) for o in GOOD.outcomes)
    (broken,) = _broken(replace(GOOD, outcomes=same))
    assert "differ between" in broken.text


def test_a_single_photograph_proves_nothing() -> None:
    only_cat = tuple(o for o in GOOD.outcomes if o.photograph == "cat")
    texts = [promise.text for promise in _broken(replace(GOOD, outcomes=only_cat))]
    assert any("differ between" in text for text in texts)


def test_an_encode_on_the_second_engine_is_named() -> None:
    encoded = _outcome(Purpose.OTHER, "b", Origin.ENCODED, 0.040)
    texts = [promise.text for promise in _broken(_with(4, encoded))]
    assert any("second engine only loads" in text for text in texts)
    assert any("were measured" in text for text in texts)


def test_an_encode_after_another_image_is_named() -> None:
    encoded = _with(7, _outcome(Purpose.AGAIN, "a", Origin.ENCODED, 4.0))
    (broken,) = _broken(encoded)
    assert "encoded" in broken.found


def test_an_image_that_both_engines_encode_at_once_breaks_a_promise() -> None:
    both = _with(6, _outcome(Purpose.AT_ONCE, "b", Origin.ENCODED, 4.0, "coffee"))
    (broken,) = _broken(replace(both, encoder_runs={"a": 2, "b": 0}))
    assert "both at once" in broken.text
    assert broken.found == "2 × encoded"


def test_an_image_is_encoded_once_in_the_fleet() -> None:
    (broken,) = _broken(replace(GOOD, encoder_runs={"a": 2, "b": 1}))
    assert "once in the whole fleet" in broken.text
    assert broken.found == "3 encodes of 2 images"
    assert not broken.is_time


def test_hits_that_redis_does_not_count_break_a_promise() -> None:
    (broken,) = _broken(replace(GOOD, records=GOOD.records[:2]))
    assert broken.text == "Redis counts every hit"
    assert broken.found == "2 of 3"


def test_a_missing_request_breaks_its_promise() -> None:
    (broken,) = _broken(replace(GOOD, outcomes=GOOD.outcomes[:7] + GOOD.outcomes[8:]))
    assert broken.found == "no such request"


def test_a_hit_may_cost_thirty_milliseconds_over_the_median_repeat() -> None:
    assert _broken(_with(4, _outcome(Purpose.OTHER, "b", Origin.LOADED, 0.0409))) == []
    slow = _with(4, _outcome(Purpose.OTHER, "b", Origin.LOADED, 0.0411))
    (broken,) = _broken(slow)
    assert "30 ms above" in broken.text
    assert "41 ms against 11 ms" in broken.found
    assert broken.is_time
    assert _broken(slow, times_count=False) == []


def test_a_hit_may_cost_a_tenth_of_an_encode() -> None:
    slow = _with(4, _outcome(Purpose.OTHER, "b", Origin.LOADED, 0.5))
    assert any("tenth" in promise.text for promise in _broken(slow))
    assert all(promise.is_time for promise in _broken(slow))


def test_a_missed_deadline_is_reported_and_is_no_failure() -> None:
    slow = _with(4, _outcome(Purpose.OTHER, "b", Origin.LOADED, 0.0411))
    promises = judge(slow, times_count=True)
    assert exit_code(promises) == 0
    figures = slow.to_json(promises)
    (missed,) = figures["times_missed"]
    assert "30 ms above" in missed
    assert GOOD.to_json(judge(GOOD, times_count=True))["times_missed"] == []


@pytest.mark.parametrize("times_count", [True, False])
def test_every_other_broken_promise_fails_the_command(times_count: bool) -> None:
    assert exit_code(judge(GOOD, times_count=times_count)) == 0
    wrong_token = _with(4, replace(GOOD.outcomes[4], tokens=(1, 2, 9)))
    assert exit_code(judge(wrong_token, times_count=times_count)) == 1
    encoded_twice = replace(GOOD, encoder_runs={"a": 2, "b": 1})
    assert exit_code(judge(encoded_twice, times_count=times_count)) == 1


def test_the_figures_are_complete() -> None:
    figures = json.loads(json.dumps(GOOD.to_json(judge(GOOD, times_count=True))))
    assert figures["encoder_runs"] == {"a": 2, "b": 0}
    assert figures["tokens_equal"] is True
    assert figures["tokens_differ_between_images"] is True
    assert figures["hits"] == 3
    assert figures["hits_in_redis"] == 3
    assert figures["encoder_runs_of_warm_up"] == {"a": 1, "b": 0}
    assert figures["hits_of_warm_up"] == 1
    assert figures["ttft_seconds"]["warm_up_hit"] == 50.0
    assert figures["ttft_seconds"]["own_repeat"] == 0.011
    assert figures["ttft_seconds"]["waited_for_other_engine"] == 4.1
    assert len(figures["requests"]) == len(GOOD.outcomes)
    assert figures["requests"][4]["source"] == "host-a over TCP"
    assert all(promise["kept"] for promise in figures["promises"])
