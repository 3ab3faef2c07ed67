"""A channel that was closed by another thread says so to whoever still uses it."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lookup_buffer.client.session import NodeConnection, next_request_id
from lookup_buffer.errors import NodeUnavailable
from lookup_buffer.protocol.messages import Stats

USES: dict[str, Callable[[NodeConnection], object]] = {
    "readable_within": lambda channel: channel.readable_within(0.1),
    "has_room": lambda channel: channel.has_room(),
    "receive": lambda channel: channel.receive(None),
    "send_now": lambda channel: channel.send_now(Stats(next_request_id())),
    "call": lambda channel: channel.call(Stats(next_request_id()), 0.1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_closed_channel_is_a_node_that_is_not_available(
    tmp_path: Path, use: Callable[[NodeConnection], object]
) -> None:
    """Anything else would end the thread that attaches again, and nobody would."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        channel = NodeConnection(path, timeout=1.0)
        assert channel.has_room()
        assert not channel.readable_within(0.0)
        channel.close()
        with pytest.raises(NodeUnavailable):
            use(channel)
