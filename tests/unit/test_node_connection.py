"""A connection that another thread closed, or whose node reads nothing, raises NodeUnavailable."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lookup_buffer.client.session import NodeConnection, next_request_id
from lookup_buffer.errors import NodeUnavailable
from lookup_buffer.protocol.framing import encode_frame
from lookup_buffer.protocol.messages import Release, Stats

USES: dict[str, Callable[[NodeConnection], object]] = {
    "readable_within": lambda connection: connection.readable_within(0.1),
    "is_writable": lambda connection: connection.is_writable(),
    "receive": lambda connection: connection.receive(None),
    "send_now": lambda connection: connection.send_now(Stats(next_request_id())),
    "call": lambda connection: connection.call(Stats(next_request_id()), 0.1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_closed_connection_is_a_node_that_is_not_available(
    tmp_path: Path, use: Callable[[NodeConnection], object]
) -> None:
    """Anything else would end the thread that reconnects, and nothing else would."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        connection = NodeConnection(path, timeout=1.0)
        assert connection.is_writable()
        assert not connection.readable_within(0.0)
        connection.close()
        with pytest.raises(NodeUnavailable):
            use(connection)


def test_a_full_socket_is_waited_for_while_the_node_reads(tmp_path: Path) -> None:
    """A long prompt is asked for in several messages, and the node works on the first one."""
    path, received = tmp_path / "s", bytearray()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        connection = NodeConnection(path, timeout=1.0)
        node, _ = listener.accept()

        def read_slowly() -> None:
            while data := node.recv(128 << 10):
                received.extend(data)
                time.sleep(0.2)

        reader = threading.Thread(target=read_slowly)
        reader.start()
        request = Release(next_request_id(), list(range(1 << 40, (1 << 40) + 100_000)))
        connection.send_now(request)
        assert connection.open
        connection.close()
        reader.join()
        node.close()
    assert bytes(received) == encode_frame(request.to_wire())


def test_a_node_that_reads_nothing_from_a_full_socket_is_not_available(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        connection = NodeConnection(path, timeout=1.0)
        request = Release(next_request_id(), list(range(1 << 40, (1 << 40) + 100_000)))
        with pytest.raises(NodeUnavailable):
            connection.send_now(request)
        assert not connection.open
