"""The rate-limited log: each kind at once, none too often."""

import logging

import pytest

from lookup_buffer.node.storage import AGAIN_SECONDS, KINDS_MAX, FailureLog
from store import StoreError


def test_each_kind_is_logged_at_once_and_again_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    failures = FailureLog(lambda: now)
    for _ in range(3):
        for reason in ("one", "another"):
            failures.log("it failed", StoreError(reason))
    assert caplog.messages == ["it failed: one", "it failed: another"]
    now += AGAIN_SECONDS
    failures.log("it failed", StoreError("one"))
    assert len(caplog.messages) == 3


def test_reasons_that_never_repeat_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    failures = FailureLog(lambda: now)
    for n in range(1000):
        failures.log("it failed", StoreError(str(n)))
    assert len(caplog.messages) == KINDS_MAX
    now += AGAIN_SECONDS
    failures.log("it failed", StoreError("new"))
    assert caplog.messages[-1] == "it failed: new"


def test_what_is_no_error_of_the_store_is_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    failures.log("this", StoreError("wrong"))
    failures.log("that", ZeroDivisionError("by zero"))
    first, second = caplog.records
    assert (first.levelno, first.getMessage(), first.exc_info) == (
        logging.WARNING, "this: wrong", None
    )  # fmt: skip
    assert second.levelno == logging.ERROR
    assert second.getMessage().startswith("that: ZeroDivisionError('by zero'); this is a bug")
    assert second.exc_info, "where it was"
