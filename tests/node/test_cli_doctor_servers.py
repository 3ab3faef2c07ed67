"""`doctor` on servers of every kind: rights, kind and contents."""

import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from clusters import Sentinels, ValkeyCluster
from command_line import run_json
from lookup_buffer.cli.check import Verdict
from lookup_buffer.cli.check_store import memory_check, version_check
from servers import (
    ADMIN_PASSWORD,
    PASSWORD,
    QUIET,
    ServerProcess,
    TlsServer,
    command,
    flush,
    free_ports,
    redis_executable,
    user_rule,
    valkey_executable,
)
from store import EmbeddedServer, ServerInfo, layout, open_store
from store.inspection import PROBES
from store.testing.samples import a_location, a_record

MIB = 1 << 20


def examine(code: int, url: str, directory: Path, **settings: str) -> dict[str, dict[str, Any]]:
    document = run_json(
        "doctor", "--store-url", url, "--directory", str(directory), code=code, **settings
    )
    assert document["ok"] is (code == 0)
    return {check["name"]: check for check in document["checks"]}


def failed(checks: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, check in checks.items() if check["verdict"] == "fail"]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Servers that a test puts in here end with it."""
    started: list[ServerProcess] = []
    yield started
    for one in started:
        one.kill()


# ---- what a server lets us do


def test_every_command_that_is_sent_is_probed() -> None:
    """The scripts' and those that the store's own modules spell out."""
    folder = files("store")
    scripts = [path.read_text() for path in folder.joinpath("scripts").iterdir()]
    used = {name for text in scripts for name in re.findall(r"redis\.p?call\('(\w+)'", text)}
    modules = [
        folder.joinpath(f"{name}.py").read_text() for name in ("redis_store", "client", "mirror")
    ]
    used |= {name for text in modules for name in re.findall(r'\("([A-Z]{3,})"', text)}
    assert {"HGETALL", "SCAN", "EVALSHA", "ZMSCORE"} <= used
    # ASK and MOVED are replies; ASKING is for clusters, and allowed for all users like PING.
    answers = {"ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOAUTH"}
    answers |= {"NOPERM", "NOREPLICAS", "READONLY", "TRYAGAIN", "UNKILLABLE"}
    assert used - answers - {"ASKING"} <= {str(probe[0]) for probe in PROBES}


def test_probing_leaves_nothing(valkey_server: EmbeddedServer, tmp_path: Path) -> None:
    flush(valkey_server.url)
    checks = examine(0, valkey_server.url, tmp_path / "d")
    assert checks["store rights"]["verdict"] == "ok"
    assert command(valkey_server.url, "DBSIZE") == b":0"


def test_the_documented_user_may_do_all(tls_server: TlsServer, tmp_path: Path) -> None:
    secret = {"LOOKUP_BUFFER_STORE_PASSWORD": PASSWORD}
    checks = examine(0, tls_server.url_of(password=""), tmp_path / "d", **secret)
    assert checks["store rights"]["verdict"] == "ok"
    assert PASSWORD not in str(checks)


def test_the_documented_user_of_readers(tls_server: TlsServer, tmp_path: Path) -> None:
    tls_server.admin("ACL", "SETUSER", "lookup-buffer-reader", "reset")
    rule = user_rule(PASSWORD, "lookup-buffer-reader")
    assert tls_server.admin("ACL", "SETUSER", "lookup-buffer-reader", *rule) == b"OK"
    settings = {"LOOKUP_BUFFER_STORE_PASSWORD": PASSWORD, "LOOKUP_BUFFER_READ_ONLY": "true"}
    url = tls_server.url_of(user="lookup-buffer-reader", password="")
    checks = examine(0, url, tmp_path / "d", **settings)
    assert checks["store rights"]["verdict"] == "ok"
    checks = examine(0, tls_server.url_of(password=""), tmp_path / "d", **settings)
    assert checks["store rights"]["verdict"] == "warn"
    assert "the user may do more than read" in checks["store rights"]["found"]


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (["-evalsha"], "refuses EVALSHA: NOPERM"),
        (["-info"], "refuses INFO: NOPERM"),
        (["-zincrby", "-hkeys"], "refuses HKEYS, ZINCRBY: NOPERM"),
        (["-client|tracking"], "refuses CLIENT TRACKING: NOPERM"),
        (["resetkeys", "~other:*"], "TYPE, EXISTS, HSET, "),
    ],
)
def test_a_user_that_may_not(
    tls_server: TlsServer, tmp_path: Path, rule: list[str], named: str
) -> None:
    tls_server.admin("ACL", "SETUSER", "limited", "reset")
    rights = ["on", ">limited", "~lb:*", "+@all", *rule]
    assert tls_server.admin("ACL", "SETUSER", "limited", *rights) == b"OK"
    secret = {"LOOKUP_BUFFER_STORE_PASSWORD": "limited"}
    checks = examine(1, tls_server.url_of(user="limited", password=""), tmp_path / "d", **secret)
    assert failed(checks) == ["store rights"]
    assert named in checks["store rights"]["found"]
    assert "ACL SETUSER" in checks["store rights"]["advice"]


def test_a_wrong_password(tls_server: TlsServer, tmp_path: Path) -> None:
    secret = {"LOOKUP_BUFFER_STORE_PASSWORD": "wrong-secret"}
    checks = examine(1, tls_server.url_of(password=""), tmp_path / "d", **secret)
    assert failed(checks) == ["store"]
    for text in ("wrong-secret", ADMIN_PASSWORD):
        assert text not in str(checks)


@pytest.mark.parametrize("option", ["ssl_cert_reqs=none", "ssl_check_hostname=false"])
def test_tls_that_is_not_verified(tls_server: TlsServer, tmp_path: Path, option: str) -> None:
    secret = {"LOOKUP_BUFFER_STORE_PASSWORD": PASSWORD}
    url = tls_server.url_of(password="")
    assert "store TLS" not in examine(0, url, tmp_path / "d", **secret)
    check = examine(0, f"{url}&{option}", tmp_path / "d", **secret)["store TLS"]
    assert check["verdict"] == "warn"
    assert option in check["found"]
    assert "ssl_ca_certs" in check["advice"]


def test_a_server_without_scripting(tmp_path: Path, process: list[ServerProcess]) -> None:
    (port,) = free_ports(1)
    without = ["--rename-command", "EVAL", "", "--rename-command", "EVALSHA", ""]
    options = ["--port", str(port), "--bind", "127.0.0.1", *without, *QUIET]
    process.append(ServerProcess(valkey_executable(), tmp_path / "server", port, options))
    checks = examine(1, f"redis://127.0.0.1:{port}", tmp_path / "d")
    assert failed(checks) == ["store rights"]
    assert "refuses EVAL, EVALSHA: ERR unknown command" in checks["store rights"]["found"]
    assert "scripting" in checks["store rights"]["advice"]


@pytest.mark.parametrize("executable", [valkey_executable, redis_executable])
def test_a_server_without_hello_quotes_the_password(
    executable: Callable[[], str], tmp_path: Path, process: list[ServerProcess]
) -> None:
    (port,) = free_ports(1)
    rights = f"user lookup-buffer on >{PASSWORD} ~* &* +@all"
    (tmp_path / "conf").write_text(f'rename-command HELLO ""\n{rights}\n')
    options = [str(tmp_path / "conf"), "--port", str(port), "--bind", "127.0.0.1", *QUIET]
    process.append(ServerProcess(executable(), tmp_path / "server", port, options))
    url = f"redis://lookup-buffer@127.0.0.1:{port}"
    checks = examine(1, url, tmp_path / "d", LOOKUP_BUFFER_STORE_PASSWORD=PASSWORD)
    assert failed(checks) == ["store rights"]
    assert "CLIENT TRACKING: ERR unknown command at the login" in checks["store rights"]["found"]
    assert "without renamed commands" in checks["store rights"]["advice"]
    assert PASSWORD not in str(checks)


# ---- what a server is


@pytest.mark.parametrize(
    ("product", "version", "verdict"),
    [
        ("redis", "6.2.14", Verdict.FAIL),
        ("redis", "7.0.0", Verdict.OK),
        ("valkey", "7.2.5", Verdict.FAIL),
        ("valkey", "8.0.1", Verdict.OK),
        ("other", "99.0", Verdict.WARN),
    ],
)
def test_versions(product: str, version: str, verdict: Verdict) -> None:
    check = version_check(ServerInfo(product, version, 0, 0, "volatile-lru", "standalone"))
    assert check.verdict is verdict
    assert f"{product} {version}" in check.found
    assert verdict is Verdict.OK or "Redis 7.0 or newer" in check.advice


@pytest.mark.parametrize(
    ("used_bytes", "verdict"), [(80 * MIB, Verdict.OK), (81 * MIB, Verdict.WARN)]
)
def test_memory_above_four_fifths(used_bytes: int, verdict: Verdict) -> None:
    info = ServerInfo("valkey", "9.0.0", 100 * MIB, used_bytes, "volatile-lru", "standalone")
    assert memory_check(info).verdict is verdict


def test_a_cluster(valkey_cluster: ValkeyCluster, tmp_path: Path) -> None:
    checks = examine(0, valkey_cluster.url, tmp_path / "d")
    assert checks["store mode"]["found"] == "cluster"
    for master in valkey_cluster.masters():
        assert master.command("DBSIZE") == 0
    member = valkey_cluster.members[0].port
    checks = examine(1, f"redis://127.0.0.1:{member}", tmp_path / "d")
    assert failed(checks) == ["store mode"]
    assert "redis-cluster://" in checks["store mode"]["advice"]


def test_one_server_named_as_a_cluster(process: list[ServerProcess], tmp_path: Path) -> None:
    (port,) = free_ports(1)
    options = ["--port", str(port), "--bind", "127.0.0.1", *QUIET]
    process.append(ServerProcess(valkey_executable(), tmp_path / "server", port, options))
    checks = examine(1, f"redis-cluster://127.0.0.1:{port}", tmp_path / "d")
    assert failed(checks) == ["store"]
    assert "cluster support disabled" in checks["store"]["found"]


def test_sentinel(sentinels: Sentinels, tmp_path: Path) -> None:
    checks = examine(0, sentinels.url, tmp_path / "d")
    assert checks["store mode"]["found"] == "sentinel"
    port = sentinels.sentinels[0].port
    checks = examine(1, f"redis://127.0.0.1:{port}", tmp_path / "d")
    assert failed(checks) == ["store mode"]
    assert "redis-sentinel://" in checks["store mode"]["advice"]


# ---- what lies in a server


def test_unreadable_records(valkey_server: EmbeddedServer, namespace: str, tmp_path: Path) -> None:
    flush(valkey_server.url)
    with open_store(valkey_server.url, call_timeout_seconds=5.0) as store:
        for key in ("good", "newer", "garbled", "moved away"):
            store.publish(a_record(namespace, key), a_location())

    def change(*parts: str) -> None:
        assert not command(valkey_server.url, *parts).startswith(b"-")

    change("HSET", layout.record(namespace, "newer"), "v", "2")
    change("HSET", layout.record(namespace, "garbled"), "shape", "large")
    change("RENAME", layout.record(namespace, "moved away"), layout.record(namespace, "else where"))
    change("SET", layout.record(namespace, "text"), "v")
    change("HSET", layout.record(namespace, "by-hand"), "note", "mine")
    checks = examine(0, valkey_server.url, tmp_path / "d")
    assert checks["records"]["verdict"] == "warn"
    found = checks["records"]["found"]
    assert found.startswith("examined: 6; unreadable: 5: ")
    for key, why in {
        "newer": "of version 2",
        "garbled": "garbled, without a location, or misnamed",
        "else where": "garbled, without a location, or misnamed",
        "text": "a string",
        "by-hand": "without a version: not written by a node",
    }.items():
        assert f"{layout.record(namespace, key)} ({why})" in found
    for n in range(3):
        change("SET", layout.record(namespace, f"more-{n}"), "v")
    assert examine(0, valkey_server.url, tmp_path / "d")["records"]["found"].endswith("and 3 more")


def test_records_are_readable(
    valkey_server: EmbeddedServer, namespace: str, tmp_path: Path
) -> None:
    flush(valkey_server.url)
    with open_store(valkey_server.url, call_timeout_seconds=5.0) as store:
        for n in range(1100):
            store.publish(a_record(namespace, f"k{n}"), a_location())
    checks = examine(0, valkey_server.url, tmp_path / "d")
    assert (checks["records"]["verdict"], checks["records"]["found"]) == ("ok", "examined: 1100")
