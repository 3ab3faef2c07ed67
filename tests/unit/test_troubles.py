"""The rate-limited log: each kind at once, none too often."""

import pytest

from lookup_buffer.node.registrar import AGAIN_SECONDS, KINDS_MAX, Troubles


def test_each_kind_is_logged_at_once_and_again_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    troubles = Troubles(lambda: now)
    for _ in range(3):
        for reason in ("one", "another"):
            troubles.log("it failed", ValueError(reason))
    assert caplog.messages == ["it failed: one", "it failed: another"]
    now += AGAIN_SECONDS
    troubles.log("it failed", ValueError("one"))
    assert len(caplog.messages) == 3


def test_reasons_that_never_repeat_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    troubles = Troubles(lambda: now)
    for n in range(1000):
        troubles.log("it failed", ValueError(str(n)))
    assert len(caplog.messages) == KINDS_MAX
    now += AGAIN_SECONDS
    troubles.log("it failed", ValueError("new"))
    assert caplog.messages[-1] == "it failed: new"


def test_only_the_errors_named_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    troubles = Troubles()

    def fail(error: Exception) -> None:
        with troubles.logged("this", ValueError, KeyError):
            raise error

    fail(ValueError("wrong"))
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())
    assert caplog.messages == ["this: wrong"]
