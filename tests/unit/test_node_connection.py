"""A connection that another thread closed raises NodeUnavailable for its other users."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lookup_buffer.client.session import NodeConnection, next_request_id
from lookup_buffer.errors import NodeUnavailable
from lookup_buffer.protocol.messages import Stats

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
