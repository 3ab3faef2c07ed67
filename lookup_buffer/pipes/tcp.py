"""`tcp://HOST:PORT`: a pipe between hosts. One end listens, the others connect to it.

The scheme adds nothing to `connect.meet`; it runs on the caller's thread.
"""

from lookup_buffer.pipes.connect import meet
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    return meet(uri, listen=listen, timeout=timeout, token=token, limits=limits)
