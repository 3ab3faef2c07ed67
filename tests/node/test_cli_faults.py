"""Every command on any store and output: a sentence and an exit code, never a traceback.

The commands of one case run side by side, for some of them wait for beats.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from urllib.parse import unquote

import pytest

from command_line import publish, run
from resp import RespConnection
from servers import StartServer, command, frozen, patient
from store import layout

SPACE = "a" * 64
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "ls": ("ls",),
    "ls json": ("ls", "--json", "--min-hits", "0"),
    "show": ("show", "key"),
    "show json": ("show", "key", "--json"),
    "why": ("why", "key"),
    "stats": ("stats",),
    "top": ("top", "--interval", "0.2"),
    "nodes": ("nodes",),
    "doctor": ("doctor",),
    "invalidate": ("invalidate", SPACE[:8]),
}
Done = Mapping[str, CompletedProcess[str]]


def run_all(directory: Path, url: str, **settings: str) -> Done:
    """Every command: none may print a traceback, and each prints a message."""
    settings |= {"LOOKUP_BUFFER_STORE_URL": url, "LOOKUP_BUFFER_DIRECTORY": str(directory / "d")}
    with ThreadPoolExecutor(len(COMMANDS)) as pool:
        running = {
            name: pool.submit(run, *arguments, **settings) for name, arguments in COMMANDS.items()
        }
        done = {name: one.result() for name, one in running.items()}
    for name, one in done.items():
        said = one.stdout + one.stderr
        assert "Traceback" not in said, f"{name}: {said}"
        assert said.strip(), name
        assert one.stderr == "" or one.stderr.startswith("lookup-buffer: "), f"{name}: {one.stderr}"
        assert one.stderr.count("\n") <= 1, f"{name}: {one.stderr}"
        assert one.returncode in (0, 1, 2, 3), f"{name}: {one.returncode}: {said}"
    return done


def codes(done: Done) -> dict[str, int]:
    return {name: one.returncode for name, one in done.items()}


def all_unreachable(done: Done) -> bool:
    """`doctor` finds that, the others end by it."""
    return codes(done) == {**dict.fromkeys(COMMANDS, 3), "doctor": 1}


# -- the server


def test_an_empty_server(start_server: StartServer, tmp_path: Path) -> None:
    absent = {"show": 1, "show json": 1, "why": 1, "invalidate": 1}
    done = run_all(tmp_path, start_server().url)
    assert codes(done) == {**dict.fromkeys(COMMANDS, 0), **absent}
    assert "there is no namespace" in done["invalidate"].stderr


def test_no_server_listens(tmp_path: Path) -> None:
    done = run_all(tmp_path, "redis://127.0.0.1:1")
    assert all_unreachable(done)
    assert "Connection refused" in done["ls"].stderr


def test_no_such_host(tmp_path: Path) -> None:
    assert all_unreachable(run_all(tmp_path, "redis://no-such-host.invalid"))
    assert all_unreachable(run_all(tmp_path, f"redis://{'x' * 64}.invalid"))


def test_a_frozen_server(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server()
    with frozen(server):
        assert all_unreachable(run_all(tmp_path, server.url))


def test_a_user_without_rights(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server()
    assert command(server.url, "ACL", "SETUSER", "default", "-@all", "+ping") == b"+OK"
    done = run_all(tmp_path, server.url)
    assert all_unreachable(done)
    for name, one in done.items():
        assert "docs/redis-keys.md" in one.stdout + one.stderr, name


def test_a_wrong_password(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server()
    assert command(server.url, "CONFIG", "SET", "requirepass", "geheim") == b"+OK"
    done = run_all(tmp_path, server.url, LOOKUP_BUFFER_STORE_PASSWORD="falsch")
    assert all_unreachable(done)
    assert not [one for one in done.values() if "falsch" in one.stdout + one.stderr]
    assert all_unreachable(run_all(tmp_path, server.url))


@contextmanager
def saying(answer: bytes) -> Iterator[str]:
    """A server that is no Redis: it sends this to every connection, and closes it."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                end, _ = listener.accept()
            except OSError:
                return
            with end:
                end.settimeout(5.0)
                try:
                    end.recv(65536)
                    end.sendall(answer)
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
        bytes(range(256)),
        b"$999999999999999999\r\n",
        b"*4\r\n" * 10_000,
    ],
    ids=["http", "ssh", "nothing", "bytes", "long", "deep"],
)
def test_no_redis_at_all(tmp_path: Path, answer: bytes) -> None:
    with saying(answer) as url:
        assert all_unreachable(run_all(tmp_path, url))


def test_another_product(tmp_path: Path) -> None:
    """It uses Redis' protocol and has none of its commands."""
    with saying(b"-ERR unknown command\r\n" * 100) as url:
        done = run_all(tmp_path, url)
    assert 0 not in codes(done).values()


# -- what stands in it


def as_text(url: str, database: int, name: str) -> None:
    in_database(url, database, "SET", name, "\x1b[31mforeign")


def as_list(url: str, database: int, name: str) -> None:
    in_database(url, database, "RPUSH", name, b"\xff\xfe", "")


def as_nonsense(url: str, database: int, name: str) -> None:
    """A HASH whose fields have our names and impossible values."""
    names = ("shape", "nbytes", "created", "capacity_bytes", "dtype", "items", "kind", "v", "x")
    nested, long = "[" * 100_000, "9" * 5000
    values: tuple[str | bytes, ...] = (
        nested,
        long,
        "nan",
        "1e999",
        b"\xff",
        "-1",
        "\x1b[31m",
        "{",
        ":",
    )
    pairs: list[str | bytes] = []
    for pair in zip(names, values, strict=True):
        pairs += pair
    more = ("at:n1", long, "n1", "nan", "hits_local", long)
    in_database(url, database, "HSET", name, *pairs, *more)


def in_database(url: str, database: int, *parts: str | bytes) -> None:
    """Write under a name, whatever stood there."""
    with RespConnection(unquote(url.removeprefix("unix://"))) as send:
        send("SELECT", database)
        send("UNLINK", parts[1])
        send(*parts)


PLACES: Mapping[str, tuple[str, ...]] = {
    layout.NODES: ("ls", "show", "why", "stats", "top", "nodes", "doctor", "invalidate"),
    layout.INVALID: ("ls", "invalidate"),
    layout.namespace(SPACE): ("ls", "show", "why", "invalidate"),
    layout.record(SPACE, "key"): ("ls", "ls json", "show", "why", "doctor"),
    layout.hits(SPACE): ("ls", "show", "why", "top"),
    layout.gone(SPACE, "key"): ("show", "why"),
    layout.claim(SPACE, "key"): ("why",),
    layout.fail(SPACE, "key"): ("why",),
    layout.node("n1"): ("nodes", "ls", "doctor"),
    layout.stats("n1"): ("stats", "top"),
    layout.left("n1"): ("why",),
}
"""Keys that may hold foreign values, and the commands that read them."""


@pytest.mark.parametrize("write", [as_text, as_list, as_nonsense])
def test_values_of_another_program(
    start_server: StartServer, write: Callable[[str, int, str], None]
) -> None:
    url = start_server().url
    checks = []
    with ThreadPoolExecutor(4) as pool:  # each key has a separate database
        for database, (name, commands) in enumerate(PLACES.items()):
            with patient(f"{url}?db={database}") as store:
                store.describe_namespace(SPACE, {"model": "m"})
                publish(store, SPACE, "key", "n1")
                if name in (layout.node("n1"), layout.stats("n1")):  # read only if it is listed
                    store.beat("n1", "boot", 1)
            write(url, database, name)
            for what in commands:
                checks.append(pool.submit(check_foreign, f"{url}?db={database}", name, what))
    for check in checks:
        check.result()


def check_foreign(url: str, name: str, what: str) -> None:
    done = run(*COMMANDS[what], LOOKUP_BUFFER_STORE_URL=url)
    assert "Traceback" not in done.stderr, f"{name} {what}: {done.stderr}"
    assert done.returncode in (0, 1), f"{name} {what}: {done.stderr}"
    assert done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_numbers_that_no_record_should_have(start_server: StartServer, tmp_path: Path) -> None:
    """Each alone, in a record that is right otherwise."""
    url = start_server().url
    with patient(url) as store:
        for i, (field, value) in enumerate(
            [
                ("created", "nan"),
                ("created", "1e999"),
                ("created", "-1e300"),
                ("created", "-inf"),
                ("created", "1e300"),
                ("created", "x"),
                ("nbytes", "9" * 5000),
                ("nbytes", "-1"),
                ("shape", "[" * 100_000),
                ("shape", f"[{'9' * 4000}]"),
                ("shape", "{}"),
                ("dtype", "\x1b[31m" * 1000),
                ("v", "9" * 400),
                ("kind", "x"),
                ("at:n1", ":" * 1000),
                ("at:\x1b", "b:1:0"),
            ]
        ):
            publish(store, SPACE, f"key{i}", "n1")
            assert command(url, "HSET", layout.record(SPACE, f"key{i}"), field, value) != b""
        publish(store, SPACE, "key", "n1")
    for name in (b"lb:rec:\xff:{\xfe}", b"lb:rec:", b"lb:rec:a:{", b"lb:ns:", b"lb:node:\xff"):
        command(url, "HSET", name, "v", "1")
    done = run_all(tmp_path, url)
    assert "\x1b" not in "".join(one.stdout + one.stderr for one in done.values())
    assert done["ls"].returncode == 0
    shown = run("show", "key0", "--store-url", url)  # what no calendar has is no record
    assert shown.returncode == 1
    assert shown.stderr.startswith("lookup-buffer: no record of 'key0'")


def test_counts_and_names_that_no_node_can_have(start_server: StartServer, tmp_path: Path) -> None:
    url = start_server().url
    wrong = ("hits_local", "9" * 400, "bytes_fetched", "9" * 4000, "misses_absent", "-1")
    command(url, "HSET", layout.NODES, "n1", "bootofn1:1")
    command(url, "HSET", layout.stats("n1"), *wrong, "hits_remote", "7")
    names = ("<b>n</b>", "n\n2", "n" * 100_000)
    command(url, "HSET", layout.NODES, *(part for name in names for part in (name, "b:1")))
    command(url, "ZADD", layout.hits(SPACE), "5", "k" * 1_000_000, "3", "kept")
    command(url, "HSET", layout.namespace(SPACE), "model", "m")
    done = run_all(tmp_path, url)
    assert done["stats"].stdout.split("\n")[1].split()[:4] == ["n1", "0", "7", "0"]
    assert [line.split()[0] for line in done["nodes"].stdout.splitlines()] == ["NODE", "n1"]
    assert "kept" in done["top"].stdout
    assert len(done["top"].stdout) < 2000
