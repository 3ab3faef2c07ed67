"""Every command on any output: closed, full or narrow, in any locale; and Ctrl-C."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from command_line import PROGRAM, boot_of, environment, publish, run, run_at_terminal
from nodes import wait_until
from patience import scaled
from servers import StartServer, flush, frozen, patient
from store import EmbeddedServer, Location, Publishing
from store.testing.samples import a_record

COMMANDS = {
    "ls": ("ls",),
    "ls json": ("ls", "--json"),
    "stats": ("stats",),
    "nodes": ("nodes",),
    "doctor": ("doctor",),
}


@pytest.fixture(scope="module")
def full_url(valkey_server: EmbeddedServer) -> Iterator[str]:
    """For all tests of this file, which only read it."""
    url = valkey_server.url
    flush(url)
    with patient(url) as store:
        location = Location("n1", boot_of("n1"), 1, 0xABC)
        store.publish_many(
            [
                Publishing(a_record("5" * 64, f"key-{'ü' * 20}-{n}"), location, ttl_seconds=600)
                for n in range(2000)
            ]
        )
        publish(store, "c" * 64, "a-key", "n1", "a-node-with-a-name-of-48-characters-4f2a-4f2a4f2")
        store.beat("n1", "boot", 1)
        store.add_stats("n1", {"hits_local": 10**9, "bytes_served": 2**50})
    yield url
    flush(url)


@pytest.mark.parametrize(
    "arguments", [("ls",), ("ls", "--json"), ("stats",), ("--help",), ("--version",)]
)
def test_output_closed_early(full_url: str, arguments: tuple[str, ...]) -> None:
    """By a reader that takes one line, and by one that is gone before anything is written."""
    for reader in ("head -n 1", "true"):
        line = f'set -o pipefail; "{PROGRAM}" {" ".join(arguments)} | {reader}; echo "=$?"'
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, timeout=scaled(60), check=False,
            env=environment({"LOOKUP_BUFFER_STORE_URL": full_url}),
        )  # fmt: skip
        assert done.stderr == ""
        code = done.stdout.splitlines()[-1]
        assert code in ("=0", "=141"), code
        if arguments[0] == "ls":
            assert code == "=141"


@pytest.mark.parametrize("sink", ["/dev/full", "closed"])
@pytest.mark.parametrize("name", ["ls", "ls json", "doctor", "stats", "nodes"])
def test_output_that_cannot_be_written(full_url: str, sink: str, name: str) -> None:
    to = ">&-" if sink == "closed" else f"> {sink}"
    done = subprocess.run(
        ["bash", "-c", f'"{PROGRAM}" {" ".join(COMMANDS[name])} {to}'],
        capture_output=True, text=True, timeout=scaled(60), check=False,
        env=environment({"LOOKUP_BUFFER_STORE_URL": full_url}),
    )  # fmt: skip
    assert done.returncode in (1, 141)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.stderr.startswith("lookup-buffer: the output ")


@pytest.mark.parametrize("option", ["--help", "--version", "--show-completion bash"])
def test_options_that_print_to_a_full_device(option: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"{PROGRAM}" {option} > /dev/full'],
        capture_output=True, text=True, timeout=scaled(60), check=False, env=environment({}),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("lookup-buffer: the output ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}]
)
def test_a_locale_without_letters(full_url: str, locale: dict[str, str]) -> None:
    settings = {**locale, "LOOKUP_BUFFER_STORE_URL": full_url}
    for arguments in (
        ("ls",),
        ("ls", "--json"),
        ("show", "key-ü"),
        ("why", "ö\udcff"),
        ("doctor",),
    ):
        done = run(*arguments, **settings)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in (0, 1, 2), done.stderr
        assert done.stdout + done.stderr


@pytest.mark.parametrize("name", ["ls", "stats", "nodes", "doctor", "show"])
def test_a_terminal_of_40_columns(full_url: str, name: str) -> None:
    arguments = ("show", "a-key") if name == "show" else COMMANDS[name]
    lines = run_at_terminal(*arguments, columns=40, LOOKUP_BUFFER_STORE_URL=full_url)
    assert [line for line in lines if len(line) > 40] == []


def is_connected(pid: int) -> bool:
    """Whether the process has a socket beside its event loop's two."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it may close some of its files meanwhile
            found += "socket" in os.readlink(link)
    return found > 2


def test_ctrl_c(start_server: StartServer) -> None:
    """While it waits for a silent server."""
    server = start_server()
    with frozen(server), subprocess.Popen(
        [PROGRAM, "ls", "--store-url", server.url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment({}),
    ) as process:  # fmt: skip
        wait_until(lambda: is_connected(process.pid), 10.0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=scaled(20.0))
    assert (process.returncode, out, err) == (130, "", "lookup-buffer: interrupted\n")
