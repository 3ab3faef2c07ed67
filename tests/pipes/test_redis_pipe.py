"""`redis` pipes: the contract on Valkey, its limits on Redis 7.0 as well, and the example."""

import subprocess
import sys
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from contract_pipe import MakeEnds, PipeContract, closing, threads
from contract_pipe_limits import PipeLimitsContract
from contract_pipe_processes import (
    MakeListening,
    ProcessContract,
    listening,
    patient,
    start_child,
)
from lookup_buffer.pipes import open_pipe
from patience import scaled
from pipe_ends import TokenContract, connected_ends
from store import EmbeddedServer

__all__ = ["closing", "listening", "patient", "start_child", "threads"]
_names = count()


def uri_at(server: EmbeddedServer) -> str:
    return f"{server.url}?pipe=test-{next(_names)}"


# Servers are arguments of fixtures, not taken by `getfixturevalue`: they outlive the test, and the
# guard against leaks must see them before it starts.


def make_ends_at(server: EmbeddedServer, closing: ExitStack) -> MakeEnds:
    return lambda limits=None: connected_ends(closing, uri_at(server), limits)


class TestRedisPipe(PipeContract, PipeLimitsContract, TokenContract):
    @pytest.fixture
    def uri(self, valkey_server: EmbeddedServer) -> str:
        return uri_at(valkey_server)

    @pytest.fixture
    def make_ends(self, valkey_server: EmbeddedServer, closing: ExitStack) -> MakeEnds:
        return make_ends_at(valkey_server, closing)


class TestRedisPipeOnTheOldestServer(PipeLimitsContract):
    @pytest.fixture
    def make_ends(self, redis_server: EmbeddedServer, closing: ExitStack) -> MakeEnds:
        return make_ends_at(redis_server, closing)


class TestRedisPipeProcesses(ProcessContract):
    @pytest.fixture
    def make_listening(self, valkey_server: EmbeddedServer) -> MakeListening:
        return lambda limits: open_pipe(uri_at(valkey_server), listen=True, limits=limits)


def test_the_example_runs(valkey_server: EmbeddedServer) -> None:
    example = str(Path(__file__).resolve().parents[2] / "examples" / "pipe_redis.py")
    uri = uri_at(valkey_server)
    with subprocess.Popen([sys.executable, example, "send", uri]) as sending:
        run = subprocess.run(
            [sys.executable, example, "receive", uri],
            capture_output=True, text=True, timeout=scaled(100), check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert sending.wait(30.0) == 0
    expected = [f"layer-{n}: (1024, 1024) of {n}" for n in (3, 0, 2, 1)]
    assert run.stdout.splitlines() == expected
