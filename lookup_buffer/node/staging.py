"""The staging areas of clients, as the node has them: checked, and mapped to be read.

A page of an area that nobody has written is a hole: to read it would allocate memory, which counts
as the node's. So an insert may only name bytes before the first hole. No hole can appear later: the
seals of an area forbid that, and to change its size. `lseek(SEEK_HOLE)` is not used: it waits for
locks of the open file and of its inode. A client can hold them for as long as it likes, and no
signal ends a process that waits so. Areas without an insert stay mapped up to
IDLE_SHARE of the arena; then the least recently used one is unmapped until its next insert.

Used on the loop's thread, except `StagingArea.find_hole`.
"""

import os
import stat
from collections.abc import Callable
from typing import Final

from lookup_buffer.errors import ProtocolError
from lookup_buffer.node.connection import Connection
from lookup_buffer.shm.memory import Mapping, adopt, present_bytes

IDLE_SHARE: Final = 2
"""Idle areas that are mapped have together at most the arena's bytes divided by this."""
ARENAS_MAX: Final = 2
"""An area has at most the bytes of so many arenas."""
SEARCH_INLINE_BYTES: Final = 4 << 20
"""Up to so many bytes are searched for a hole on the loop's thread: 0.1 ms measured."""
_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
"""Who may write a memfd, as it is made. `present_bytes` needs that, unless it is the node's user's:
root is its client then."""


class StagingArea:
    """Memory of one client. `StagingAreas` makes it."""

    def __init__(self, fd: int, most_bytes: int) -> None:
        """Takes ownership of `fd`, unless it raises.

        Raises:
            ProtocolError: see `adopt`.
        """
        self.mapping: Mapping | None = (mapping := adopt(fd, most_bytes=most_bytes))
        self.nbytes = mapping.nbytes
        self.filled_bytes = 0
        """Before the first hole, as far as it is known."""
        self.users = 0
        """Inserts that read it."""
        self.is_current = True
        """Whether it is still that of its connection."""
        self._fd = fd

    def is_searched(self, end: int) -> bool:
        """Whether it is known if all bytes before `end` are there; a small area is searched for
        that."""
        is_small = self.nbytes - self.filled_bytes <= SEARCH_INLINE_BYTES
        if end > self.filled_bytes and is_small and self.mapping is not None:
            self.find_hole()
            return True
        return end <= self.filled_bytes

    def check_filled(self, end: int) -> None:
        """Raises ProtocolError: there is a hole before `end`."""
        if end > self.filled_bytes:
            raise ProtocolError("the staging area has a hole; write all bytes of a tensor")

    def find_hole(self) -> None:
        """Set `filled_bytes`: to the end of the area, if need be. Any thread, while it has users.
        It is not worth while for a connection that has ended."""
        while self.is_current and self.filled_bytes < self.nbytes:
            present = self._present_bytes() or self._read_back()
            if not present:
                return
            self.filled_bytes += present

    def _present_bytes(self) -> int:
        """From `filled_bytes` on, of the next SEARCH_INLINE_BYTES."""
        status = os.fstat(self._fd)
        is_seen = os.geteuid() in (0, status.st_uid) or status.st_mode & _OTHERS == _OTHERS
        if self.mapping is None or not is_seen:
            return 0
        start = self.filled_bytes
        nbytes = min(self.nbytes - start, SEARCH_INLINE_BYTES)
        return present_bytes(self.mapping.address + start, nbytes)

    def _read_back(self) -> int:
        """As `_present_bytes`, after a read: so a page that was swapped out is there again, and a
        hole stays one."""
        os.pread(self._fd, 1, self.filled_bytes)
        return self._present_bytes()

    def map(self) -> None:
        """Raises ProtocolError: the system refuses it."""
        if self.mapping is None:
            self.mapping = adopt(self._fd, most_bytes=self.nbytes)

    def end(self) -> Mapping | int:
        """What is to be closed, on a thread: it may be the last to have the pages, and to give back
        1 GiB takes 0.25 s."""
        if self.mapping is None:
            return self._fd
        os.close(self._fd)  # the mapping has a descriptor of its own
        return self.mapping


class StagingAreas:
    """One for each connection that has staged. `close` closes a mapping or a descriptor, on a
    thread."""

    def __init__(self, capacity_bytes: int, close: Callable[[Mapping | int], None]) -> None:
        self._most_bytes = ARENAS_MAX * capacity_bytes
        self._idle_bytes_max = capacity_bytes // IDLE_SHARE
        self._close = close
        self._areas: dict[Connection, StagingArea] = {}
        self._idle: dict[StagingArea, None] = {}
        """Mapped and without an insert, the longest first."""
        self._idle_bytes = 0

    def of(self, connection: Connection) -> StagingArea | None:
        return self._areas.get(connection)

    def open(self, connection: Connection, fd: int) -> None:
        """Use it for the next inserts of the connection. Takes ownership of `fd`, unless it raises.

        Raises:
            ProtocolError: see `StagingArea`.
        """
        area = StagingArea(fd, self._most_bytes)
        self.close(connection)
        self._areas[connection] = area
        self._rest(area)

    def close(self, connection: Connection) -> None:
        """Unmap the area of a connection, after the inserts that use it."""
        area = self._areas.pop(connection, None)
        if area is not None:
            area.is_current = False
            if not area.users:
                self._wake(area)
                self._close(area.end())

    def use(self, area: StagingArea) -> None:
        """From now on until `release` it is mapped, and not closed.

        Raises:
            ProtocolError: the system does not map it.
        """
        area.map()
        self._wake(area)
        area.users += 1

    def release(self, area: StagingArea) -> None:
        area.users -= 1
        if area.users:
            return
        if area.is_current:
            self._rest(area)
        else:
            self._close(area.end())

    def _rest(self, area: StagingArea) -> None:
        if area.mapping is not None:
            self._idle[area] = None
            self._idle_bytes += area.nbytes
        while self._idle_bytes > self._idle_bytes_max:
            longest = next(iter(self._idle))
            self._wake(longest)
            mapping, longest.mapping = longest.mapping, None
            if mapping is not None:
                self._close(mapping)

    def _wake(self, area: StagingArea) -> None:
        if area in self._idle:
            del self._idle[area]
            self._idle_bytes -= area.nbytes
