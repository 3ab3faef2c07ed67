"""`tcp://HOST:PORT`: a pipe between hosts. One end listens, the others connect to it.

See `connect.open_tcp_end`.
"""

from lookup_buffer.pipes.connect import open_tcp_end
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    return open_tcp_end(uri, listen=listen, timeout=timeout, token=token, limits=limits)
