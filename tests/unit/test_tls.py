"""`TlsSocket`: a TLS connection with the methods and meanings of a plain socket."""

import datetime
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from termios import FIONREAD

import pytest

from lookup_buffer.protocol.sockets import bytes_in_kernel
from lookup_buffer.protocol.tls import (
    PIECE_BYTES,
    RECORD_BYTES,
    SEND_BYTES,
    WITHOUT_DATA_MAX,
    Tls,
    TlsSocket,
    explained,
)
from node_certificates import Files
from patience import scaled

Ends = tuple[TlsSocket, TlsSocket]
MIB = 1 << 20


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Files(tmp_path_factory.mktemp("tls") / "files").tls("node-a")


@pytest.fixture
def ends(tls: Tls) -> Iterator[Ends]:
    here, there = socket.socketpair()
    dialled, accepted = tls.dialled(here), tls.accepted(there)
    other = threading.Thread(target=accepted.shake_hands, args=(scaled(5.0),))
    other.start()
    dialled.shake_hands(scaled(5.0))
    other.join()
    yield dialled, accepted
    dialled.close()
    accepted.close()


def allow(stream: socket.socket, seconds: float) -> None:
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        stream.setsockopt(socket.SOL_SOCKET, option, value)


def test_what_would_wait_is_refused_without_waiting(ends: Ends) -> None:
    here, there = ends
    memory = memoryview(bytearray(100))
    here.setblocking(True)
    with pytest.raises(BlockingIOError):
        here.recv_into(memory, 0, socket.MSG_DONTWAIT)
    with pytest.raises(BlockingIOError):
        here.recvmsg(100, 0, socket.MSG_DONTWAIT)
    with pytest.raises(BlockingIOError):
        while True:
            here.sendmsg((b"x" * 100, bytes(RECORD_BYTES)), (), socket.MSG_DONTWAIT)
    there.setblocking(False)
    assert there.recv(200)[:101] == b"x" * 100 + b"\0"


def test_a_send_counts_a_few_records(ends: Ends) -> None:
    """Else a receiver that is slow, and makes progress, would seem to stand still."""
    here, there = ends
    here.setblocking(True)
    payload = memoryview(bytearray(4 * MIB))
    assert here.send(payload) == SEND_BYTES
    with pytest.raises(BlockingIOError):
        while here.send(payload, socket.MSG_DONTWAIT) == SEND_BYTES:
            pass
    there.setblocking(False)
    assert there.recv(RECORD_BYTES) == bytes(RECORD_BYTES)


def test_a_record_that_trickles_is_bounded_by_the_timeout(tls: Tls) -> None:
    """The kernel's timeout would begin anew with each byte."""
    here, there = socket.socketpair()
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    contexts = tls._current()
    peer = contexts.accepts.wrap_bio(received, sent, server_side=True)
    over = threading.Event()

    def trickle() -> None:
        with suppress(OSError):
            while True:
                try:
                    peer.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    there.sendall(sent.read())
                    received.write(there.recv(1 << 16))
            there.sendall(sent.read())
            peer.write(b"x" * 10_000)
            for byte in sent.read():
                there.sendall(bytes([byte]))
                if over.wait(0.02):
                    return

    other = threading.Thread(target=trickle)
    other.start()
    stream = tls.dialled(here)
    try:
        stream.shake_hands(scaled(5.0))
        allow(stream, 0.3)
        began = time.monotonic()
        with pytest.raises(BlockingIOError):
            stream.recv_into(memoryview(bytearray(100)))
        assert 0.3 <= time.monotonic() - began < scaled(5.0)
    finally:
        over.set()
        stream.close()
        there.close()
        other.join()


def unread(stream: socket.socket) -> int:
    return bytes_in_kernel(stream, FIONREAD)


def test_a_handshake_in_records_of_a_byte_is_taken_in_pieces(tls: Tls) -> None:
    """One call of OpenSSL would take all that a stranger sends."""
    here, there = socket.socketpair()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    hello = b"\x01" + (100_000).to_bytes(3, "big") + bytes(30_000)
    records = b"".join(b"\x16\x03\x01\x00\x01" + bytes([one]) for one in hello)
    there.setblocking(False)
    left = records[there.send(records) :]
    accepted = tls.accepted(here)
    with accepted, there:
        sent = len(records) - len(left)
        assert sent > WITHOUT_DATA_MAX + PIECE_BYTES
        taken = []
        with pytest.raises(ssl.SSLError) as refusal:
            while True:
                before = unread(accepted)
                accepted.go_on()
                taken.append(before - unread(accepted))
    assert "too much without data" in explained(refusal.value)
    assert max(taken) <= PIECE_BYTES
    assert sum(taken) <= WITHOUT_DATA_MAX + PIECE_BYTES


def test_records_without_data_are_taken_in_pieces(tls: Tls) -> None:
    """Tickets here; changes of keys are read in the same way."""
    here, there = socket.socketpair()
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = tls._current().accepts
    context.num_tickets = 100
    try:
        peer = context.wrap_bio(received, sent, server_side=True)
    finally:
        context.num_tickets = 0
    dialled = tls.dialled(here)
    with dialled, there:
        there.settimeout(scaled(5.0))
        is_done = False
        while not is_done:
            dialled.go_on()
            received.write(there.recv(1 << 16))
            with suppress(ssl.SSLWantReadError):
                peer.do_handshake()
                is_done = True
            there.sendall(sent.read())
        taken = []
        with pytest.raises(ssl.SSLError) as refusal:
            while True:
                before = unread(dialled)
                with suppress(BlockingIOError):
                    dialled.recv(1 << 16)
                taken.append(before - unread(dialled))
    assert "too much without data" in explained(refusal.value)
    assert max(taken) <= PIECE_BYTES
    assert sum(taken) <= WITHOUT_DATA_MAX + PIECE_BYTES


def test_small_records_leave_nothing_that_a_selector_does_not_see(ends: Ends) -> None:
    here, there = ends
    for end in ends:
        end.setblocking(False)
    for number in range(200):
        assert here.send(bytes([number])) == 1
    got = b""
    while unread(there):
        got += there.recv(1 << 16)
    assert got == bytes(range(200))


def test_one_thread_sends_while_another_receives(ends: Ends) -> None:
    """On each of the two objects, with full buffers in both directions."""
    payload = memoryview(bytes(range(256)) * 4096 * 4)
    targets = [bytearray(payload.nbytes) for _ in ends]
    for end in ends:
        end.setblocking(True)
        allow(end, scaled(10.0))

    def send(end: TlsSocket) -> None:
        sent = 0
        while sent < payload.nbytes:
            sent += end.send(payload[sent:])

    def receive(end: TlsSocket, target: bytearray) -> None:
        got, view = 0, memoryview(target)
        while got < payload.nbytes:
            got += end.recv_into(view[got:])

    threads = [threading.Thread(target=send, args=(end,)) for end in ends]
    threads += [
        threading.Thread(target=receive, args=(end, target))
        for end, target in zip(ends, targets, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(target == payload for target in targets)


def test_the_last_owner_closes_it(ends: Ends) -> None:
    here, there = ends
    again = here.dup()
    here.close()
    assert again.fileno() >= 0
    again.setblocking(True)
    assert again.send(b"still open") == 10
    again.close()
    assert again.fileno() == -1
    there.setblocking(True)
    assert (there.recv(100), there.recv(100)) == (b"still open", b"")


def test_changed_files_are_read_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files = Files(tmp_path_factory.mktemp("tls") / "files")
    tls = files.tls("node-a")
    before = tls._current()
    assert tls._current() is before
    files.of("node-a", now=datetime.datetime.now(datetime.UTC))
    after = tls._current()
    assert after is not before
    assert tls._current() is after
