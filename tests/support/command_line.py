"""`lookup-buffer` as a user runs it: a process of its own, in a pipe or at a terminal.

`run_of` is a run of tests inside a test: what tests/conftest.py does is seen in what pytest prints.
"""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fork_server
from patience import scaled
from store import BlockingStore, Location, Record

PROGRAM = str(Path(sys.executable).with_name("lookup-buffer"))
"""For a test of what a shell does with it, or of its start; `run` forks it, see `fork_server`."""
RUN_SECONDS = scaled(60.0)
_READ_AT_START = ("LANG", "LC_", "PYTHON")
"""Variables that a fork could not follow."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what would configure the command, and with `settings`."""
    kept = {
        name: value
        for name, value in fork_server.own_environment().items()
        if name == "LOOKUP_BUFFER_TEST_RUN"  # by which the leak guard knows our processes
        or not name.startswith(("LOOKUP_BUFFER_", "COLUMNS", "FORCE_COLOR"))
    }
    return {**kept, **settings}


def run(*arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end; `settings` are environment variables."""
    with (
        Path(os.devnull).open("rb") as nothing,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        code = _code_of(_start(arguments, (nothing, output, errors), settings))
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([PROGRAM, *arguments], code, *texts)


def _start(
    arguments: Sequence[str], streams: Sequence[IO[bytes]], settings: Mapping[str, str]
) -> "subprocess.Popen[bytes] | fork_server.Forked":
    """Start the command with these as its input, output and errors."""
    nothing, output, errors = streams
    if any(name.startswith(_READ_AT_START) for name in settings):
        return subprocess.Popen(
            [PROGRAM, *arguments],
            stdin=nothing, stdout=output, stderr=errors, env=environment(settings),
        )  # fmt: skip
    return fork_server.fork(
        "cli_program", arguments, environment=environment(settings), preloaded="cli_preloaded",
        streams=(nothing.fileno(), output.fileno(), errors.fileno()),
    )  # fmt: skip


def _code_of(process: "subprocess.Popen[bytes] | fork_server.Forked") -> int:
    try:
        return process.wait(RUN_SECONDS)
    finally:
        process.kill()


def run_json(*arguments: str, code: int = 0, **settings: str) -> Any:
    """The document that the command prints with --json."""
    done = run(*arguments, "--json", **settings)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def run_at_terminal(*arguments: str, columns: int = 80, **settings: str) -> list[str]:
    """The lines that stand on a terminal of so many columns, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(theirs, "r+b", buffering=0) as terminal, Path(os.devnull).open("wb") as nothing:
        streams = (terminal, terminal, nothing)
        process = _start(arguments, streams, {"TERM": "xterm-256color", **settings})
    output = b""
    try:
        while data := os.read(ours, 65536):
            output += data
    except OSError:
        pass  # the terminal's way to say that its last user is gone
    finally:
        os.close(ours)
        _code_of(process)
    return [_ESCAPES.sub("", line) for line in output.decode().replace("\r", "").split("\n")]


def assert_refused(done: "subprocess.CompletedProcess[str]", code: int, *words: str) -> None:
    """The command ended with `code` and one line on stderr, in which `words` stand."""
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("lookup-buffer: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def publish(
    store: BlockingStore,
    namespace: str,
    key: str,
    *nodes: str,
    shape: tuple[int, ...] = (729, 1152),
    created: float = 1_700_000_000.0,
) -> None:
    """A record of `key` as if `nodes` had published it. Their boots are `bootof` and their name."""
    record = Record(namespace, key, "bfloat16", shape, 2 * shape[0] * shape[-1], "tensor", created)
    for node in nodes:
        store.publish(record, Location(node, boot_of(node), 1, 0xABC), ttl_seconds=600)


def boot_of(node: str) -> str:
    return "boot" + "".join(filter(str.isalnum, node))[:16]


@contextmanager
def beating(store: BlockingStore, *nodes: str) -> Iterator[None]:
    """As if `nodes` were alive."""
    over = threading.Event()

    def beat() -> None:
        sequence = 1
        while not over.wait(0.05):
            sequence += 1
            for node in nodes:
                store.beat(node, boot_of(node), sequence)

    thread = threading.Thread(target=beat)
    for node in nodes:
        store.beat(node, boot_of(node), 1)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


Run = subprocess.CompletedProcess[str]


def run_of(directory: Path, *tests: str, options: Sequence[str] = ()) -> Run:
    """The fixtures themselves, in a run with a mark of its own; each of `tests` is a file."""
    here = Path(__file__).parent
    conftest = (here.parent / "conftest.py").read_text()
    conftest = conftest.replace("timeout_seconds=scaled(10.0)", "timeout_seconds=0.2")
    (directory / "conftest.py").write_text(conftest)
    for name in ("hypothesis_profiles.py", "patience.py", "standstills.py"):
        shutil.copy(here / name, directory)
    leaks = (here / "leaks.py").read_text()
    (directory / "leaks.py").write_text(leaks.replace("LOOKUP_BUFFER_TEST_RUN", "INNER_TEST_RUN"))
    for number, source in enumerate(tests):
        path = directory / f"test_inner_{number}.py"
        path.write_text(f"import pytest, subprocess, sys\n{source}")
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = vllm\npythonpath = .\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(directory)],
        capture_output=True, text=True, timeout=scaled(60), cwd=directory, check=False,
    )  # fmt: skip
