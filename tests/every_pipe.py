"""Two connected ends of a pipe, for tests that every scheme is to pass: the fixture `make_ends`."""

from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from contract_pipe import Ends, MakeEnds
from lookup_buffer.pipes import PipeLimits, open_pipe
from store import EmbeddedServer

SCHEMES = ("inproc", "shm", "tcp", "redis", "gloo")
_numbers = count()


@pytest.fixture(params=SCHEMES)
def make_ends(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    valkey_server: EmbeddedServer,
    closing: ExitStack,
) -> MakeEnds:
    def make(limits: PipeLimits | None = None) -> Ends:
        number = next(_numbers)
        uris = {
            "inproc": f"inproc://every-{number}",
            "shm": f"shm://{tmp_path}/{number}",
            "tcp": "tcp://127.0.0.1:0",
            "redis": f"{valkey_server.url}?pipe=every-{number}",
            "gloo": "gloo://127.0.0.1:0",
        }
        a = open_pipe(uris[request.param], listen=True, limits=limits)
        closing.callback(a.abort)
        b = open_pipe(a.uri, limits=limits)
        closing.callback(b.abort)
        return a, b

    return make


@pytest.fixture
def ends(make_ends: MakeEnds) -> Ends:
    return make_ends()
