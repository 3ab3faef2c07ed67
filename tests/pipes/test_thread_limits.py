"""Pipes where the system grants no thread or descriptor: that connection is lost, nothing else.

And an end that cannot listen says so, and leaves nothing.
"""

import errno
import os
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from contract_pipe import LARGE, SMALL, SOON_SECONDS, Threads, closing, same, threads
from lookup_buffer.errors import PipeBroken, PipeError
from lookup_buffer.pipes import KVPipe, open_pipe
from nodes import wait_until
from payloads import block
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


def settles(before: tuple[int, int]) -> None:
    """Also the listening end, on a thread of its own, has done with the connection."""
    wait_until(lambda: is_within(before), SOON_SECONDS, f"as before, {before}")


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
    with without_threads(name):
        with pytest.raises(PipeBroken) as caught:
            open_pipe(a.uri)
        settles(before)
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


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_an_end_without_a_thread_to_accept_leaves_nothing(tmp_path: Path, scheme: str) -> None:
    cannot_listen(f"{scheme}://{tmp_path}/pipe" if scheme == "shm" else f"{scheme}://127.0.0.1:0")
    assert not list(tmp_path.iterdir())


def test_an_end_through_a_database_without_a_thread_to_accept_leaves_nothing(
    valkey_server: EmbeddedServer,
) -> None:
    cannot_listen(f"{valkey_server.url}?pipe=accept")


def cannot_listen(uri: str) -> None:
    others, _ = in_use()
    open_pipe(uri, listen=True).close()  # which imports what it needs
    wait_until(lambda: in_use()[0] == others, SOON_SECONDS, "its thread ended")
    before = in_use()
    with without_threads("lb-pipe-accept"), pytest.raises(PipeBroken) as caught:
        open_pipe(uri, listen=True)
    assert is_within(before), "without a garbage collection"
    assert caught.value.__traceback__


def test_both_ends_break_if_one_has_no_thread_to_make_the_communicator(
    closing: ExitStack, threads: Threads
) -> None:
    a = open_pipe("gloo://127.0.0.1:0", listen=True)
    b = open_pipe(a.uri)
    for pipe in (a, b):
        closing.callback(pipe.abort)
    b.send_tensor(block(LARGE))
    with without_threads("lb-pipe-pair"), pytest.raises(PipeBroken, match="thread"):
        a.recv_tensor(timeout=SOON_SECONDS)
    with pytest.raises(PipeError):
        b.recv_tensor(timeout=SOON_SECONDS)


def test_memory_is_shared_without_a_thread_that_prefaults_it(tmp_path: Path) -> None:
    with without_threads("lb-populate"):
        a = open_pipe(f"shm://{tmp_path}/pipe", listen=True)
        b = open_pipe(a.uri)
        b.send_tensor(block(LARGE))
        assert same(a.recv_tensor(timeout=SOON_SECONDS), block(LARGE))
        b.close()
        a.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_connection_without_a_descriptor_leaves_nothing(
    listening: KVPipe, closing: ExitStack, number: int
) -> None:
    before = in_use()
    with without_events([number]), RawEnd(listening) as raw:
        assert raw.hung_up()
    settles(before)
    other = open_pipe(listening.uri)
    closing.callback(other.abort)
    exchange(listening, other)


def test_connecting_without_a_descriptor_breaks_the_pipe(listening: KVPipe) -> None:
    before = in_use()
    with without_events(range(100)):
        with pytest.raises(PipeBroken):
            open_pipe(listening.uri)
        settles(before)
