"""Another process of the node's user at its socket: descriptors that it passes."""

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from lookup_buffer.namespace import Namespace
from lookup_buffer.node.closer import CLOSERS_MAX
from lookup_buffer.protocol import messages
from lookup_buffer.protocol.framing import encode_frame
from nodes import MIB, NodeProcess, StartNode, at_rest, wait_until
from patience import scaled
from raw_clients import Raw, memfd, pass_on, raw
from userfault import unending_read

NAMESPACE = Namespace.named("tests").fingerprint
LINGER_SECONDS = 600
SO_PASSPIDFD = 76
MADV_PAGEOUT, MADV_POPULATE_READ = 21, 22
ARENA_BYTES = 64 * MIB
STATS = encode_frame(messages.Stats(5).to_wire())


@pytest.fixture
def node(start_node: StartNode) -> Iterator[NodeProcess]:
    node = start_node(capacity_bytes=ARENA_BYTES)
    files = node.open_files()
    yield node
    at_rest(node, open_files=files)


@contextmanager
def lingering(count: int) -> Iterator[list[int]]:
    """Sockets whose last close takes LINGER_SECONDS, or until the end of the block."""
    linger = struct.pack("@ii", 1, LINGER_SECONDS)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
        found = []
        for _ in range(count):
            ours = socket.create_connection(listener.getsockname())
            theirs = stack.enter_context(listener.accept()[0])
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
            ours.setblocking(False)
            with suppress(BlockingIOError):
                while ours.send(bytes(65536)):
                    pass
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            found.append(ours.detach())
        yield found


def assert_answers(node: NodeProcess) -> None:
    began = time.monotonic()
    node.stats()
    assert time.monotonic() - began < scaled(2.0) < LINGER_SECONDS


@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize("count", [1, 4, 5, 100])
def test_what_lingers_delays_nobody(node: NodeProcess, count: int, session: bool) -> None:
    """As staging, before hello, and more descriptors than may be sent."""
    frame = encode_frame(messages.Stage(2).to_wire())
    with lingering(count) as sockets, raw(node, session=session) as client:
        pass_on(client, frame, sockets)
        assert client.ended()
        assert_answers(node)


def test_what_lingers_unread_delays_nobody(node: NodeProcess) -> None:
    """The node ends the connection for its first frame, with more in its queue."""
    with lingering(20) as sockets, raw(node) as client:
        with node.frozen():
            client.socket.sendall(b"\xff" * 16)
            for one in sockets:
                pass_on(client, STATS, [one])
        assert client.ended()
        assert_answers(node)


def in_an_unread_message(descriptor: int, flags: int = 0) -> int:
    """A socket with a message that nobody received, in which the descriptor is; takes it over."""
    there, here = socket.socketpair()
    with here:
        socket.send_fds(here, [b"."], [descriptor], flags)
    os.close(descriptor)
    return there.detach()


@pytest.mark.parametrize("levels", [1, 3])
def test_what_lingers_in_messages_that_nobody_received_is_closed(
    node: NodeProcess, levels: int
) -> None:
    """More than there are threads to close something."""
    before = node.stats()["open_files"]
    with lingering(2 * CLOSERS_MAX) as sockets, raw(node) as client:
        for _ in range(levels):
            sockets = [in_an_unread_message(one) for one in sockets]
        pass_on(client, STATS, sockets)
        assert client.ended()
        wait_until(lambda: node.stats()["open_files"] <= before, 5.0, "all are closed")


def test_what_lingers_in_urgent_data_delays_nobody(node: NodeProcess) -> None:
    """Which the kernel drops where they are not asked for."""
    with lingering(4) as sockets, raw(node) as client:
        with node.frozen():
            client.socket.sendall(STATS)
            pass_on(client, STATS[:1], sockets[:2], socket.MSG_OOB)
            pass_on(client, STATS, [in_an_unread_message(sockets[2], socket.MSG_OOB)])
            pass_on(client, STATS, [in_an_unread_message(sockets[3], socket.MSG_OOB)])
        assert_answers(node)


def test_connections_that_nobody_accepted_are_closed_however_deep(node: NodeProcess) -> None:
    """Each with the listener of the one before; more often than there are threads."""
    before = node.stats()["open_files"]
    for number in range(CLOSERS_MAX + 4):
        inner = os.open(os.devnull, os.O_RDONLY)
        for level in range(400):
            inner = in_an_unaccepted_connection(inner, f"\0{os.getpid()}-{number}-{level}")
        with raw(node) as client:
            pass_on(client, STATS, [inner])
    wait_until(lambda: node.stats()["open_files"] <= before, 5.0, "all are closed")


def in_an_unaccepted_connection(descriptor: int, name: str) -> int:
    """As `in_an_unread_message`: a listener."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(1)
    with socket.socket(socket.AF_UNIX) as here:
        here.connect(name)
        socket.send_fds(here, [b"."], [descriptor])
    os.close(descriptor)
    return listener.detach()


def test_who_still_has_a_passed_socket_cannot_keep_a_thread_with_it(node: NodeProcess) -> None:
    """One lets reads of it wait, where that is a flag of the file that both have; one writes for
    ever. The other ends are passed after them, so that none is closed by its owner."""
    before = node.stats()["open_files"]
    over = threading.Event()
    with ExitStack() as stack:
        stack.callback(over.set)
        for _ in range(10):
            pairs = [socket.socketpair() for _ in range(64)]
            kept = [stack.enter_context(one.dup()) for one, _ in pairs]
            writers = [stack.enter_context(other.dup()) for _, other in pairs[:8]]
            for work in (partial(_let_wait, over, kept), partial(_write, over, writers)):
                threading.Thread(target=work, daemon=True).start()
            with raw(node) as client:
                pass_on(client, STATS, [one.detach() for one, _ in pairs])
                assert client.ended()
            with raw(node) as client:
                pass_on(client, STATS, [other.detach() for _, other in pairs])
                assert client.ended()
        wait_until(lambda: node.stats()["open_files"] <= before, 5.0, "all are closed")


def _let_wait(over: threading.Event, sockets: list[socket.socket]) -> None:
    with suppress(OSError):  # the block has ended
        while not over.is_set():
            for one in sockets:
                os.set_blocking(one.fileno(), True)


def _write(over: threading.Event, sockets: list[socket.socket]) -> None:
    while not over.is_set():
        for one in sockets:
            with suppress(OSError):
                one.send(bytes(4096), socket.MSG_DONTWAIT)


def test_what_lingers_after_many_empty_messages_is_closed(node: NodeProcess) -> None:
    """Their number tells nobody that there are no more."""
    before = node.stats()["open_files"]
    with lingering(2 * CLOSERS_MAX) as sockets, raw(node) as client:
        pass_on(client, STATS, [after_empty_messages(one) for one in sockets])
        assert client.ended()
        wait_until(lambda: node.stats()["open_files"] <= before, 5.0, "all are closed")


def after_empty_messages(descriptor: int) -> int:
    """As `in_an_unread_message`: behind as many empty ones as the system lets a socket queue."""
    there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
        here.setblocking(False)
        with suppress(BlockingIOError):
            for _ in range(1000):
                here.send(b"")
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        with suppress(BlockingIOError):  # the system allows no more: then it is not tried here
            socket.send_fds(here, [b""], [descriptor])
    os.close(descriptor)
    return there.detach()


def test_who_still_has_a_passed_socket_cannot_let_it_linger_again(node: NodeProcess) -> None:
    """Between the moment in which the node has it linger no more, and its close."""
    before = node.stats()["open_files"]
    linger, none = struct.pack("@ii", 1, LINGER_SECONDS), struct.pack("@ii", 0, 0)
    with lingering(CLOSERS_MAX + 4) as sockets, ExitStack() as stack:
        for one in sockets:
            kept = socket.socket(fileno=os.dup(one))
            stack.callback(kept.close)
            with raw(node) as client:
                pass_on(client, STATS, [one])
            until = time.monotonic() + 0.2
            while (found := kept.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)) == linger:
                if time.monotonic() > until:
                    break
            last = none if found == linger else linger  # else it would be closed last here
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, last)
            kept.close()
        wait_until(lambda: node.stats()["open_files"] <= before, 5.0, "all are closed")


def test_who_holds_the_lock_of_a_passed_socket_stops_nobody(start_node: StartNode) -> None:
    """That of its queue, which who receives from it waits for, in a call that no signal ends."""
    node = start_node(capacity_bytes=ARENA_BYTES)
    before = node.open_files()
    with ExitStack() as stack:
        for _ in range(CLOSERS_MAX):
            there, here = (stack.enter_context(one) for one in socket.socketpair())
            here.send(b".")
            stack.enter_context(unending_read(there.fileno()))
            with raw(node) as client:
                pass_on(client, STATS, [os.dup(there.fileno())])
        with lingering(CLOSERS_MAX) as sockets, raw(node) as client:
            pass_on(client, STATS, sockets)
            wait_until(lambda: node.stats()["open_files"] <= before, 5.0, "all are closed")
        assert node.terminate() == 0


@pytest.mark.alone  # Linux bounds what all processes of a user have on their way
def test_more_descriptors_than_a_node_may_open_delay_nobody(node: NodeProcess) -> None:
    """With none left to open, the kernel closes them on the thread that receives: the loop's."""
    with few_descriptors(node, node.open_files() + 1000), ExitStack() as stack:
        sockets = stack.enter_context(lingering(10))
        with node.frozen():
            for one in sockets:
                client = stack.enter_context(raw(node, session=False))
                pass_on(client, STATS, [os.dup(one) for _ in range(253)])
                os.close(one)
        assert_answers(node)


@contextmanager
def few_descriptors(node: NodeProcess, count: int) -> Iterator[None]:
    """As where a system allows a process few of them."""
    _, most = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (count, most))
    try:
        yield
    finally:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (most, most))


def assert_session_answers(session: Raw) -> None:
    session.socket.settimeout(scaled(5.0))
    assert scaled(5.0) < LINGER_SECONDS
    session.ask(messages.Stats(7))


CROWD = """
import os, select, socket, sys
path, message, crowd = sys.argv[1], bytes.fromhex(sys.argv[2]), []
null = os.open(os.devnull, os.O_RDONLY)
while True:
    while len(crowd) < 300:
        crowd.append(socket.socket(socket.AF_UNIX))
        crowd[-1].settimeout(1.0)
        try:
            crowd[-1].connect(path)
            socket.send_fds(crowd[-1], [message], [null] * 253)
        except OSError:  # the node's queue of connections is full
            break
    for ended in select.select(crowd, [], [], 0.01)[0]:
        crowd.remove(ended)
        ended.close()
"""


@pytest.mark.alone  # Linux bounds what all processes of a user have on their way
def test_a_crowd_that_passes_descriptors_keeps_no_session_waiting(node: NodeProcess) -> None:
    """Each new connection passes as many as a message has, and comes again when it is ended."""
    command = [sys.executable, "-ISs", "-c", CROWD, str(node.socket_path), STATS.hex()]
    with few_descriptors(node, 4096), raw(node) as session:
        session.socket.settimeout(scaled(5.0))
        crowd = subprocess.Popen(command)
        try:
            until, answers = time.monotonic() + 5.0, 0
            while time.monotonic() < until:
                session.ask(messages.Stats(7))
                answers += 1
        finally:
            crowd.kill()
            crowd.wait()
        assert answers >= 20, "hundreds on a fast machine"


@pytest.mark.alone  # Linux bounds what all processes of a user have on their way
def test_what_connections_hold_leaves_descriptors_free(node: NodeProcess) -> None:
    """Each has an area, and four more that no request has taken."""
    with few_descriptors(node, 4096), raw(node) as session, ExitStack() as stack:
        clients = list[Raw]()
        for _ in range(300):
            client = Raw(node)
            stack.callback(client.socket.close)
            with suppress(OSError, AssertionError):  # it is one too many
                client.hello()
                area = memfd(4096)
                client.ask(messages.Stage(1), [area])
                pass_on(client, STATS, [area, *(memfd(4096) for _ in range(3))])
                clients.append(client)
        assert 12 < len(clients) < 100
        sockets = stack.enter_context(lingering(12))
        null = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, null)
        with node.frozen():
            for client, one in zip(clients, sockets, strict=False):
                pass_on(client, STATS, [*(os.dup(null) for _ in range(252)), one])
        assert_session_answers(session)


def test_what_lingers_does_not_keep_a_node_from_its_end(start_node: StartNode) -> None:
    node = start_node()
    with lingering(40) as sockets, raw(node) as client:
        pass_on(client, STATS, sockets)
        assert client.ended()
        assert node.terminate() == 0


def test_pidfds_that_a_passed_socket_asks_for_are_closed(node: NodeProcess) -> None:
    """With each message of its queue the kernel gives one to who receives it."""
    before = node.stats()["open_files"]
    with raw(node) as client:
        there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here:
            try:
                there.setsockopt(socket.SOL_SOCKET, SO_PASSPIDFD, 1)
            except OSError:
                pytest.skip("before Linux 6.5 a socket gives no pidfds")
            for _ in range(100):
                here.send(b".")
        pass_on(client, STATS, [there.detach()])
    wait_until(lambda: node.stats()["open_files"] <= before, 5.0, "all are closed")


def test_nor_does_what_lingers_in_connections_that_were_not_accepted(
    start_node: StartNode,
) -> None:
    node = start_node()
    with ExitStack() as stack:
        sockets = stack.enter_context(lingering(100))
        with node.frozen():
            for one in sockets:
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(str(node.socket_path))
                socket.send_fds(client, [STATS], [one])
                os.close(one)
            os.kill(node.pid, signal.SIGTERM)
        assert node.wait() == 0


def test_files_are_no_staging_whatever_they_are(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    reader, writer = os.pipe()
    descriptors = [
        os.open(tmp_path / "file", os.O_RDWR),
        os.open(tmp_path, os.O_RDONLY),
        os.open("/proc/self/mem", os.O_RDWR),
        os.open("/dev/zero", os.O_RDWR),
        os.memfd_create("unsealed", os.MFD_ALLOW_SEALING),
        reader,
    ]
    for descriptor in descriptors:
        with raw(node) as client:
            pass_on(client, encode_frame(messages.Stage(2).to_wire()), [descriptor])
            assert client.ended()
    os.close(writer)
