"""`shm` pipes: the contract, the socket's file, and the memory that is shared."""

import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

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
    START_SECONDS,
    MakeListening,
    ProcessContract,
    listening,
    patient,
    start_child,
)
from lookup_buffer.codec import header_of, writable_bytes
from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import (
    ConfigError,
    PipeBroken,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.pipes import KVPipe, open_pipe
from lookup_buffer.pipes.shared_region import SharedMemory
from lookup_buffer.protocol.auth import connect, request_handshake
from patience import scaled
from payloads import block
from pipe_ends import TokenContract, connected_ends

__all__ = ["closing", "listening", "patient", "start_child", "threads"]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"shm://{tmp_path}/pipe"


@pytest.fixture
def make_ends(closing: ExitStack, uri: str) -> MakeEnds:
    return partial(connected_ends, closing, uri)


class TestShmPipe(PipeContract, PipeLimitsContract, TokenContract):
    pass


@pytest.fixture
def make_listening(uri: str) -> MakeListening:
    return lambda limits: open_pipe(uri, listen=True, limits=limits)


class TestShmPipeProcesses(ProcessContract):
    pass


def test_a_path_has_one_listener_at_a_time(uri: str) -> None:
    path = Path(uri.removeprefix("shm://"))
    with open_pipe(uri, listen=True), pytest.raises(ConfigError, match="listens"):
        open_pipe(uri, listen=True)
    assert not path.exists()
    a = open_pipe(uri, listen=True)
    assert path.stat().st_mode & 0o777 == 0o600
    a.abort()
    assert not path.exists()


def test_the_socket_of_a_listener_that_died_is_replaced(uri: str) -> None:
    path = uri.removeprefix("shm://")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()
    with open_pipe(uri, listen=True) as a, open_pipe(uri) as b:
        b.send_tensor(None)
        assert a.recv_tensor(timeout=SOON_SECONDS) is None


def test_other_files_are_not_touched(uri: str) -> None:
    path = Path(uri.removeprefix("shm://"))
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        open_pipe(uri, listen=True)
    with pytest.raises(PipeTimeout, match="no end listens"):
        open_pipe(uri, timeout=0.05)
    assert path.read_text() == "precious"


def test_of_many_listeners_at_a_dead_socket_one_replaces_it(
    closing: ExitStack, threads: Threads, uri: str
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(uri.removeprefix("shm://"))
        dead.listen()
    barrier = threading.Barrier(8)

    def listen() -> KVPipe | None:
        barrier.wait(SOON_SECONDS)
        try:
            return open_pipe(uri, listen=True)
        except ConfigError:
            return None

    calls = [threads.call(listen) for _ in range(8)]
    ends = [end for call in calls if (end := call.result(SOON_SECONDS)) is not None]
    for end in ends:
        closing.callback(end.abort)
    assert len(ends) == 1
    with open_pipe(uri) as b:
        b.send_tensor(None)
        assert ends[0].recv_tensor(timeout=SOON_SECONDS) is None


def test_an_end_closes_only_its_own_socket_file(uri: str) -> None:
    path = Path(uri.removeprefix("shm://"))
    first = open_pipe(uri, listen=True)
    path.unlink()
    with open_pipe(uri, listen=True):
        first.close()
        assert path.exists()


@pytest.mark.parametrize("path", ["relative", "/" + "long" * 30, "/nul\0"])
def test_invalid_paths(path: str) -> None:
    with pytest.raises(ConfigError, match="absolute path of at most 107 bytes"):
        open_pipe(f"shm://{path}", listen=True)


def test_a_missing_directory(tmp_path: Path) -> None:
    uri = f"shm://{tmp_path}/missing/pipe"
    with pytest.raises(PipeBroken, match="No such file"):
        open_pipe(uri, listen=True)
    with pytest.raises(PipeTimeout, match="no end listens"):
        open_pipe(uri, timeout=0.05)


def test_bytes_of_a_dead_end_in_shared_memory_are_received(make_ends: MakeEnds) -> None:
    a, b = make_ends()
    a.send_tensor(block(LARGE), "put")
    a.send_tensor(None)
    assert b.recv_tensor(timeout=SOON_SECONDS) is None
    a.abort()
    with pytest.raises(PipeBroken):
        b.recv_tensor(timeout=SOON_SECONDS)
    assert same(b.recv_tensor("put", timeout=SOON_SECONDS), block(LARGE))


def test_the_memory_has_no_name(make_ends: MakeEnds, uri: str) -> None:
    def names() -> set[str]:
        directories = ("/dev/shm", Path(uri.removeprefix("shm://")).parent)
        found = {str(path) for directory in directories for path in Path(directory).iterdir()}
        return {name for name in found if "lookup-buffer-weights" not in name}  # of another test

    before = names()
    a, b = make_ends()
    a.send_tensor(block(LARGE))
    assert {name for name in names() - before if "lookup" in name or "pipe" in name} == {
        uri.removeprefix("shm://")
    }
    b.recv_tensor(timeout=SOON_SECONDS)


NAMESPACES = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--ipc",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
]


@pytest.mark.processes
def test_an_end_in_a_container_that_shares_only_the_directory(closing: ExitStack, uri: str) -> None:
    try:
        subprocess.run([*NAMESPACES, "true"], check=True, capture_output=True, timeout=scaled(60))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine does not allow new namespaces: {error}")
    a = open_pipe(uri, listen=True)
    closing.callback(a.abort)
    program = str(Path(__file__).parents[1] / "support" / "pipe_child.py")
    child = [sys.executable, program, "echo", uri, "child"]
    without_memory = 'mount -t tmpfs none /dev/shm && exec "$@"'
    process = subprocess.Popen([*NAMESPACES, "sh", "-c", without_memory, "sh", *child])
    closing.callback(process.wait)
    closing.callback(process.kill)
    assert a.recv_tensor("child is there", timeout=START_SECONDS) is None
    a.send_tensor(block(LARGE))
    assert same(a.recv_tensor("child", timeout=SOON_SECONDS), block(LARGE))
    a.send_tensor(None)
    assert process.wait(START_SECONDS) == 0


class _Hostile:
    """An end that shares any memory and sends any frame."""

    def __init__(self, uri: str, descriptor: int | None) -> None:
        self._stream = socket.socket(socket.AF_UNIX)
        self._stream.connect(uri.removeprefix("shm://"))
        self._link = request_handshake(self._stream, token=None, timeout=SOON_SECONDS)
        socket.send_fds(self._stream, [b"M"], [] if descriptor is None else [descriptor])

    def send(self, header: list[object]) -> None:
        self._link.send(header, timeout=SOON_SECONDS)

    def next_byte(self) -> bytes:
        return self._stream.recv(1)

    def next_frame(self) -> object:
        while (header := self._link.recv_header(SOON_SECONDS).header) == ["beat"]:
            pass
        return header

    def end(self) -> None:
        self._link.abort()


def _unsealed() -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    return descriptor


def _empty() -> int:
    descriptor = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


@pytest.mark.parametrize("make", [_unsealed, _empty, lambda: os.open("/dev/zero", os.O_RDWR), None])
def test_memory_that_could_vanish_is_refused(
    closing: ExitStack, uri: str, make: Callable[[], int] | None
) -> None:
    a = closing.enter_context(open_pipe(uri, listen=True))
    descriptor = make() if make else None
    if descriptor is not None:
        closing.callback(os.close, descriptor)
    hostile = _Hostile(uri, descriptor)
    closing.callback(hostile.end)
    assert hostile.next_byte() == b"", "it is disconnected, and gets no memory"
    b = closing.enter_context(open_pipe(uri))
    b.send_tensor(block(LARGE))
    assert same(a.recv_tensor(timeout=SOON_SECONDS), block(LARGE))


@pytest.mark.parametrize("at", [-1, 1, 4096, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("frame", ["offer", "data"])
def test_an_offset_outside_of_the_memory_is_refused(
    closing: ExitStack, uri: str, threads: Threads, at: int, frame: str
) -> None:
    a = open_pipe(uri, listen=True)
    closing.callback(a.abort)
    memory = SharedMemory(4096)
    closing.callback(memory.close)
    hostile = _Hostile(uri, memory.descriptor)
    closing.callback(hostile.end)
    assert hostile.next_byte() == b"M"
    offer = ["offer", 1, b"k", header_of(block(4096)).to_fields()]
    if frame == "offer":
        hostile.send([*offer, at])
        receiving = threads.call(a.recv_tensor, "k", timeout=SOON_SECONDS)
    else:
        hostile.send(offer)
        receiving = threads.call(a.recv_tensor, "k", timeout=SOON_SECONDS)
        assert hostile.next_frame() == ["pull", 1]
        hostile.send(["data", 1, at])
    with pytest.raises(ProtocolError, match="outside"):
        receiving.result(SOON_SECONDS)


@pytest.mark.parametrize("frame", ["offer", "data"])
def test_bytes_are_read_from_their_offset(
    closing: ExitStack, uri: str, threads: Threads, frame: str
) -> None:
    """Their sender gets "received", so that it can reuse the memory."""
    a = open_pipe(uri, listen=True)
    closing.callback(a.abort)
    memory = SharedMemory(2 * LARGE)
    closing.callback(memory.close)
    hostile = _Hostile(uri, memory.descriptor)
    closing.callback(hostile.end)
    assert hostile.next_byte() == b"M"
    for seed in range(2):
        placed = memory.put(writable_bytes(block(LARGE, seed)))
    assert placed is not None
    offer = ["offer", 1, b"k", header_of(block(LARGE)).to_fields()]
    hostile.send([*offer, placed[1]] if frame == "offer" else offer)
    receiving = threads.call(a.recv_tensor, "k", timeout=SOON_SECONDS)
    if frame == "data":
        assert hostile.next_frame() == ["pull", 1]
        hostile.send(["data", 1, placed[1]])
    assert hostile.next_frame() == ["received", 1]
    assert same(receiving.result(SOON_SECONDS), block(LARGE, 1))


def test_an_offset_without_shared_memory_is_refused(closing: ExitStack) -> None:
    a = open_pipe("tcp://127.0.0.1:0", listen=True)
    closing.callback(a.abort)
    link = closing.enter_context(connect(*parse_tcp(a.uri), token=None, timeout=SOON_SECONDS))
    link.send(["offer", 1, None, header_of(block(4096)).to_fields(), 0], timeout=SOON_SECONDS)
    with pytest.raises(ProtocolError, match="none is shared"):
        a.recv_tensor(timeout=SOON_SECONDS)
