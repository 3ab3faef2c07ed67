"""A process of another user: `source` runs in it as NOBODY, and talks to the test.

It finds `send(value)`, `receive()`, `os` and `socket`. What else it needs it imports before it
becomes the other user, in `imports`, since that one may not be allowed to read the modules.
"""

import multiprocessing
import os
import socket
from typing import TYPE_CHECKING, Any, Final

import pytest

from patience import scaled

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NOBODY: Final = 65534


class OtherUser:
    """Skips the test where this process may not become another user."""

    def __init__(self, source: str, *arguments: object, imports: str = "") -> None:
        if os.getuid() != 0:
            pytest.skip("only root can start a process of another user")
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, imports, source, arguments))
        self._process.start()
        theirs.close()

    def send(self, value: Any) -> None:
        self._pipe.send(value)

    def receive(self, seconds: float = 20.0) -> Any:
        """The next value, which on an idle machine comes within `seconds`."""
        if not self._pipe.poll(scaled(seconds)):
            pytest.fail("the process of the other user says nothing")
        return self._pipe.recv()

    def __enter__(self) -> "OtherUser":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join(scaled(10.0))
        self._process.close()


def _run(
    pipe: "Connection[Any, Any]", imports: str, source: str, arguments: tuple[object, ...]
) -> None:
    names: dict[str, Any] = {
        "os": os, "socket": socket, "send": pipe.send, "receive": pipe.recv,
        "arguments": arguments,
    }  # fmt: skip
    "localhost".encode("idna")  # imports what `socket` imports at first use
    exec(imports, names)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    exec(source, names)
