"""`tcp` pipes: the contract, and several senders."""

from contextlib import ExitStack
from functools import partial

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
from lookup_buffer.errors import ConfigError, PipeTimeout
from lookup_buffer.pipes import open_pipe
from pipe_ends import TokenContract, connected_ends

__all__ = ["closing", "listening", "patient", "start_child", "threads"]


@pytest.fixture
def uri() -> str:
    return "tcp://127.0.0.1:0"


@pytest.fixture
def make_ends(closing: ExitStack, uri: str) -> MakeEnds:
    return partial(connected_ends, closing, uri)


class TestTcpPipe(PipeContract, PipeLimitsContract, TokenContract):
    pass


@pytest.fixture
def make_listening(uri: str) -> MakeListening:
    return lambda limits: open_pipe(uri, listen=True, limits=limits)


class TestTcpPipeProcesses(ProcessContract):
    pass


def test_connecting_without_a_listener_times_out() -> None:
    with pytest.raises(PipeTimeout, match="no end listens at tcp:"):
        open_pipe("tcp://127.0.0.1:9", timeout=0.2)


@pytest.mark.parametrize("uri", ["tcp://", "tcp://host", "udp://host:1", "host:1", "tcp://h:x"])
def test_invalid_addresses(uri: str) -> None:
    with pytest.raises(ConfigError, match="tcp://"):
        open_pipe(uri)
