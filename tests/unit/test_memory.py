"""Shared memory: a descriptor that the node passes on allows reading only."""

import ctypes
import fcntl
import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookup_buffer.errors import ProtocolError
from lookup_buffer.shm.memory import (
    SEALS,
    Mapping,
    SealedMemory,
    Staging,
    adopt,
    check_memfd,
    copy_bytes,
)

NBYTES = 1 << 20
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
MADV_REMOVE = 9
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


@pytest.fixture
def arena() -> Iterator[SealedMemory]:
    arena = SealedMemory("arena", NBYTES)
    arena.view[:5] = b"bytes"
    yield arena
    arena.close()


@pytest.fixture
def passed(arena: SealedMemory) -> Iterator[int]:
    """The arena's descriptor, as it arrives in a client."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [arena.fd])
        _, (descriptor,), _, _ = socket.recv_fds(theirs, 1, 1)
    yield descriptor
    os.close(descriptor)


def test_a_client_reads_the_nodes_bytes(arena: SealedMemory, passed: int) -> None:
    mapping = Mapping(passed, NBYTES, writable=False)
    mapping.populate(0, NBYTES)
    assert bytes(mapping.view[:5]) == b"bytes"
    arena.view[:5] = b"later"
    assert bytes(mapping.view[:5]) == b"later"
    assert ctypes.string_at(mapping.address, 5) == b"later"
    with pytest.raises(TypeError):
        mapping.view[0] = 1
    mapping.close()


@pytest.mark.parametrize("length", [0, NBYTES // 2, NBYTES * 2])
def test_the_size_cannot_be_changed(arena: SealedMemory, passed: int, length: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(passed, length)
    assert bytes(arena.view[:5]) == b"bytes"


def test_it_cannot_be_written_through_the_descriptor(arena: SealedMemory, passed: int) -> None:
    for write in (
        lambda: os.pwrite(passed, b"evil!", 0),
        lambda: os.write(passed, b"evil!"),
        lambda: mmap.mmap(passed, NBYTES, mmap.MAP_SHARED, mmap.PROT_WRITE | mmap.PROT_READ),
        lambda: mmap.mmap(passed, NBYTES, mmap.MAP_SHARED, mmap.PROT_WRITE),
    ):
        with pytest.raises(PermissionError):
            write()
    assert bytes(arena.view[:5]) == b"bytes"


def test_opening_it_anew_does_not_help(arena: SealedMemory, passed: int) -> None:
    again = os.open(f"/proc/self/fd/{passed}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(again, b"evil!", 0)
    finally:
        os.close(again)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{passed}", 0)
    with pytest.raises(PermissionError):
        os.open(f"/proc/self/fd/{passed}", os.O_RDWR | os.O_TRUNC)
    assert bytes(arena.view[:5]) == b"bytes"


def test_holes_cannot_be_punched(arena: SealedMemory, passed: int) -> None:
    assert _libc.fallocate(passed, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == -1
    mapping = Mapping(passed, NBYTES, writable=False)
    assert _libc.madvise(mapping.address, 4096, MADV_REMOVE) == -1
    mapping.close()
    assert bytes(arena.view[:5]) == b"bytes"


def test_a_read_only_mapping_cannot_be_made_writable(passed: int) -> None:
    mapping = Mapping(passed, NBYTES, writable=False)
    assert _libc.mprotect(mapping.address, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    mapping.close()


def test_no_seal_can_be_added_that_would_hurt_the_node(arena: SealedMemory, passed: int) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(passed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    arena.view[:5] = b"fine."


def test_the_refusals_can_fail() -> None:
    """The control: without seals each of these goes through."""
    descriptor = os.memfd_create("control", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, NBYTES)
        os.pwrite(descriptor, b"evil!", 0)
        mapping = Mapping(descriptor, NBYTES, writable=False)
        assert _libc.mprotect(mapping.address, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        assert _libc.madvise(mapping.address, 4096, MADV_REMOVE) == 0
        mapping.close()
        mmap.mmap(descriptor, NBYTES, mmap.MAP_SHARED, mmap.PROT_WRITE).close()
    finally:
        os.close(descriptor)


def test_closing_does_not_wait_and_keeps_viewed_memory_mapped(
    arena: SealedMemory, passed: int
) -> None:
    mapping = Mapping(passed, NBYTES, writable=False)
    window = mapping.view[:5]
    mapping.populate_in_background()
    mapping.close()
    mapping.close()
    assert bytes(window) == b"bytes"
    assert not arena.view.readonly


# -- staging


def test_staging_is_read_where_it_was_written() -> None:
    staging = Staging(NBYTES)
    adopted = adopt(staging.fd, most_bytes=NBYTES)
    staging.view[:3] = b"abc"
    assert bytes(adopted.view[:3]) == b"abc"
    assert not adopted.writable
    source = ctypes.create_string_buffer(b"0123456789")
    copy_bytes(staging.address + 100, ctypes.addressof(source), 10)
    assert bytes(adopted.view[100:110]) == b"0123456789"
    adopted.close()
    staging.close()


def memfd(nbytes: int, seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
HUGE = 2 << 20


@pytest.mark.parametrize(
    ("nbytes", "seals"),
    [
        (4096, 0),
        (4096, fcntl.F_SEAL_SHRINK),
        (4096, fcntl.F_SEAL_GROW),
        (4096, BOTH),  # its holes could be punched
        (0, SEALS),
        (NBYTES + 4096, SEALS),
        (1 << 45, SEALS),
    ],
)
def test_a_descriptor_that_could_kill_or_exhaust_the_node_is_refused(
    nbytes: int, seals: int
) -> None:
    descriptor = memfd(nbytes, seals)
    try:
        with pytest.raises(ProtocolError):
            check_memfd(descriptor, most_bytes=NBYTES)
    finally:
        os.close(descriptor)


def test_a_descriptor_that_is_no_memfd_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    directory = os.open(tmp_path, os.O_RDONLY)
    with (tmp_path / "file").open("rb") as file, tempfile.TemporaryFile() as gone, ours, theirs:
        descriptors = (reader, writer, directory, file.fileno(), gone.fileno(), ours.fileno())
        for descriptor in descriptors:
            with pytest.raises(ProtocolError):
                check_memfd(descriptor, most_bytes=NBYTES)
    for descriptor in (reader, writer, directory):
        os.close(descriptor)


def test_a_memfd_of_huge_pages_is_refused() -> None:
    """It does not tell where its holes are."""
    try:
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:
        pytest.skip("this kernel has no huge pages")
    try:
        os.ftruncate(descriptor, HUGE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        with pytest.raises(ProtocolError, match="huge"):
            check_memfd(descriptor, most_bytes=HUGE)
    finally:
        os.close(descriptor)


def test_nobody_can_punch_holes_into_staging() -> None:
    staging = Staging(NBYTES)
    staging.view[:] = b"x" * NBYTES
    assert _libc.fallocate(staging.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == -1
    assert _libc.madvise(staging.address, 4096, MADV_REMOVE) == -1
    assert os.lseek(staging.fd, 0, os.SEEK_HOLE) == NBYTES
    assert bytes(staging.view[:4096]) == b"x" * 4096
    staging.close()


def test_the_control_of_the_refusals() -> None:
    descriptor = memfd(NBYTES, SEALS)
    try:
        assert check_memfd(descriptor, most_bytes=NBYTES) == NBYTES
    finally:
        os.close(descriptor)
