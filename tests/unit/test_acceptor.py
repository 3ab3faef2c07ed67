"""An acceptor where the system grants no thread: it loses that connection, and nothing else."""

import queue
import socket
import threading

from lookup_buffer.protocol.acceptor import Acceptor, listening_socket
from patience import scaled
from thread_limits import without_threads

SECONDS = 5.0


def test_a_connection_without_a_thread_is_closed_and_the_next_one_served() -> None:
    listener, _ = listening_socket("127.0.0.1", 0)
    address, served = listener.getsockname(), queue.SimpleQueue[socket.socket]()
    accepting = threading.Thread(target=Acceptor(limit=2).serve, args=(listener, served.put))
    accepting.start()
    try:
        with without_threads():
            for _ in range(3):  # more than the limit: each gives its slot back
                with socket.create_connection(address, scaled(SECONDS)) as stream:
                    assert stream.recv(1) == b""
        with socket.create_connection(address, scaled(SECONDS)):
            served.get(timeout=scaled(SECONDS)).close()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(scaled(SECONDS))
    assert not accepting.is_alive()


def test_a_slot_without_a_thread_is_free_again() -> None:
    acceptor, ran = Acceptor(limit=1), threading.Event()
    with without_threads():
        assert [acceptor.try_start(ran.set) for _ in range(3)] == [False] * 3
    assert acceptor.try_start(ran.set)
    assert ran.wait(scaled(SECONDS))
