"""RedisStore on servers that are frozen, killed, full, loading, read-only or refuse the login."""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from patience import scaled
from servers import (
    QUIET,
    ServerProcess,
    StartServer,
    alive,
    command,
    free_port,
    frozen,
    redis_executable,
    valkey_executable,
)
from store import (
    BlockingStore,
    BrowsableStore,
    EmbeddedServer,
    Failure,
    NodeInfo,
    NodeTaken,
    Publication,
    Publishing,
    Releasing,
    StoreError,
    StoreFull,
    StoreUnavailable,
    Withdrawing,
    open_store,
)
from store.testing.claims import ask
from store.testing.samples import BOOT, OTHER_BOOT, a_location, a_mark, a_record

pytestmark = pytest.mark.alone
CALL_SECONDS = 0.3
MARGIN_SECONDS = 0.25

CALLS: dict[str, Callable[[BlockingStore], object]] = {
    "publish_many": lambda store: store.publish_many(
        [Publishing(a_record("ns", f"k{n}"), a_location(), 60.0) for n in range(64)]
    ),
    "look_up": lambda store: store.look_up([("ns", "k")] * 32),
    "withdraw_many": lambda store: store.withdraw_many(
        [Withdrawing("ns", f"k{n}", "node-1", "evicted") for n in range(64)]
    ),
    "claim": lambda store: ask(store, "ns", "a"),
    "release_many": lambda store: store.release_many(
        [Releasing("ns", f"k{n}", "t") for n in range(64)]
    ),
    "beat": lambda store: store.beat("node-1", BOOT, 1),
    "leave": lambda store: store.leave("node-1", BOOT),
    "beats": lambda store: store.beats(),
    "describe_node": lambda store: store.describe_node(
        NodeInfo("node-1", BOOT, "tcp://h:1", "h", "0", 1, 1, 1)
    ),
    "node_infos": lambda store: store.node_infos(["node-1"]),
    "node_ages": lambda store: store.node_ages(["node-1"]),
    "describe_namespace": lambda store: store.describe_namespace("ns", {"model": "m"}),
    "namespaces": lambda store: store.namespaces(),
    "add_hits": lambda store: store.add_hits("ns", {"k": 1}),
    "hits": lambda store: store.hits("ns", ["k"]),
    "add_stats": lambda store: store.add_stats("node-1", {"hits": 1}),
    "stats": lambda store: store.stats(),
    "scan": lambda store: list(store.scan()),
    "gone": lambda store: store.gone("ns", "k"),
    "note_failures": lambda store: store.note_failures([Failure("ns", "k", "checksum", "a", "b")]),
    "failure": lambda store: store.failure("ns", "k"),
    "mark_invalid": lambda store: store.mark_invalid("ns", a_mark()),
    "invalidations": lambda store: store.invalidations(),
    "clear": lambda store: store.clear("ns"),
    "server_info": lambda store: store.server_info(),
    "ping": lambda store: store.ping(),
}


def test_every_operation_is_tried() -> None:
    assert set(CALLS) == BrowsableStore.__abstractmethods__ - {"close", "failovers"}


@pytest.fixture
def server(start_server: StartServer) -> EmbeddedServer:
    return start_server()


@pytest.fixture
def store(server: EmbeddedServer) -> Iterator[BlockingStore]:
    with open_store(server.url, call_timeout_seconds=CALL_SECONDS) as store:
        yield store


def fails_within(seconds: float, call: Callable[[], object]) -> StoreError:
    """The error of a call, which must come in time. Tried twice, in case the machine paused."""
    for attempt in range(5):
        start = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            call()
        elapsed = time.monotonic() - start
        if elapsed <= seconds:
            return caught.value
        print(f"attempt {attempt}: {elapsed:.3f} s")
    pytest.fail(f"the call took {elapsed:.3f} s, {seconds:.3f} were allowed")


def test_a_frozen_server_costs_one_timeout(server: EmbeddedServer) -> None:
    """Each operation, all at once: one store each, so that each has a connection of its own."""
    with ExitStack() as stack:
        stores = {
            name: stack.enter_context(open_store(server.url, call_timeout_seconds=CALL_SECONDS))
            for name in CALLS
        }
        for store in stores.values():
            store.beat("node-1", BOOT, 1)
        with frozen(server), ThreadPoolExecutor(len(CALLS)) as callers:
            frozen_out = {
                name: callers.submit(_fails_without_an_answer, partial(call, stores[name]))
                for name, call in CALLS.items()
            }
            errors = {name: call.exception() for name, call in frozen_out.items()}
        assert errors == dict.fromkeys(CALLS)
        for name, call in CALLS.items():
            call(stores[name])


def _fails_without_an_answer(call: Callable[[], object]) -> None:
    error = fails_within(CALL_SECONDS + MARGIN_SECONDS, call)
    assert error.__cause__ is not None
    # Now without a connection: the kernel accepts it on behalf of the frozen server.
    fails_within(CALL_SECONDS + MARGIN_SECONDS, call)


def test_replies_to_abandoned_calls_are_dropped(
    store: BlockingStore, server: EmbeddedServer
) -> None:
    for n in range(3):
        store.publish(a_record("ns", f"k{n}"), a_location())
    with frozen(server), pytest.raises(StoreUnavailable):
        store.locate("ns", ["k0", "k1"])
    for _ in range(20):
        found = store.locate("ns", ["k2", "missing"])
        assert [record and record.key for record in found] == ["k2", None]


def test_a_killed_server_is_refused_at_once_and_used_again_when_it_is_back(
    store: BlockingStore, server: EmbeddedServer
) -> None:
    store.ping()
    os.kill(server.pid, signal.SIGKILL)
    while alive(server.pid):
        time.sleep(0.005)
    for call in CALLS.values():
        fails_within(MARGIN_SECONDS, lambda call=call: call(store))  # type: ignore[misc]
    again = EmbeddedServer.start(
        server.directory, timeout_seconds=10, executable=valkey_executable()
    )
    with again:
        assert not store.beat("node-1", BOOT, 2), "the next call works, and sees the loss"
        assert store.locate("ns", ["k"]) == [None]


def test_a_restart_of_the_server_between_two_calls_costs_nothing(
    store: BlockingStore, server: EmbeddedServer
) -> None:
    store.ping()
    server.close()
    with EmbeddedServer.start(server.directory, timeout_seconds=10, executable=valkey_executable()):
        store.ping()


@pytest.mark.parametrize("which", ["valkey", "redis"])
def test_a_full_server_refuses_copies_and_accepts_removals(
    start_server: StartServer, which: str
) -> None:
    executable = valkey_executable() if which == "valkey" else redis_executable()
    server = start_server(executable=executable, policy="noeviction")
    with open_store(server.url, call_timeout_seconds=5) as store:
        store.publish(a_record("ns", "k"), a_location())
        ask(store, "ns", "a")
        store.beat("node-1", BOOT, 1)
        command(server.url, "CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreFull):
            store.publish(a_record("ns", "other"), a_location())
        several = [Publishing(a_record("ns", key), a_location(), 60.0) for key in ("x", "k")]
        assert store.publish_many(several) == [Publication.REFUSED] * 2
        for name in ("claim", "describe_node", "describe_namespace", "add_hits", "add_stats"):
            with pytest.raises(StoreFull):
                CALLS[name](store)
        assert store.locate("ns", ["k"]) != [None]
        assert store.beat("node-1", BOOT, 2)
        assert store.beats()["node-1"].sequence == 2
        with pytest.raises(NodeTaken):
            store.beat("node-1", OTHER_BOOT, 1)
        assert store.release_claim("ns", "k", token="token-of-a"), "a refusal left it"
        assert store.withdraw("ns", "k", "node-1", reason="evicted")
        assert store.gone("ns", "k") == "evicted"
        store.leave("node-1", BOOT)
        assert store.beats() == {}


def test_the_embedded_servers_policy_evicts_records_and_keeps_beats(
    start_server: StartServer,
) -> None:
    server = start_server()
    with open_store(server.url, call_timeout_seconds=5) as store:
        store.beat("node-1", BOOT, 1)
        used = store.server_info().used_memory_bytes
        command(server.url, "CONFIG", "SET", "maxmemory", used + 300_000)
        for n in range(1500):
            store.publish(a_record("ns", f"k{n}"), a_location())
        held = len(list(store.scan()))
        assert 0 < held < 1500
        assert store.beats()["node-1"].sequence == 1


def test_a_replica_refuses_writes(store: BlockingStore, server: EmbeddedServer) -> None:
    command(server.url, "REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreUnavailable):
        store.publish(a_record("ns", "k"), a_location())
    command(server.url, "REPLICAOF", "NO", "ONE")
    store.publish(a_record("ns", "k"), a_location())


def test_a_wrong_password_is_unavailable_and_not_shown(server: EmbeddedServer) -> None:
    command(server.url, "CONFIG", "SET", "requirepass", "the-right-one")
    path = server.url.removeprefix("unix://")
    right = f"unix://:the-right-one@{path}"
    with open_store(right) as store:
        store.beat("node-1", BOOT, 1)
    with open_store(f"unix://:wrong@{path}", password="the-right-one") as store:
        assert store.beat("node-1", BOOT, 2), "the argument comes before the URL"
    for url in (f"unix://:hunter2@{path}", server.url):
        with open_store(url, password=None) as store:
            with pytest.raises(StoreUnavailable) as caught:
                store.ping()
            shown = f"{caught.value!r} {caught.value.__cause__!r} {store!r}"
            assert "hunter2" not in shown


def test_a_server_without_auth_quotes_the_password(tmp_path: Path) -> None:
    """A program prints what it does not catch, with the error's cause."""
    port = free_port()
    without = ["--rename-command", "AUTH", "", "--rename-command", "HELLO", ""]
    options = ["--port", str(port), "--bind", "127.0.0.1", *without, *QUIET]
    server = ServerProcess(valkey_executable(), tmp_path / "server", port, options)
    try:
        refused = pytest.raises(StoreUnavailable, match="refuses the login: ERR")
        with open_store(f"redis://:hunter2@127.0.0.1:{port}") as store, refused as caught:
            store.ping()
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    finally:
        server.kill()


def test_a_user_without_rights_is_unavailable(server: EmbeddedServer) -> None:
    path = server.url.removeprefix("unix://")
    command(
        server.url, "ACL", "SETUSER", "lb", "on", ">pw", "resetkeys", "~lb:*", "resetchannels",
        "+@read", "+@write", "+@scripting", "+@connection", "-@dangerous",
    )  # fmt: skip
    with open_store(f"unix://lb:pw@{path}", call_timeout_seconds=5) as store:
        store.publish(a_record("ns", "k"), a_location())
        assert store.withdraw("ns", "k", "node-1", reason="evicted")
        assert ask(store, "ns", "a").granted
        with pytest.raises(StoreUnavailable, match="permission"):
            store.server_info()
        command(server.url, "ACL", "SETUSER", "lb", "resetkeys", "~other:*")
        with pytest.raises(StoreUnavailable):
            store.locate("ns", ["k"])


def test_an_address_without_a_listener(tmp_path: Path) -> None:
    with open_store(f"unix://{tmp_path}/nothing.sock") as store:
        fails_within(MARGIN_SECONDS, lambda: store.locate("ns", ["k"]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with open_store(f"redis://127.0.0.1:{free.getsockname()[1]}") as store:
            fails_within(MARGIN_SECONDS, lambda: store.locate("ns", ["k"]))


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*1\r\n$9999999\r\n",
        b"",
        b"-LOADING the dataset is being loaded\r\n",
        b"-MISCONF the disk is full\r\n",
        b"-CLUSTERDOWN the cluster is down\r\n",
        b"-MOVED 1 127.0.0.1:1\r\n",
        b"-ASK 1 127.0.0.1:1\r\n",
        b"-MOVED to a better place\r\n",
    ],
    ids=[
        "no RESP",
        "cut off",
        "nothing",
        "loading",
        "disk full",
        "cluster down",
        "moved",
        "ask",
        "garbled",
    ],
)
def test_a_server_with_unexpected_replies_is_unavailable(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                while commands := connection.recv(4096).count(b"*"):
                    connection.sendall(reply * commands)

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            open_store(f"redis://127.0.0.1:{listener.getsockname()[1]}") as store,
            pytest.raises(StoreUnavailable) as caught,
        ):
            store.beat("node-1", BOOT, 1)
        if reply.startswith((b"-MOVED 1", b"-ASK")):
            assert "redis-cluster://" in str(caught.value), "what to write instead"
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_over_tcp_with_a_database(start_server: StartServer) -> None:
    server = start_server()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command(server.url, "CONFIG", "SET", "bind", "127.0.0.1")
    command(server.url, "CONFIG", "SET", "port", port)
    with open_store(f"valkey://127.0.0.1:{port}/3", call_timeout_seconds=CALL_SECONDS) as store:
        store.publish(a_record("ns", "k"), a_location())
        assert store.locate("ns", ["k"]) != [None]
        assert command(server.url, "DBSIZE") == b":0", "database 0 is empty, 3 is not"
        with frozen(server):
            fails_within(CALL_SECONDS + MARGIN_SECONDS, lambda: store.locate("ns", ["k"]))


def test_closing_while_others_wait_is_bounded(server: EmbeddedServer) -> None:
    store = open_store(server.url, call_timeout_seconds=6.0)
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            store.ping()
        except BaseException as error:
            outcome.append(error)

    store.ping()
    with frozen(server):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.02)
        start = time.monotonic()
        store.close()
        assert time.monotonic() - start < 5.0, "it waits for them"
        thread.join(timeout=scaled(6))
    assert [type(error) for error in outcome] == [StoreUnavailable]
    while b"connected_clients:1\r" not in command(server.url, "INFO", "clients"):
        assert time.monotonic() - start < scaled(5), "a connection outlived its store"
        time.sleep(0.01)
