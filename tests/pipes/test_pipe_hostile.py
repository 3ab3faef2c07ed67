"""Pipes against hostile remote ends: refused at the first bytes, before memory is allocated.

The ends are connected ones of `tcp`, `shm`, `gloo` and `redis`, which a client without the token
cannot reach. The hostile bytes are in `hostile/`.
"""

import itertools
import queue
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract_pipe import SOON_SECONDS, closing
from hypothesis_profiles import examples
from lookup_buffer.codec import header_of
from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import LookupBufferError, ProtocolError, TensorTooLarge
from lookup_buffer.pipes import PipeLimits, open_pipe
from lookup_buffer.pipes.gloo import GlooCommunicator
from lookup_buffer.pipes.inbox import Inbox
from lookup_buffer.pipes.pair import Exchange, PairLink
from lookup_buffer.pipes.redis_dial import dial
from lookup_buffer.pipes.redis_link import RedisLink, Session
from lookup_buffer.pipes.remote_end import RemoteEnd
from lookup_buffer.pipes.resp import Resp3Connection
from lookup_buffer.pipes.shared_region import SharedMemory
from lookup_buffer.pipes.shm import connect_to
from lookup_buffer.protocol.acceptor import HANDSHAKES_MAX
from lookup_buffer.protocol.framing import encode_frame
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket
from patience import scaled
from raw_ends import RawEnd, hostile, offer
from store import EmbeddedServer

__all__ = ["closing"]
HOSTILE = hostile("frames", "pipe")
MEMORY_BYTES = 1 << 20
"""A valid header may announce so many bytes, and they are awaited."""
INBOX_BYTES = 1 << 19
SESSION = Session("lb:pipe:hostile:s")


class Attacked:
    """One end, and `send`, which sends it bytes from the other one."""

    def __init__(
        self, make: Callable[["Attacked"], RemoteEnd], send: Callable[[bytes], object]
    ) -> None:
        self.inbox = Inbox(INBOX_BYTES)
        self.reasons: queue.SimpleQueue[LookupBufferError] = queue.SimpleQueue()
        self.send = send
        self.remote_end = make(self)
        self.remote_end.start()

    def lost(self, remote_end: RemoteEnd, why: LookupBufferError) -> None:
        self.reasons.put(why)

    def reason(self) -> LookupBufferError:
        """The error with which the other end was disconnected."""
        return self.reasons.get(timeout=SOON_SECONDS)


def _communicator(exchange: Exchange, until: float) -> GlooCommunicator:
    return GlooCommunicator(exchange, 0, "127.0.0.1", until)


def over_socket(scheme: str, closing: ExitStack) -> tuple[Attacked, socket.socket]:
    ours, theirs = socket.socketpair()
    closing.callback(theirs.close)

    def make(attacked: Attacked) -> RemoteEnd:
        limits, link = PipeLimits(), FramedSocket(ours)
        if scheme == "gloo":
            pair = PairLink(link, _communicator, SOON_SECONDS)
            return RemoteEnd(pair, attacked.inbox, limits, attacked.lost)
        region = SharedMemory(4096) if scheme == "shm" else None
        if region is not None:
            region.adopt(region.descriptor)
        return RemoteEnd(link, attacked.inbox, limits, attacked.lost, region)

    attacked = Attacked(make, theirs.sendall)
    closing.callback(attacked.remote_end.abort, LookupBufferError("the test is over"))
    return attacked, theirs


def through(server: EmbeddedServer, closing: ExitStack) -> Attacked:
    connections = [Resp3Connection(dial(server.url, SOON_SECONDS)) for _ in range(3)]
    for connection in connections:
        closing.callback(connection.close)
    reader, writer, raw = connections
    until = time.monotonic() + 60.0
    reader.subscribe(SESSION.list_to(True), until)
    raw.request((b"DEL", SESSION.list_to(True)), until)
    link = RedisLink(SESSION, reader, writer, listens=True, silence_seconds=SOON_SECONDS)

    numbers = itertools.count(1)

    def send(data: bytes) -> None:
        element = next(numbers).to_bytes(8, "big") + data
        raw.request((b"RPUSH", SESSION.list_to(True), element), until)

    attacked = Attacked(lambda self: RemoteEnd(link, self.inbox, PipeLimits(), self.lost), send)
    closing.callback(attacked.remote_end.abort, LookupBufferError("the test is over"))
    return attacked


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def refused(attacked: Attacked, data: bytes) -> None:
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with suppress(ConnectionError):  # it may have disconnected before the last byte
        attacked.send(data)
    assert isinstance(attacked.reason(), ProtocolError)
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < MEMORY_BYTES
    with pytest.raises(LookupBufferError):
        attacked.inbox.end(ProtocolError("all was refused"))
        attacked.inbox.take(b"k", time.monotonic())


@pytest.mark.parametrize("scheme", ["tcp", "shm", "gloo"])
def test_each_is_refused_before_memory_is_allocated(
    scheme: str, closing: ExitStack, traced: None
) -> None:
    for name, data in HOSTILE.items():
        attacked, _ = over_socket(scheme, closing)
        try:
            refused(attacked, data)
        except BaseException as error:
            error.add_note(name)
            raise


def test_each_is_refused_through_a_database(
    valkey_server: EmbeddedServer, closing: ExitStack, traced: None
) -> None:
    for name, data in HOSTILE.items():
        attacked = through(valkey_server, closing)
        try:
            refused(attacked, data)
        except BaseException as error:
            error.add_note(name)
            raise


FIELDS = TensorHeader.for_tensor("uint8", (1 << 16,)).to_fields()
FLOODS: dict[str, Callable[[int], bytes]] = {
    "bytes": lambda n: encode_frame(["offer", n, b"k", FIELDS], 1 << 16) + bytes(1 << 16),
    "offers": lambda n: encode_frame(["offer", n, None, FIELDS]),
    "keys": lambda n: encode_frame(["offer", n, str(n).encode().rjust(4096), FIELDS]),
}


def flooded(attacked: Attacked, frame: Callable[[int], bytes]) -> None:
    """Without a receiver: what exceeds the inbox is refused, and no more than that was kept."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    reasons: list[LookupBufferError] = []
    for number in range(1, 10_000):
        with suppress(ConnectionError):
            attacked.send(frame(number))
        with suppress(queue.Empty):
            reasons.append(attacked.reasons.get_nowait())
            break
    assert [type(reason) for reason in reasons] == [ProtocolError]
    assert "inbox_bytes" in str(reasons[0])
    assert number > INBOX_BYTES // (68 << 10), "offers within the bound are accepted"
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < 2 * INBOX_BYTES + MEMORY_BYTES


@pytest.mark.parametrize("what", FLOODS)
@pytest.mark.parametrize("scheme", ["tcp", "shm", "gloo"])
def test_a_flood_is_refused_when_the_inbox_is_full(
    scheme: str, what: str, closing: ExitStack, traced: None
) -> None:
    attacked, theirs = over_socket(scheme, closing)
    theirs.settimeout(SOON_SECONDS)
    flooded(attacked, FLOODS[what])


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_through_a_database_is_refused(
    valkey_server: EmbeddedServer, what: str, closing: ExitStack, traced: None
) -> None:
    flooded(through(valkey_server, closing), FLOODS[what])


@pytest.mark.parametrize("scheme", ["tcp", "shm", "gloo"])
def test_requests_for_what_was_not_offered_are_refused(scheme: str, closing: ExitStack) -> None:
    """Each would be answered, and the answers wait for an end that does not read them."""
    attacked, _ = over_socket(scheme, closing)
    attacked.send(encode_frame(["pull", 7]))
    assert isinstance(attacked.reason(), ProtocolError)


@pytest.mark.parametrize("nbytes", [(1 << 30) + 1, 1 << 40])
def test_a_too_large_message_is_refused_before_memory_is_allocated(
    closing: ExitStack, nbytes: int
) -> None:
    pipe = closing.enter_context(
        open_pipe("tcp://127.0.0.1:0", listen=True, limits=PipeLimits(buffer_bytes=1 << 30))
    )
    with RawEnd(pipe) as other:
        other.send(offer(1, b"k", nbytes))
        other.send(offer(2, b"k", 4), b"abcd")
        with pytest.raises(TensorTooLarge, match=str(nbytes)):
            pipe.recv_tensor("k", timeout=SOON_SECONDS)
        assert other.receive() == ["received", 1]
        found = pipe.recv_tensor("k", timeout=SOON_SECONDS)
        assert found is not None
        assert bytes(found.tolist()) == b"abcd"


def test_a_key_that_is_too_long(closing: ExitStack) -> None:
    fields = header_of(None).to_fields()
    for nbytes in (4096, 4097):
        attacked, _ = over_socket("tcp", closing)
        attacked.send(encode_frame(["offer", 1, b"k" * nbytes, fields]))
        if nbytes == 4096:
            attacked.inbox.take(b"k" * nbytes, time.monotonic() + SOON_SECONDS)
        else:
            assert isinstance(attacked.reason(), ProtocolError)


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_silent_connections_use_a_bounded_number_of_threads(
    scheme: str, closing: ExitStack, tmp_path: Path
) -> None:
    uri = {"tcp": "tcp://127.0.0.1:0", "shm": f"shm://{tmp_path}/pipe"}[scheme]
    pipe = open_pipe(uri, listen=True)
    closing.callback(pipe.abort)
    before = threading.active_count()
    crowd = []
    for _ in range(HANDSHAKES_MAX + 50):
        if scheme == "tcp":
            crowd.append(socket.create_connection(parse_tcp(pipe.uri), SOON_SECONDS))
        else:
            crowd.append(connect_to(tmp_path / "pipe", time.monotonic() + SOON_SECONDS))
        assert threading.active_count() - before <= HANDSHAKES_MAX
    for one in crowd:
        one.close()
    deadline = time.monotonic() + SOON_SECONDS
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    with open_pipe(pipe.uri) as other:
        other.send_tensor(None, "k")
        assert pipe.recv_tensor("k", timeout=SOON_SECONDS) is None


NO_DESCRIPTOR_LEFT = """
import os, resource, socket, sys, time
from contextlib import suppress
from lookup_buffer.config import parse_tcp
from lookup_buffer.pipes import open_pipe

pipe = open_pipe("tcp://127.0.0.1:0", listen=True)
first = socket.socket()  # to connect; no descriptor is left to accept
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (first.fileno() + 1, most))
first.connect(parse_tcp(pipe.uri))
time.sleep(0.3)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
first.close()
with open_pipe(pipe.uri, timeout=20.0) as other:
    other.send_tensor(None)
    assert pipe.recv_tensor(timeout=20.0) is None
"""


@pytest.mark.processes
def test_an_end_without_a_descriptor_left_accepts_again_once_there_is_one() -> None:
    command = [sys.executable, "-c", NO_DESCRIPTOR_LEFT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert run.returncode == 0, run.stderr


SMALL = TensorHeader.for_tensor("uint8", (4,)).to_fields()
LARGE = TensorHeader.for_tensor("float32", (1 << 20,)).to_fields()
HONEST = [
    encode_frame(["beat"]),
    encode_frame(["offer", 1, b"k", SMALL], 4) + b"abcd",
    encode_frame(["offer", 2, None, LARGE]),
    encode_frame(["offer", 3, b"k", LARGE, 0]),
    encode_frame(["withdraw", 2, None]),
    encode_frame(["pull", 1]),
    encode_frame(["data", 2], 4) + b"abcd",
    encode_frame(["data", 3, 0]),
    encode_frame(["gone", 2]),
    encode_frame(["received", 1]),
    encode_frame(["pair", "name", b"value"]),
    encode_frame(["bye"]),
]
PIECES = st.sampled_from([*HONEST, *HOSTILE.values()]) | st.binary(max_size=60)
CHANGES = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4)


@pytest.mark.parametrize("scheme", ["tcp", "shm", "gloo"])
def test_random_bytes_end_in_an_error_and_leave_no_thread(scheme: str) -> None:
    before = threading.active_count()

    @settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
    @given(st.lists(PIECES, max_size=6), CHANGES, st.integers(0, 10_000))
    def attack(pieces: list[bytes], changes: list[tuple[int, int]], cut: int) -> None:
        sent = bytearray(b"".join(pieces))
        for place, value in changes:
            if sent:
                sent[place % len(sent)] = value
        if cut < 5000:
            del sent[cut:]
        with ExitStack() as closing:
            attacked, theirs = over_socket(scheme, closing)
            with suppress(ConnectionError):
                attacked.send(bytes(sent))
            theirs.close()
            assert isinstance(attacked.reason(), LookupBufferError)

    attack()
    deadline = time.monotonic() + SOON_SECONDS
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
