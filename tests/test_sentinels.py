"""The sentinels of tests/sentinels.py themselves."""

import pytest

from resp import RespError
from sentinels import Sentinels


def test_a_master_and_its_replica(sentinels: Sentinels) -> None:
    assert sentinels.master() is sentinels.servers[0]
    assert sentinels.ask(sentinels.master(), "SET", "k", "v") == b"OK"
    with pytest.raises(RespError, match="READONLY"):
        sentinels.ask(sentinels.replica(), "SET", "k", "v")


def test_a_dead_master_is_replaced(own_sentinels: Sentinels) -> None:
    old = own_sentinels.master()
    for process in (old, own_sentinels.sentinels[0]):
        with pytest.raises(RespError, match="NOAUTH"):
            process.command("INFO")
    own_sentinels.ask(old, "SET", "k", "v")
    new = own_sentinels.fail_over()
    assert new is not old
    assert own_sentinels.ask(new, "SET", "k2", "v") == b"OK"
    assert own_sentinels.ask(new, "GET", "k") == b"v"
    old.restart()
    assert own_sentinels.master() is new


def test_a_frozen_master_is_replaced(own_sentinels: Sentinels) -> None:
    old, new = own_sentinels.master(), own_sentinels.replica()
    old.stop()
    own_sentinels.wait_for_master(new)
    old.go_on()
    assert own_sentinels.ask(new, "SET", "k", "v") == b"OK"
