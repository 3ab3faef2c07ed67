"""Whose a connection is, as the kernel knows it."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from lookup_buffer.dashboard import users
from lookup_buffer.dashboard.users import ASK_SECONDS, WAITING_MAX, Users
from patience import scaled

MINE = f"user {os.geteuid()}"
PAIRS = {
    "both of IPv4": ("127.0.0.1", "127.0.0.1"),
    "both of IPv6": ("::1", "::1"),
    "a client of IPv6": ("127.0.0.1", "::ffff:127.0.0.1"),
    "a listener of IPv6": ("::ffff:127.0.0.1", "127.0.0.1"),
}


@contextmanager
def connected(listens: str, dials: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The dialler, and the end that was accepted."""
    families = [socket.AF_INET6 if ":" in host else socket.AF_INET for host in (listens, dials)]
    with socket.socket(families[0]) as listener, socket.socket(families[1]) as dialler:
        try:
            listener.bind((listens, 0))
        except OSError as error:
            pytest.skip(f"no {listens} here: {error}")
        listener.listen()
        dialler.connect((dials, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with closing(accepted):
            yield dialler, accepted


def user_of(scope: dict[str, Any]) -> str:
    return asyncio.run(Users().user_of(scope))


def scope_of(accepted: socket.socket) -> dict[str, Any]:
    """As uvicorn makes it."""
    return {"client": accepted.getpeername()[:2], "server": accepted.getsockname()[:2]}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_connection_of_this_host_has_its_user(pair: tuple[str, str]) -> None:
    with connected(*pair) as (_, accepted):
        assert user_of(scope_of(accepted)) == MINE


def test_the_user_is_that_of_who_dialled() -> None:
    with connected("127.0.0.1", "127.0.0.1") as (dialler, accepted):
        try:
            os.fchown(dialler.fileno(), 65534, -1)  # so the kernel says that it is another's
        except PermissionError as error:
            pytest.skip(f"needs root: {error}")
        assert user_of(scope_of(accepted)) == "user 65534"
        scope = scope_of(accepted)
        assert user_of({"client": scope["server"], "server": scope["client"]}) == MINE


def test_one_that_its_process_has_closed_is_of_nobody() -> None:
    with connected("127.0.0.1", "127.0.0.1") as (dialler, accepted):
        dialler.close()
        assert user_of(scope_of(accepted)) == "unknown"


@pytest.mark.parametrize(
    ("client", "user"), [("127.0.0.1", "unknown"), ("192.0.2.1", "192.0.2.1"), ("fe80::1%x",) * 2]
)
def test_one_of_another_host_is_of_its_address(client: str, user: str) -> None:
    assert user_of({"client": (client, 1), "server": ("127.0.0.1", 2)}) == user
    assert user_of({"client": None, "server": ("127.0.0.1", 2)}) == "unknown"


def test_where_the_kernel_does_not_tell_all_users_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "NETLINK_SOCK_DIAG", 31)  # no such protocol
    with connected("127.0.0.1", "127.0.0.1") as (_, accepted):
        assert user_of(scope_of(accepted)) == "unknown"


def test_while_the_kernel_does_not_answer_nobody_waits_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before Linux 6.9 a process can keep it busy: it is asked by one thread."""
    over, asked = threading.Event(), []

    def ask(*ends: object) -> int:
        asked.append(ends)
        over.wait(scaled(10.0))
        return 7

    async def test(accepted: socket.socket) -> None:
        found, began = Users(), time.monotonic()
        scope = scope_of(accepted)
        questions = [asyncio.create_task(found.user_of(scope)) for _ in range(WAITING_MAX)]
        await asyncio.sleep(0)
        assert await found.user_of(scope) == "unknown"
        assert not any(question.done() for question in questions), "one more does not wait"
        assert await asyncio.gather(*questions) == ["unknown"] * WAITING_MAX
        assert time.monotonic() - began < ASK_SECONDS + scaled(1.0)
        assert len(asked) == 1
        over.set()
        monkeypatch.setattr(users, "_user_between", lambda *_: 8)
        async with asyncio.timeout(scaled(10.0)):
            while await found.user_of(scope) != "user 8":
                await asyncio.sleep(0.01)

    monkeypatch.setattr(users, "_user_between", ask)
    with connected("127.0.0.1", "127.0.0.1") as (_, accepted):
        asyncio.run(test(accepted))
