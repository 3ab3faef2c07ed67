"""`nccl` pipes: the contract, on two GPUs, or between processes that share one; and the errors
without a GPU."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch

from contract_pipe import LARGE, Ends, MakeEnds, PipeContract, closing, same, threads
from contract_pipe_limits import PipeLimitsContract
from contract_pipe_processes import (
    MakeListening,
    ProcessContract,
    listening,
    patient,
    start_child,
)
from lookup_buffer.errors import ConfigError, PipeBroken
from lookup_buffer.pipes import PipeLimits, open_pipe
from lookup_buffer.pipes.connect import open_tcp_end
from lookup_buffer.pipes.nccl import DeviceMemory, Nccl
from payloads import block
from pipe_ends import connected_ends

__all__ = ["closing", "listening", "patient", "start_child", "threads"]

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
a_gpu = pytest.mark.skipif(GPUS < 1, reason="no CUDA device on this machine")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"NCCL wants a GPU for each end; here are {GPUS}")


@pytest.fixture
def make_ends(closing: ExitStack) -> MakeEnds:
    def make(limits: PipeLimits | None = None) -> Ends:
        with torch.cuda.device(0):
            a = open_pipe("nccl://127.0.0.1:0", listen=True, limits=limits)
        with torch.cuda.device(1):
            b = open_pipe(a.uri, limits=limits)
        closing.callback(a.abort)
        closing.callback(b.abort)
        return a, b

    return make


class TestMemoryOfADevice(PipeContract, PipeLimitsContract):
    """To a device's memory and back, with the host as the device and Gloo instead of NCCL."""

    @pytest.fixture
    def make_ends(self, closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> MakeEnds:
        host = torch.device("cpu")
        on_host = partial(open_tcp_end, memory=DeviceMemory(host, host))
        monkeypatch.setattr("lookup_buffer.pipes.gloo.open_tcp_end", on_host)

        return partial(connected_ends, closing, "gloo://127.0.0.1:0")


def test_a_device_that_fails_while_a_communicator_is_made_ends_the_pipe(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises its own error; callers that wait for the communicator get PipeBroken."""

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr("lookup_buffer.pipes.gloo.GlooCommunicator", fails)
    a, b = connected_ends(closing, "gloo://127.0.0.1:0")
    a.send_tensor(block(LARGE))
    with pytest.raises(PipeBroken, match="CUDA error"):
        b.recv_tensor(timeout=20.0)


@pytest.mark.gpu
@two_gpus
class TestNcclPipe(PipeContract, PipeLimitsContract):
    pass


@pytest.fixture
def make_listening() -> MakeListening:
    return lambda limits: open_pipe("nccl://127.0.0.1:0", listen=True, limits=limits)


@pytest.mark.gpu
@a_gpu
class TestNcclProcesses(ProcessContract):
    """On one GPU: see `pipe_child`. NCCL then moves the bytes over sockets."""


@pytest.mark.gpu
@two_gpus
def test_an_end_receives_to_the_gpu_that_its_address_names(closing: ExitStack) -> None:
    a = open_pipe("nccl://127.0.0.1:0?device=cuda:0", listen=True)
    b = open_pipe(f"{a.uri}?device=cuda:1")
    closing.callback(a.abort)
    closing.callback(b.abort)
    for nbytes in (100, LARGE, 0):
        a.send_tensor(block(nbytes).cuda(0), "k")
        received = b.recv_tensor("k")
        assert received is not None
        assert received.device == torch.device("cuda", 1)
        assert same(received.cpu(), block(nbytes))


def test_a_missing_library_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"needs NCCL.*libnccl-of-nobody"):
        Nccl("libnccl-of-nobody.so.2")


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
def test_a_missing_gpu_is_reported() -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        open_pipe("nccl://127.0.0.1:1")
