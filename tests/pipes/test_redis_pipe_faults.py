"""`redis` pipes when the database fails, loses data, or refuses commands."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from contract_pipe import LARGE, SMALL, SOON_SECONDS, Threads, closing, same, threads
from lookup_buffer.errors import ConfigError, PipeBroken, PipeError, PipeTimeout
from lookup_buffer.pipes import PipeLimits, open_pipe
from lookup_buffer.pipes.redis_dial import dial
from lookup_buffer.pipes.redis_link import CHECK_SECONDS, CHUNK_BYTES, RedisLink, Session
from lookup_buffer.pipes.resp import Resp3Connection
from patience import quickest
from payloads import block
from servers import PASSWORD, StartServer, TlsServer, flush, frozen
from store import EmbeddedServer
from thread_limits import in_use, is_within

__all__ = ["closing", "threads"]
URI = "{}?pipe=faults"
EXPIRY_SECONDS = 61
SILENCE_SECONDS = 2.0
LIMITS = PipeLimits(buffer_bytes=LARGE, silence_seconds=SILENCE_SECONDS, linger_seconds=0.1)
SESSION = Session("lb:pipe:faults:s")


@contextmanager
def connection_to(url: str) -> Iterator[Resp3Connection]:
    connection = Resp3Connection(dial(url, SOON_SECONDS))
    yield connection
    connection.close()


def soon() -> float:
    return time.monotonic() + SOON_SECONDS


def lives(url: str) -> dict[bytes, int]:
    """The keys of the server, and the milliseconds to their expiry."""
    with connection_to(url) as connection:
        names = connection.request((b"KEYS", b"*"), soon())
        found = {name: connection.request((b"PTTL", name), soon()) for name in names}
    return {name: left for name, left in found.items() if left != -2}  # expired meanwhile


@pytest.fixture
def links(valkey_server: EmbeddedServer) -> Iterator[tuple[RedisLink, RedisLink]]:
    """Two links of one session: the end that connected, and the one that listens."""
    flush(valkey_server.url)
    with ExitStack() as stack:
        made = []
        for listens in (False, True):
            reader, writer = (
                Resp3Connection(dial(valkey_server.url, SOON_SECONDS)) for _ in range(2)
            )
            reader.subscribe(SESSION.list_to(listens), soon())
            link = RedisLink(SESSION, reader, writer, listens=listens, silence_seconds=5.0)
            stack.callback(link.abort)
            made.append(link)
        yield made[0], made[1]


def appears(url: str, name: bytes) -> None:
    deadline = soon()
    while name not in lives(url):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_chunk_that_is_missing_is_written_again(
    links: tuple[RedisLink, RedisLink], valkey_server: EmbeddedServer, threads: Threads
) -> None:
    sender, receiver = links
    payload = memoryview(block(5 * CHUNK_BYTES + 7).numpy().tobytes())
    sending = threads.call(sender.send, ["data", 1], payload, timeout=SOON_SECONDS)
    appears(valkey_server.url, b"lb:pipe:faults:s:up:1:5")
    with connection_to(valkey_server.url) as connection:
        for lost in (b"1", b"5"):
            assert connection.request((b"DEL", b"lb:pipe:faults:s:up:1:" + lost), soon()) == 1
    assert receiver.recv_header(SOON_SECONDS) == (["data", 1], payload.nbytes)
    buffer = memoryview(bytearray(payload.nbytes))
    receiver.recv_into(buffer, timeout=SOON_SECONDS)
    sending.result(SOON_SECONDS)
    assert buffer == payload


def test_a_database_that_keeps_nothing_breaks_the_pipe(
    links: tuple[RedisLink, RedisLink], valkey_server: EmbeddedServer, threads: Threads
) -> None:
    payload = memoryview(bytes(CHUNK_BYTES))
    sending = threads.call(links[0].send, ["data", 1], payload, timeout=60.0)
    with connection_to(valkey_server.url) as connection:
        missing = (1).to_bytes(8, "big") + bytes(8) + b"\0"
        for _ in range(3):
            connection.request((b"RPUSH", b"lb:pipe:faults:s:up:had", missing), soon())
        with pytest.raises(PipeBroken, match="does not keep"):
            sending.result(SOON_SECONDS)


def test_a_value_of_another_length_is_no_chunk(
    links: tuple[RedisLink, RedisLink], valkey_server: EmbeddedServer, threads: Threads
) -> None:
    sender, receiver = links
    payload = memoryview(bytes(CHUNK_BYTES))
    sending = threads.call(sender.send, ["data", 1], payload, timeout=60.0)
    appears(valkey_server.url, b"lb:pipe:faults:s:up:1:0")
    with connection_to(valkey_server.url) as connection:
        connection.request((b"SET", b"lb:pipe:faults:s:up:1:0", b"short"), soon())
    receiver.recv_header(SOON_SECONDS)
    with pytest.raises(Exception, match="another length"):
        receiver.recv_into(memoryview(bytearray(CHUNK_BYTES)), timeout=SOON_SECONDS)
    sender.abort()
    with pytest.raises(PipeError):
        sending.result(SOON_SECONDS)


def test_lost_frames_are_detected(
    links: tuple[RedisLink, RedisLink], valkey_server: EmbeddedServer
) -> None:
    sender, receiver = links
    sender.send(["offer", 1], timeout=SOON_SECONDS)
    flush(valkey_server.url)
    sender.send(["beat"], timeout=SOON_SECONDS)
    with pytest.raises(PipeBroken, match="lost"):
        receiver.recv_header(SOON_SECONDS)


def test_all_that_is_written_expires_and_an_orderly_end_leaves_nothing(
    valkey_server: EmbeddedServer, threads: Threads
) -> None:
    flush(valkey_server.url)
    uri = URI.format(valkey_server.url)
    with open_pipe(uri, listen=True) as a, open_pipe(uri) as b:
        receiving = threads.call(a.recv_tensor, timeout=SOON_SECONDS)
        seen: dict[bytes, int] = {}
        b.send_tensor(block(64 * LARGE))
        while not receiving.done():
            seen |= lives(valkey_server.url)
        receiving.result()
        b.send_tensor(block(SMALL))
        assert same(a.recv_tensor(timeout=SOON_SECONDS), block(SMALL))
    assert any(name.startswith(b"lb:pipe:faults:") for name in seen)
    assert all(0 < left <= EXPIRY_SECONDS * 1000 for left in seen.values())
    assert all(left > 0 for left in lives(valkey_server.url).values())
    deadline = soon()
    # A beat that crossed "bye" may be left until it expires.
    while names := {n for n in lives(valkey_server.url) if not n.endswith((b":up", b":down"))}:
        assert time.monotonic() < deadline, names


def test_an_orderly_end_is_detected_before_the_next_check(valkey_server: EmbeddedServer) -> None:
    """The other end sends a last frame, because no stream to it ends."""

    def open_and_close() -> None:
        a = open_pipe(URI.format(valkey_server.url), listen=True)
        b = open_pipe(a.uri)
        a.close()
        b.close()

    assert quickest(open_and_close, CHECK_SECONDS / 2) < CHECK_SECONDS / 2


def test_an_abort_is_detected_before_the_next_check(
    valkey_server: EmbeddedServer, closing: ExitStack
) -> None:

    def open_and_abort() -> None:
        a = closing.enter_context(open_pipe(URI.format(valkey_server.url), listen=True))
        b = open_pipe(a.uri)
        b.send_tensor(None)
        a.recv_tensor(timeout=SOON_SECONDS)
        deadline = soon()
        while b.used_bytes and time.monotonic() < deadline:
            time.sleep(0.001)  # until it is idle: the abort can then send its last frame
        b.abort()
        with pytest.raises(PipeBroken):
            a.recv_tensor(timeout=SOON_SECONDS)
        a.close()

    assert quickest(open_and_abort, CHECK_SECONDS / 2) < CHECK_SECONDS / 2


def test_keys_of_a_killed_end_expire(valkey_server: EmbeddedServer, threads: Threads) -> None:
    flush(valkey_server.url)
    uri = URI.format(valkey_server.url)
    with open_pipe(uri, listen=True) as a:
        b = open_pipe(uri)
        b.send_tensor(block(64 * LARGE))
        receiving = threads.call(a.recv_tensor, timeout=SOON_SECONDS)
        b.abort()
        with pytest.raises(PipeBroken):
            receiving.result(SOON_SECONDS)
            a.recv_tensor(timeout=SOON_SECONDS)
    assert all(0 < left <= EXPIRY_SECONDS * 1000 for left in lives(valkey_server.url).values())


def test_an_end_that_cannot_announce_itself_closes_its_connections(
    valkey_server: EmbeddedServer, closing: ExitStack
) -> None:
    """A listening end is connected, and the key of its list has a value of another type."""
    closing.callback(flush, valkey_server.url)
    listener = closing.enter_context(connection_to(valkey_server.url))
    listener.request((b"SET", b"lb:pipe:unheard:door", b"no list"), soon())
    listener.subscribe(b"lb:pipe:unheard:door@0", soon())
    before = in_use()
    with pytest.raises(PipeBroken, match="WRONGTYPE") as caught:
        open_pipe(f"{valkey_server.url}?pipe=unheard", timeout=SOON_SECONDS)
    assert is_within(before), "without a garbage collection"
    assert caught.value.__traceback__


def test_every_wait_ends_when_the_database_is_killed(
    start_server: StartServer, threads: Threads, closing: ExitStack
) -> None:
    server = start_server()
    alone = open_pipe(f"{server.url}?pipe=alone", listen=True, limits=LIMITS)
    a = open_pipe(URI.format(server.url), listen=True, limits=LIMITS)
    b = open_pipe(URI.format(server.url), limits=LIMITS)
    for pipe in (alone, a, b):
        closing.callback(pipe.abort)
    a.send_tensor(block(LARGE))
    waiting = [
        threads.call(alone.recv_tensor),
        threads.call(alone.send_tensor, None),
        threads.call(a.recv_tensor, "k"),
        threads.call(a.send_tensor, block(LARGE)),
        threads.call(b.recv_tensor, "k"),
    ]
    os.kill(server.pid, signal.SIGKILL)
    for one in waiting:
        with pytest.raises(PipeBroken):
            one.result(SOON_SECONDS)
    with pytest.raises(PipeBroken):
        open_pipe(URI.format(server.url), timeout=0.2)


def test_every_wait_ends_when_the_database_is_stopped(
    start_server: StartServer, threads: Threads, closing: ExitStack
) -> None:
    server = start_server()
    a = open_pipe(URI.format(server.url), listen=True, limits=LIMITS)
    b = open_pipe(URI.format(server.url), limits=LIMITS)
    closing.callback(a.abort)
    closing.callback(b.abort)
    a.send_tensor(block(LARGE))
    waiting = [
        threads.call(a.recv_tensor, "k"),
        threads.call(a.send_tensor, block(LARGE)),
        threads.call(b.recv_tensor, "k"),
    ]
    with frozen(server):
        for one in waiting:
            with pytest.raises(PipeTimeout):
                one.result(SILENCE_SECONDS + SOON_SECONDS)
        started = time.monotonic()
        a.close()
        b.close()
        assert time.monotonic() - started < SOON_SECONDS


def test_a_server_without_room_breaks_its_pipe(
    start_server: StartServer, closing: ExitStack
) -> None:
    server = start_server(maxmemory_bytes=8 << 20, policy="noeviction")
    a = open_pipe(URI.format(server.url), listen=True)
    b = open_pipe(URI.format(server.url))
    closing.callback(a.abort)
    closing.callback(b.abort)
    b.send_tensor(block(32 * LARGE))
    with pytest.raises(PipeBroken):
        a.recv_tensor(timeout=SOON_SECONDS)
    with pytest.raises(PipeBroken, match="OOM"):
        b.recv_tensor(timeout=SOON_SECONDS)


def test_over_tls_as_the_documented_user(tls_server: TlsServer) -> None:
    uri = f"{tls_server.url}&pipe=tls"
    tensor = block(9 * LARGE + 1)
    with open_pipe(uri, listen=True) as a, open_pipe(uri) as b:
        for there, back in ((a, b), (b, a)):
            there.send_tensor(tensor, "k")
            assert same(back.recv_tensor("k", timeout=SOON_SECONDS), tensor)


@pytest.mark.parametrize("wrong", [{"password": "wrong-secret"}, {"user": "nobody"}])
def test_refused_users(tls_server: TlsServer, wrong: dict[str, str]) -> None:
    uri = f"{tls_server.url_of(**wrong)}&pipe=tls"  # type: ignore[arg-type]
    with pytest.raises(PipeBroken) as caught:
        open_pipe(uri, timeout=SOON_SECONDS)
    for secret in ("wrong-secret", PASSWORD):
        assert secret not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_a_name_has_one_listener_at_a_time(valkey_server: EmbeddedServer) -> None:
    uri = URI.format(valkey_server.url)
    with open_pipe(uri, listen=True):
        with pytest.raises(ConfigError, match="listens at pipe faults"):
            open_pipe(uri, listen=True)
        open_pipe(f"{uri}-2", listen=True).close()
        open_pipe(f"{uri}&db=1", listen=True).close()
    with pytest.raises(PipeTimeout, match="no end listens at pipe faults"):
        open_pipe(uri, timeout=0.1)
    open_pipe(uri, listen=True).close()


@pytest.mark.parametrize(
    "uri",
    [
        "redis://h:secret@host",
        "redis://h:secret@host?pipe=",
        "redis://h:secret@host?pipe=a&pipe=b",
        "redis://h:secret@host?pipe=a/b",
        "redis://h:secret@host?pipe=a&other=1",
        "redis://h:secret@a,b?pipe=a",
        "unix://host?pipe=a",
        "redis-cluster://h:secret@host?pipe=a",
    ],
)
def test_invalid_addresses(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_pipe(uri)
    assert "secret" not in str(caught.value)
