"""The measurement must be able to fail: a late call is found, and a stall is charged to no call."""

import ctypes
import time

import pytest

from memory_store import MemoryStore
from nodes import wait_until
from store_load import CALL_SECONDS, LIMIT_SECONDS, Caller, Stalls

STALL_SECONDS = 0.8


class Sleeper(Caller):
    """Each call waits, as for a server that does not answer."""

    def __init__(self, seconds: float) -> None:
        super().__init__(MemoryStore())
        self.seconds = seconds

    def step(self) -> None:
        self.timed(lambda: time.sleep(self.seconds))


@pytest.fixture
def hold_the_interpreter() -> ctypes.PyDLL:
    """Its functions keep all other threads waiting, as Python's collector does."""
    return ctypes.PyDLL(None)


def test_two_time_outs_in_a_row_are_late() -> None:
    caller = Sleeper(2 * CALL_SECONDS)
    with Stalls() as stalls:
        caller.start()
        wait_until(lambda: caller.late(stalls), 5.0)
        caller.end()
        caller.measure_anew()
        assert caller.late(stalls) == []


def test_what_the_process_lost_is_no_calls_fault(hold_the_interpreter: ctypes.PyDLL) -> None:
    caller = Sleeper(CALL_SECONDS)
    with Stalls() as stalls:
        caller.start()
        time.sleep(CALL_SECONDS / 2)
        hold_the_interpreter.usleep(round(STALL_SECONDS * 1e6))
        caller.end()
        assert caller.slowest > LIMIT_SECONDS, "there was no stall"
        assert caller.late(stalls) == []
