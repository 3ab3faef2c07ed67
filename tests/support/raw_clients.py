"""Clients of a node that a test drives itself, without any of the client's good manners."""

import array
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lookup_buffer.protocol import messages
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.protocol.messages import Request
from lookup_buffer.shm.memory import SEALS
from nodes import MIB, NodeProcess


class Raw:
    """A unix socket to a node, without any of the client's good manners."""

    def __init__(self, node: NodeProcess) -> None:
        self.node = node
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5.0)
        self.socket.connect(str(node.socket_path))
        self._decoder = FrameDecoder(max_header_bytes=4 << 20)

    def send(self, request: Request, descriptors: list[int] | None = None) -> None:
        rights = array.array("i", descriptors or [])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        self.socket.sendmsg([encode_frame(request.to_wire())], ancillary)

    def hello(self, **changes: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "version": messages.VERSION,
            "expects": self.node.config.expectations(),
        }
        fields |= changes
        self.send(messages.Hello(1, fields["version"], None, fields["expects"]))
        data, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        answer = self._one(data)
        self.session = answer.get("session", 0)
        return answer

    def ask(self, request: Request, descriptors: list[int] | None = None) -> dict[str, Any]:
        self.send(request, descriptors)
        return self._one(self.socket.recv(65536))

    def ended(self, seconds: float = 3.0) -> bool:
        """Whether the node ends the connection (what it still sends is discarded)."""
        self.socket.settimeout(seconds)
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def _one(self, data: bytes) -> dict[str, Any]:
        assert data, "the node ended the connection"
        (frame,) = self._decoder.feed(data)
        header = frame.header
        assert isinstance(header, dict)
        return header


@contextmanager
def raw(node: NodeProcess, *, session: bool = True) -> Iterator[Raw]:
    connection = Raw(node)
    with connection.socket:
        if session:
            connection.hello()
        yield connection


def pass_on(client: Raw, frame: bytes, descriptors: list[int], flags: int = 0) -> None:
    """Send the descriptors, so that the node has the last ones."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    client.socket.sendmsg([frame], [rights], flags)
    for descriptor in descriptors:
        os.close(descriptor)


def memfd(nbytes: int, seals: int = SEALS, filled_bytes: int = 0) -> int:
    descriptor = os.memfd_create("attack", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    for offset in range(0, filled_bytes, MIB):
        os.pwrite(descriptor, b"x" * min(MIB, filled_bytes - offset), offset)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
