"""The process of a client, which the node watches from the start of its session until its end.

Neither the connection nor its end tells whether the process lives. A session can break while its
process copies pinned bytes. And a child that the process forked has the sockets, too: they stay
open when the process is killed. So `server` watches a pidfd. Used on the loop's thread.
"""

import asyncio
import os

from lookup_buffer.node.connection import Connection


class ClientProcess:
    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        """The process that made `connection`, a unix socket."""
        self._loop = loop
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done once the process has ended. If the kernel gives no pidfd, which before Linux 6.5 is
        so for a process in another pid namespace, it is never done."""
        self._pidfd = connection.process()
        if self._pidfd is None and connection.pid > 0:  # 0: it lives in another pid namespace
            self._pidfd = self._opened(connection.pid)
        if self._pidfd is not None:
            loop.add_reader(self._pidfd, self._end)

    def close(self) -> None:
        """Watch no longer. Call it once."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _opened(self, pid: int) -> int | None:
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            self.ended.set_result(None)
        except OSError:  # no free descriptor
            pass
        return None

    def _end(self) -> None:
        assert self._pidfd is not None
        self._loop.remove_reader(self._pidfd)
        self.ended.set_result(None)
