"""What pipes between processes have to do beside the contract: peers are killed and stopped.

The test module has a fixture `make_listening`, which makes an end that listens.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from contract_pipe import LARGE, SMALL, SOON_SECONDS, Threads, same
from lookup_buffer.errors import ConfigError, LookupTimeout, PipeBroken, PipeTimeout
from lookup_buffer.pipes import KVPipe, PipeLimits
from patience import scaled
from payloads import block
from pipe_child import Child, launch_child

START_SECONDS = scaled(30.0)
"""A child imports torch."""
PATIENT_SECONDS = scaled(30.0)
"""Where the time is not the point: 64 MiB there and back take two seconds on a machine whose cores
four others want."""
SILENCE_SECONDS = 3.0
HUGE = 64 << 20
MakeListening = Callable[[PipeLimits], KVPipe]
StartChild = Callable[..., Child]


@pytest.fixture
def start_child(closing: ExitStack, tmp_path: Path) -> StartChild:
    def start(pipe: KVPipe, name: str = "child") -> Child:
        process = launch_child(tmp_path, "echo", pipe.uri, name)

        def end() -> None:
            process.kill()
            process.wait()

        closing.callback(end)
        assert pipe.recv_tensor(f"{name} is there", timeout=START_SECONDS) is None
        return process

    return start


@pytest.fixture
def patient(make_listening: MakeListening, closing: ExitStack) -> KVPipe:
    """Its peer may get no processor for a while: that is not what is tested."""
    pipe = make_listening(PipeLimits(silence_seconds=PATIENT_SECONDS, linger_seconds=1.0))
    closing.callback(pipe.abort)
    return pipe


@pytest.fixture
def listening(make_listening: MakeListening, closing: ExitStack) -> KVPipe:
    pipe = make_listening(PipeLimits(silence_seconds=SILENCE_SECONDS, linger_seconds=1.0))
    closing.callback(pipe.abort)
    return pipe


@pytest.mark.processes
class ProcessContract:
    """Inherit it in a class `Test…` of a module with the fixture `make_listening`."""

    def test_there_and_back(self, patient: KVPipe, start_child: StartChild) -> None:
        child = start_child(patient)
        for nbytes in (SMALL, LARGE, HUGE, 0):
            patient.send_tensor(block(nbytes))
            assert same(patient.recv_tensor("child", timeout=PATIENT_SECONDS), block(nbytes))
        patient.send_tensor(None)
        assert child.wait(PATIENT_SECONDS) == 0

    def test_a_peer_that_is_killed_wakes_who_waits(
        self, listening: KVPipe, start_child: StartChild, threads: Threads
    ) -> None:
        child = start_child(listening)
        waiting = threads.call(listening.recv_tensor, "child", timeout=60.0)
        started = time.monotonic()
        child.kill()
        with pytest.raises(PipeBroken):
            waiting.result(SOON_SECONDS)
        with pytest.raises(PipeBroken):
            listening.send_tensor(None)
        assert time.monotonic() - started < SOON_SECONDS

    def test_a_peer_that_is_stopped_is_lost_after_its_silence(
        self, listening: KVPipe, start_child: StartChild, threads: Threads
    ) -> None:
        child = start_child(listening)
        waiting = threads.call(listening.recv_tensor, "child", timeout=60.0)
        os.kill(child.pid, signal.SIGSTOP)
        listening.send_tensor(block(LARGE))
        with pytest.raises(PipeTimeout):
            waiting.result(SILENCE_SECONDS + SOON_SECONDS)

    def test_a_peer_that_goes_on_within_its_silence_has_lost_nothing(
        self, listening: KVPipe, start_child: StartChild
    ) -> None:
        child = start_child(listening)
        os.kill(child.pid, signal.SIGSTOP)
        listening.send_tensor(block(LARGE))
        with pytest.raises(LookupTimeout):
            listening.recv_tensor("child", timeout=SILENCE_SECONDS / 3)
        os.kill(child.pid, signal.SIGCONT)
        assert same(listening.recv_tensor("child", timeout=SOON_SECONDS), block(LARGE))

    def test_a_peer_killed_in_the_middle_of_transfers(
        self, listening: KVPipe, start_child: StartChild, threads: Threads
    ) -> None:
        child = start_child(listening)
        for _ in range(4):
            listening.send_tensor(block(HUGE))
        waiting = threads.call(listening.recv_tensor, "child", timeout=60.0)
        child.kill()
        with pytest.raises(PipeBroken):
            while True:
                waiting.result(SOON_SECONDS)
                waiting = threads.call(listening.recv_tensor, "child", timeout=60.0)

    def test_several_senders_to_one_receiver(
        self, patient: KVPipe, start_child: StartChild
    ) -> None:
        names = ["one", "two", "three"]
        children = []
        for name in names:  # one after the other, for an end with several peers only receives
            children.append(start_child(patient, name))
            if len(children) == 1:
                patient.send_tensor(block(LARGE))
        with pytest.raises(ConfigError, match="3 ends"):
            patient.send_tensor(None)
        assert same(patient.recv_tensor("one", timeout=SOON_SECONDS), block(LARGE))
        children[0].kill()
        with pytest.raises(LookupTimeout):
            patient.recv_tensor("one", timeout=SILENCE_SECONDS / 3)
        for child in children[1:]:
            child.kill()
        with pytest.raises(PipeBroken):
            patient.recv_tensor("one", timeout=SOON_SECONDS)
