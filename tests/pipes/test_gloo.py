"""`gloo` pipes: the contract between threads and between processes, and several senders."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contract_pipe import (
    LARGE,
    SOON_SECONDS,
    MakeEnds,
    PipeContract,
    Threads,
    closing,
    same,
    threads,
)
from contract_pipe_limits import PipeLimitsContract
from contract_pipe_processes import (
    HUGE,
    SILENCE_SECONDS,
    START_SECONDS,
    MakeListening,
    ProcessContract,
    listening,
    patient,
    start_child,
)
from lookup_buffer.codec import writable_bytes
from lookup_buffer.errors import (
    ConfigError,
    LookupBufferError,
    NodeRefused,
    PipeBroken,
    PipeError,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.pipes import KVPipe, open_pipe
from lookup_buffer.pipes.gloo import GlooCommunicator, time_until, version
from lookup_buffer.pipes.pair import Exchange, agree
from lookup_buffer.protocol.auth import connect
from lookup_buffer.protocol.stream import FramedSocket
from patience import scaled
from payloads import block
from pipe_child import launch_child
from pipe_ends import TokenContract, connected_ends

__all__ = ["closing", "listening", "patient", "start_child", "threads"]


@pytest.fixture
def uri() -> str:
    return "gloo://127.0.0.1:0"


@pytest.fixture
def make_ends(closing: ExitStack, uri: str) -> MakeEnds:
    return partial(connected_ends, closing, uri)


class TestGlooPipe(PipeContract, PipeLimitsContract, TokenContract):
    pass


@pytest.fixture
def make_listening(uri: str) -> MakeListening:
    return lambda limits: open_pipe(uri, listen=True, limits=limits)


class TestGlooPipeProcesses(ProcessContract):
    pass


def test_connecting_without_a_listener_times_out() -> None:
    with pytest.raises(PipeTimeout, match="no end listens at gloo:"):
        open_pipe("gloo://127.0.0.1:9", timeout=0.2)


@pytest.mark.parametrize("uri", ["gloo://", "gloo://host", "gloo://h:x"])
def test_invalid_addresses(uri: str) -> None:
    with pytest.raises(ConfigError, match="gloo://"):
        open_pipe(uri)


# -- the communicator


@pytest.fixture
def communicators() -> list[GlooCommunicator]:
    exchanges: list[Exchange] = []
    exchanges.append(Exchange(lambda name, value: exchanges[1].received(name, value)))
    exchanges.append(Exchange(lambda name, value: exchanges[0].received(name, value)))
    deadline = time.monotonic() + SOON_SECONDS
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(GlooCommunicator, exchange, rank, "127.0.0.1", deadline)
            for rank, exchange in enumerate(exchanges)
        ]
        return [one.result() for one in made]


def test_both_directions_at_once_and_nothing_is_left(
    communicators: list[GlooCommunicator], threads: Threads
) -> None:
    sent = [block(HUGE, seed) for seed in range(2)]
    got = [block(HUGE, 2) for _ in range(2)]
    calls = []
    for rank, one in enumerate(communicators):
        calls.append(threads.call(one.send, writable_bytes(sent[rank]), SOON_SECONDS))
        calls.append(threads.call(one.recv, writable_bytes(got[rank]), SOON_SECONDS))
    for call in calls:
        call.result(2 * SOON_SECONDS)
    assert same(got[0], sent[1])
    assert same(got[1], sent[0])
    before = _native_threads()
    for one in communicators:
        one.abort()
    communicators.clear()
    del one
    deadline = time.monotonic() + SOON_SECONDS
    while _native_threads() >= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _native_threads() < before


def test_a_transfer_has_a_deadline(communicators: list[GlooCommunicator]) -> None:
    started = time.monotonic()
    with pytest.raises(PipeTimeout):
        communicators[0].recv(writable_bytes(block(LARGE)), 0.3)
    assert 0.3 <= time.monotonic() - started < SOON_SECONDS
    with pytest.raises(PipeBroken):
        communicators[1].send(writable_bytes(block(LARGE)), SOON_SECONDS)


def test_gloo_gets_whole_milliseconds_rounded_up() -> None:
    """Gloo drops fractions. Its own deadline would then expire before ours, as a broken pipe."""
    for fraction in range(1, 100):
        deadline = time.monotonic() + fraction / 7000
        given = time_until(deadline)
        assert given % timedelta(milliseconds=1) == timedelta()
        assert time.monotonic() + given.total_seconds() >= deadline


@pytest.mark.parametrize("later_seconds", [0.0, 0.5])
def test_an_expired_deadline_is_reported_in_both_directions(
    communicators: list[GlooCommunicator],
    threads: Threads,
    monkeypatch: pytest.MonkeyPatch,
    later_seconds: float,
) -> None:
    """Gloo then ends the connection. So a concurrent send fails with the same error, even if its
    thread runs later."""
    one = communicators[0]
    send = one._send

    def send_and_fail_later(*call: Any) -> None:
        try:
            send(*call)
        except RuntimeError:
            time.sleep(later_seconds)
            raise

    monkeypatch.setattr(one, "_send", send_and_fail_later)
    sending = threads.call(one.send, writable_bytes(block(HUGE)), 60.0)
    with pytest.raises(PipeTimeout):
        one.recv(writable_bytes(block(LARGE)), 0.3)
    with pytest.raises(PipeTimeout):
        sending.result(SOON_SECONDS)


def test_an_abort_wakes_both_ends(communicators: list[GlooCommunicator], threads: Threads) -> None:
    a, b = communicators
    memory = writable_bytes(block(HUGE))
    waiting = [threads.call(a.recv, memory, 60.0), threads.call(a.send, memory, 60.0)]
    waiting.append(threads.call(b.recv, memory, 60.0))  # one is in the middle of a transfer
    started = time.monotonic()
    a.abort()
    b.abort()
    for one in (waiting[0], waiting[2], waiting[1]):
        try:
            one.result(SOON_SECONDS)
        except PipeBroken:
            continue
    assert time.monotonic() - started < SOON_SECONDS
    with pytest.raises(PipeBroken):
        a.send(memory, 1.0)


def pipe_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("lb-pipe")]


@pytest.mark.parametrize(("signal", "error"), [("SIGKILL", PipeBroken), ("SIGSTOP", PipeTimeout)])
@pytest.mark.processes
def test_an_end_that_dies_between_its_announcement_and_its_bytes(
    listening: KVPipe,
    closing: ExitStack,
    signal: str,
    error: type[LookupBufferError],
    tmp_path: Path,
) -> None:
    process = launch_child(tmp_path, "end", listening.uri, signal)
    closing.callback(process.wait)
    closing.callback(process.kill)
    assert listening.recv_tensor("there", timeout=START_SECONDS) is None
    started = time.monotonic()
    with pytest.raises(error):
        listening.recv_tensor(timeout=60.0)
    assert time.monotonic() - started < SILENCE_SECONDS + SOON_SECONDS
    listening.abort()
    deadline = time.monotonic() + SOON_SECONDS
    while pipe_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not pipe_threads()


ENDS_IN_THE_MIDDLE = """
import threading, time, torch
from lookup_buffer.pipes import open_pipe

a = open_pipe("gloo://127.0.0.1:0", listen=True)
b = open_pipe(a.uri)
tensor = torch.ones(8 << 20, dtype=torch.uint8)
moved = threading.Event()

def move():
    while True:
        a.send_tensor(tensor)
        b.recv_tensor()
        moved.set()

threading.Thread(target=move, daemon=True).start()
moved.wait(60.0)
"""


@pytest.mark.processes
def test_a_process_that_ends_in_the_middle_of_a_transfer_ends_in_order() -> None:
    """Otherwise torch's threads would terminate it: -SIGABRT."""
    command = [sys.executable, "-c", ENDS_IN_THE_MIDDLE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert run.returncode == 0, run.stderr


def test_ends_of_different_versions_name_both(threads: Threads) -> None:
    links = [FramedSocket(stream) for stream in socket.socketpair()]
    deadline = time.monotonic() + SOON_SECONDS
    ends = [
        threads.call(agree, link, "gloo", version, deadline)
        for link, version in zip(links, ("of torch 1", "of torch 2"), strict=True)
    ]
    for end in ends:
        with pytest.raises(NodeRefused, match=r"torch [12].* torch [12]"):
            end.result(SOON_SECONDS)
    for link in links:
        link.close()


@pytest.mark.parametrize(
    "frames",
    [
        [["data", 1, 1 << 20]],
        [["pull", 1], ["data", 1, -1]],
        [["pull", 1], ["data", 1, 1 << 60]],
        [["data", 1]],
        [["pair", "name", b"v" * 5000]],
        [["pair", f"name {n}", b"value"] for n in range(100)],
        [["pair", 1, 2]],
    ],
)
def test_an_end_that_sends_invalid_frames_is_disconnected(
    closing: ExitStack, threads: Threads, frames: list[list[Any]]
) -> None:
    a = open_pipe("gloo://127.0.0.1:0", listen=True)
    closing.callback(a.abort)
    waiting = threads.call(a.recv_tensor, timeout=SOON_SECONDS)
    link = connect("127.0.0.1", int(a.uri.rsplit(":")[-1]), token=None, timeout=SOON_SECONDS)
    closing.callback(link.abort)
    agree(link, "gloo", version(), time.monotonic() + SOON_SECONDS)
    for frame in frames:
        with suppress(PipeError):  # the end may have disconnected already
            link.send(frame, timeout=SOON_SECONDS)
    with pytest.raises(ProtocolError):
        waiting.result(SOON_SECONDS)


def test_addresses_of_ipv6(closing: ExitStack) -> None:
    a, b = connected_ends(closing, "gloo://[::1]:0")
    a.send_tensor(block(LARGE), "k")
    assert same(b.recv_tensor("k", timeout=SOON_SECONDS), block(LARGE))


def test_the_end_of_another_scheme_is_refused(closing: ExitStack) -> None:
    a = closing.enter_context(open_pipe("tcp://127.0.0.1:0", listen=True))
    closing.callback(a.abort)
    with pytest.raises((ProtocolError, PipeBroken)):
        open_pipe(a.uri.replace("tcp", "gloo"), timeout=SOON_SECONDS)


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


IN_THE_MAKING = """
import threading, time
from lookup_buffer.pipes.pair import Exchange
from lookup_buffer.pipes.gloo import GlooCommunicator

def make(deadline):
    sent = threading.Event()
    exchange = Exchange(lambda name, value: sent.set())

    def run():
        try:
            GlooCommunicator(exchange, 0, "127.0.0.1", deadline)
        except Exception:
            pass  # there is no other end

    threading.Thread(target=run, daemon=True).start()
    assert sent.wait(20.0)

soon = time.monotonic() + 1.0
for number in range(50):
    make(soon + number / 100)
time.sleep(max(0.0, soon - time.monotonic()))
"""


@pytest.mark.processes
def test_a_process_that_ends_while_communicators_are_made_ends_in_order() -> None:
    """Their threads return from torch, one after the other, while the interpreter ends."""
    ended = subprocess.run(
        [sys.executable, "-c", IN_THE_MAKING], capture_output=True, timeout=scaled(60.0)
    )
    assert ended.returncode == 0, ended.stderr
