"""Pipes where the system grants no thread or descriptor: that connection is lost, nothing else."""

import errno
import os
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from contract_pipe import SMALL, SOON_SECONDS, Threads, block, closing, same, threads
from lookup_buffer.errors import PipeBroken
from lookup_buffer.pipes import KVPipe, open_pipe
from nodes import wait_until
from raw_ends import RawEnd
from store import EmbeddedServer
from thread_limits import in_use, is_within, without_threads

__all__ = ["closing", "threads"]
THREADS = ["lb-pipe-out", "lb-pipe-in"]
"""Of a connection, in the order in which they start."""


@pytest.fixture
def listening(closing: ExitStack) -> KVPipe:
    pipe = open_pipe("tcp://127.0.0.1:0", listen=True)
    closing.callback(pipe.abort)
    return pipe


def exchange(a: KVPipe, b: KVPipe) -> None:
    for sender, receiver in ((a, b), (b, a)):
        sender.send_tensor(block(SMALL), "k")
        assert same(receiver.recv_tensor("k", timeout=SOON_SECONDS), block(SMALL))


@contextmanager
def without_events(numbers: Container[int]) -> Iterator[None]:
    """Refuse the descriptors of these events of this process, counted from 0."""
    make, counted = os.eventfd, count()

    def refusing(value: int) -> int:
        if next(counted) in numbers:
            raise OSError(errno.EMFILE, "Too many open files")
        return make(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "eventfd", refusing)
        yield


@pytest.mark.parametrize("name", THREADS)
@pytest.mark.parametrize("scheme", ["tcp", "shm", "gloo"])
def test_a_connection_without_its_threads_leaves_nothing(
    closing: ExitStack, tmp_path: Path, scheme: str, name: str
) -> None:
    rest = f"{tmp_path}/pipe" if scheme == "shm" else "127.0.0.1:0"
    leaves_nothing(closing, f"{scheme}://{rest}", name)


@pytest.mark.parametrize("name", THREADS)
def test_a_connection_through_a_database_without_its_threads_leaves_nothing(
    closing: ExitStack, valkey_server: EmbeddedServer, name: str
) -> None:
    leaves_nothing(closing, f"{valkey_server.url}?pipe=threads", name)


def leaves_nothing(closing: ExitStack, uri: str, name: str) -> None:
    """Both ends are refused this thread."""
    a = open_pipe(uri, listen=True)
    closing.callback(a.abort)
    before = in_use()
    with without_threads(name), pytest.raises(PipeBroken) as caught:
        open_pipe(a.uri)
    wait_until(lambda: is_within(before), SOON_SECONDS, f"{before}: {in_use()}")
    assert caught.value.__traceback__, "it holds what only a garbage collection would close"
    b = open_pipe(a.uri)
    closing.callback(b.abort)
    exchange(a, b)


@pytest.mark.parametrize("name", THREADS)
def test_a_listening_end_and_its_callers_lose_only_that_connection(
    listening: KVPipe, closing: ExitStack, threads: Threads, name: str
) -> None:
    waiting = threads.call(listening.recv_tensor, "first", timeout=2 * SOON_SECONDS)
    with without_threads(name), RawEnd(listening) as raw:
        assert raw.hung_up()
    other = open_pipe(listening.uri)
    closing.callback(other.abort)
    other.send_tensor(block(SMALL), "first")
    assert same(waiting.result(SOON_SECONDS), block(SMALL))
    with without_threads(name), RawEnd(listening) as raw:
        assert raw.hung_up()
    exchange(listening, other)


@pytest.mark.parametrize("number", [0, 1])
def test_a_connection_without_a_descriptor_leaves_nothing(
    listening: KVPipe, closing: ExitStack, number: int
) -> None:
    before = in_use()
    with without_events([number]), RawEnd(listening) as raw:
        assert raw.hung_up()
    wait_until(lambda: is_within(before), SOON_SECONDS, f"{before}: {in_use()}")
    other = open_pipe(listening.uri)
    closing.callback(other.abort)
    exchange(listening, other)


def test_connecting_without_a_descriptor_breaks_the_pipe(listening: KVPipe) -> None:
    before = in_use()
    with without_events(range(100)), pytest.raises(PipeBroken):
        open_pipe(listening.uri)
    wait_until(lambda: is_within(before), SOON_SECONDS, f"{before}: {in_use()}")
