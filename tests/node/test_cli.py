"""The command line: how it starts, and how it refuses."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import assert_refused, environment, publish, run
from patience import scaled
from servers import StartServer, command, frozen, patient
from store import EmbeddedServer

INSPECTING = ("ls", "show", "why", "stats", "top", "nodes", "doctor", "invalidate")


# -- starting


def loaded_after(*arguments: str, **settings: str) -> set[str]:
    """The modules that are loaded when the command has run."""
    code = (
        "import json, sys\n"
        "from lookup_buffer.cli.commands import app\n"
        "try:\n    app(args=sys.argv[1:])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=scaled(60), check=False, env=environment(settings),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments", [("--help",), ("ls", "--help"), ("why", "--help"), ("serve", "--help")]
)
def test_starting_loads_no_slow_module(arguments: tuple[str, ...]) -> None:
    assert not loaded_after(*arguments) & {*SLOW, "hiredis"}


def test_a_command_loads_no_other() -> None:
    assert commands_in(loaded_after("ls", "--help")) == {"ls"}


def commands_in(loaded: set[str]) -> set[str]:
    """The commands whose modules are loaded."""
    names = (*INSPECTING, "serve", "bench")
    return {name for name in names if f"lookup_buffer.cli.{name}" in loaded}


@pytest.mark.parametrize(("before", "code"), [("", 130), ("signal.SIG_IGN", 0)])
def test_ctrl_c_while_modules_are_imported(before: str, code: int) -> None:
    """It ends without output. It has no effect if SIGINT was ignored before, as under `nohup`."""
    program = (
        "import os, signal, sys\n"
        "from lookup_buffer.cli import main\n"
        "class Interrupting:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'click':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        f"signal.signal(signal.SIGINT, {before or 'signal.default_int_handler'})\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "sys.argv[1:] = ['--version']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=scaled(60), check=False, env=environment({}),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (code == 0)


SLOW = {"torch", "numpy", "vllm", "redis", "rich.console", "pydantic"}
OURS = {
    "access", "cli", "environment", "errors", "inspection", "key", "protocol", "times",
}  # fmt: skip
"""What a command that only reads the store may load of `lookup_buffer`: the rest is for nodes,
clients and pages."""


@pytest.mark.parametrize(
    "arguments",
    [("ls",), ("stats",), ("nodes",), ("top", "--interval", "0.2"), ("ls", "--json")],
)
def test_a_command_loads_the_driver_and_no_slow_module(
    valkey_server: EmbeddedServer, namespace: str, arguments: tuple[str, ...]
) -> None:
    with patient(valkey_server.url) as store:
        publish(store, namespace, "k", "n1")
        store.add_stats("n1", {"hits_local": 1})
    loaded = loaded_after(*arguments, "--store-url", valkey_server.url)
    assert "redis.asyncio.connection" in loaded
    assert not loaded & SLOW - {"redis"}
    assert commands_in(loaded) == {arguments[0]}
    ours = {name.split(".")[1] for name in loaded if name.startswith("lookup_buffer.")}
    assert ours <= OURS
    assert {name for name in loaded if name.startswith("lookup_buffer.protocol.")} <= {
        "lookup_buffer.protocol.fields"
    }
    assert not loaded & {"store.telemetry", "store.testing"}


@pytest.mark.parametrize("arguments", [("--help",), ("ls", "--help"), ("stats",)])
def test_it_starts_at_once(valkey_server: EmbeddedServer, arguments: tuple[str, ...]) -> None:
    """0.15 s of processor with --help and 0.19 with a store, where an empty Python takes 0.012.

    Which modules are loaded decides it; the test above counts them, `benchmarks/commands.py`
    measures. The bound here is for what neither sees, such as a wait.
    """
    settings = {"LOOKUP_BUFFER_STORE_URL": valkey_server.url}
    spent, bare = [], []
    for _ in range(5):
        before = children_seconds()
        assert run(*arguments, **settings).returncode == 0
        spent.append(children_seconds() - before)
        before = children_seconds()
        subprocess.run([sys.executable, "-c", "import re, json, socket, ssl"], check=True)
        bare.append(children_seconds() - before)
    print(f"{min(spent):.3f} s, {min(spent) / min(bare):.1f} x an interpreter with a few modules")
    assert min(spent) < 50 * min(bare)


def children_seconds() -> float:
    """Processor time of all processes that have ended as ours."""
    times = os.times()
    return times.children_user + times.children_system


def test_help_names_commands_and_exit_codes() -> None:
    text = run("--help").stdout
    for name in (*INSPECTING, "serve", "demo", "Exit codes:"):
        assert name in text
    assert run("--version").stdout.startswith("lookup-buffer ")


# -- refusing


@pytest.mark.parametrize("name", INSPECTING)
def test_wrong_usage_is_2(name: str) -> None:
    done = run(name, "--nonsense")
    assert done.returncode == 2
    assert done.stdout == ""
    usage, *_, error = done.stderr.splitlines()
    assert usage.startswith(f"Usage: lookup-buffer {name} ")
    assert error.startswith("lookup-buffer: No such option")
    assert error.endswith(f"; `lookup-buffer {name} --help` lists what is allowed")
    assert "--nonsense" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("nonsense",), "No such command"), (("ls", "--limit"), "requires an argument"),
     (("ls", "--limit", "x"), "not a valid integer"), (("show",), "Missing argument")],
)  # fmt: skip
def test_each_wrong_usage_ends_with_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert sum(line.startswith("lookup-buffer: ") for line in done.stderr.splitlines()) == 1
    assert words in done.stderr.splitlines()[-1]


def test_without_arguments_it_prints_its_help() -> None:
    done = run()
    assert done.returncode == 2
    assert "Exit codes:" in done.stderr
    assert "lookup-buffer: " not in done.stderr


@pytest.mark.parametrize("name", ["ls", "stats", "top", "nodes", "show", "why", "invalidate"])
def test_a_store_that_is_down_is_3(name: str, tmp_path: Path) -> None:
    arguments = (name, "key") if name in ("show", "why", "invalidate") else (name,)
    done = run(*arguments, "--store-url", f"unix://{tmp_path}/none.sock")
    assert_refused(done, 3, "none.sock", "--store-url")


def test_a_store_that_hangs_is_3_within_a_bound(start_server: StartServer) -> None:
    server = start_server()
    started = time.monotonic()
    with frozen(server):
        assert_refused(run("ls", "--store-url", server.url), 3)
    assert time.monotonic() - started < scaled(20.0)


@pytest.mark.parametrize("name", ["ls", "stats", "nodes"])
def test_no_embedded_server_exits_3_with_advice(name: str, tmp_path: Path) -> None:
    done = run(name, "--directory", str(tmp_path / "node"))
    assert_refused(done, 3, "no embedded server", "lookup-buffer serve", "--store-url")


@pytest.mark.parametrize("url", ["http://host", "nonsense", "unix://relative/path", "redis://h:x"])
def test_an_invalid_url_is_2(url: str) -> None:
    assert_refused(run("ls", "--store-url", url), 2)


def test_a_directory_of_others_is_2(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert_refused(run("ls", "--directory", str(tmp_path)), 2, str(tmp_path), "0700")


def test_a_directory_that_cannot_be_made_is_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(run("ls", "--directory", str(tmp_path / "file" / "below")), 2, "'directory'")


def test_a_password_on_the_command_line_is_refused() -> None:
    done = run("ls", "--store-url", "redis://user:geheim@127.0.0.1:1")
    assert_refused(done, 2, "LOOKUP_BUFFER_STORE_URL", "--store-password-file")
    assert "geheim" not in done.stderr


@pytest.mark.parametrize("name", ["stats", "nodes", "doctor", "ls"])
def test_secrets_are_never_printed(name: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("streng-vertraulich")
    secrets = {
        "LOOKUP_BUFFER_STORE_URL": "redis://user:gehe%2Fim@127.0.0.1:1",
        "LOOKUP_BUFFER_TOKEN_FILE": str(token),
        "LOOKUP_BUFFER_DIRECTORY": str(tmp_path / "node"),
    }
    done = run(name, **secrets)
    assert done.returncode == (1 if name == "doctor" else 3)
    for secret in ("gehe", "vertraulich"):
        assert secret not in done.stdout + done.stderr


def test_the_password_of_a_file_is_used(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server()
    assert command(server.url, "CONFIG", "SET", "requirepass", "geheim") == b"+OK"
    password = tmp_path / "password"
    password.write_text("geheim\n")
    assert_refused(run("ls", "--store-url", server.url), 3)
    done = run("ls", "--store-url", server.url, "--store-password-file", str(password))
    assert (done.returncode, done.stdout) == (0, "no records\n")
    missing = run("ls", "--store-url", server.url, "--store-password-file", f"{password}.not")
    assert_refused(missing, 2, "--store-password-file", "No such file")
