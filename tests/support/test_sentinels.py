"""The sentinels of tests/support/clusters.py themselves."""

import threading

import pytest

from clusters import Sentinels
from resp import RespError

pytestmark = pytest.mark.processes


def test_a_master_and_its_replica(sentinels: Sentinels) -> None:
    assert sentinels.master() is sentinels.servers[0]
    assert sentinels.ask(sentinels.master(), "SET", "k", "v") == b"OK"
    with pytest.raises(RespError, match="READONLY"):
        sentinels.ask(sentinels.replica(), "SET", "k", "v")


def test_a_command_is_repeated_after_a_lost_connection(own_sentinels: Sentinels) -> None:
    """A sentinel closes the connections of a server that it makes a master or a replica."""
    server, over = own_sentinels.master(), threading.Event()

    def cut_off() -> None:
        with server.connect() as connection:
            connection("AUTH", "of-servers")
            while not over.wait(0.01):
                connection("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    cutting = threading.Thread(target=cut_off)
    cutting.start()
    try:
        for number in range(300):
            assert own_sentinels.ask(server, "SET", "k", number) == b"OK"
    finally:
        over.set()
        cutting.join()
    assert own_sentinels.ask(server, "GET", "k") == b"299"


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
