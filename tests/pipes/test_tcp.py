"""`tcp` pipes: the contract, and several senders."""

from contextlib import ExitStack

import pytest

from contract_pipe import TOKEN, Ends, MakeEnds, PipeContract, closing, threads
from contract_pipe_limits import PipeLimitsContract
from contract_pipe_processes import (
    MakeListening,
    ProcessContract,
    listening,
    start_child,
)
from lookup_buffer.errors import ConfigError, NodeRefused, PipeTimeout
from lookup_buffer.pipes import PipeLimits, open_pipe

__all__ = ["closing", "listening", "start_child", "threads"]


@pytest.fixture
def make_ends(closing: ExitStack) -> MakeEnds:
    def make(limits: PipeLimits | None = None) -> Ends:
        a = open_pipe("tcp://127.0.0.1:0", listen=True, limits=limits)
        b = open_pipe(a.uri, limits=limits)
        closing.callback(a.abort)
        closing.callback(b.abort)
        return a, b

    return make


class TestTcpPipe(PipeContract, PipeLimitsContract):
    pass


@pytest.fixture
def make_listening() -> MakeListening:
    return lambda limits: open_pipe("tcp://127.0.0.1:0", listen=True, limits=limits)


class TestTcpPipeProcesses(ProcessContract):
    pass


def test_an_end_with_another_token_is_refused(closing: ExitStack) -> None:
    a = closing.enter_context(open_pipe("tcp://127.0.0.1:0", listen=True, token=TOKEN))
    for token in (None, TOKEN[::-1]):
        with pytest.raises(NodeRefused):
            open_pipe(a.uri, token=token)
    b = closing.enter_context(open_pipe(a.uri, token=TOKEN))
    b.send_tensor(None)
    assert a.recv_tensor(timeout=5.0) is None


def test_nobody_listens() -> None:
    with pytest.raises(PipeTimeout, match="nobody listens at tcp:"):
        open_pipe("tcp://127.0.0.1:9", timeout=0.2)


@pytest.mark.parametrize("uri", ["tcp://", "tcp://host", "udp://host:1", "host:1", "tcp://h:x"])
def test_an_address_that_is_none(uri: str) -> None:
    with pytest.raises(ConfigError, match="tcp://"):
        open_pipe(uri)
