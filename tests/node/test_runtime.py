"""Nodes that clients start: one per directory, again after a kill, ended when idle."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import lookup_buffer
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import LookupBufferError, NodeRefused, NodeUnavailable
from nodes import MIB, ClientProcess, key, node_pids, wait_until
from patience import quickest, scaled
from servers import alive
from store import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def automatic(valkey_server: EmbeddedServer, tmp_path: Path) -> Iterator[BufferConfig]:
    """A configuration that names no node."""
    directory = Path(tempfile.mkdtemp(prefix="lba-"))
    yield BufferConfig(
        directory=directory,
        store_url=valkey_server.url,
        capacity_bytes=16 * MIB,
        idle_exit_seconds=0.5,
    )
    wait_until(lambda: not node_pids(directory), 15.0, "the idle node ends")
    assert not (directory / "node.sock").exists()
    shutil.rmtree(directory)


def test_two_concurrent_starts_give_one_node_which_ends_when_idle(automatic: BufferConfig) -> None:
    source = """
receive()
send((buffer.boot, buffer.stats()["sessions_opened"]))
receive()
"""
    assert automatic.directory is not None
    with ClientProcess(automatic, source) as one, ClientProcess(automatic, source) as two:
        one.send("go")
        two.send("go")
        boots = {one.receive()[0], two.receive()[0]}
        assert len(boots) == 1
        (pid,) = node_pids(automatic.directory)
        with LookupBuffer(automatic) as third:
            assert {third.boot} == boots
            name = key()
            third.insert(name, torch.ones(2))
        with pytest.raises(NodeRefused, match="capacity_bytes"):
            LookupBuffer(automatic.model_copy(update={"capacity_bytes": 8 * MIB}))
        time.sleep(1.8)
        assert alive(pid), "it ended while it had clients"
    wait_until(lambda: not alive(pid), 10.0)


def test_a_relative_directory(automatic: BufferConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that is started runs in another one."""
    assert automatic.directory is not None
    monkeypatch.chdir(automatic.directory.parent)
    settings = {**automatic.model_dump(), "directory": automatic.directory.name}
    with LookupBuffer(BufferConfig.of(settings), required=True) as buffer:
        assert buffer.attached
        name = key()
        buffer.insert(name, torch.ones(2))
        assert buffer.select(name) is not None


def test_a_killed_automatic_node_is_started_again(automatic: BufferConfig) -> None:
    assert automatic.directory is not None
    with LookupBuffer(automatic) as buffer:
        boot, name = buffer.boot, key()
        (pid,) = node_pids(automatic.directory)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: buffer.boot not in ("", boot), 10.0)
        with pytest.raises(LookupBufferError):
            buffer.select(name)
        buffer.insert(name, torch.ones(2))
        assert buffer.select(name) is not None


def test_a_missing_node_at_the_given_socket_is_an_error_at_once(tmp_path: Path) -> None:
    config = BufferConfig(node_socket=tmp_path / "none.sock", directory=tmp_path / "d")

    def refused() -> None:
        with pytest.raises(NodeUnavailable, match=r"none\.sock"):
            LookupBuffer(config)

    assert quickest(refused, 1.0) < 1.0
    with LookupBuffer(config, required=False) as buffer:
        assert buffer.has_caches([key()]) == [False]
        assert buffer.prefetch([key()])[0].reason == "node_down"
        with pytest.raises(NodeUnavailable):
            buffer.insert(key(), torch.ones(1))


def test_the_examples_of_the_library_run_one_after_the_other(
    automatic: BufferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the node that the first of them starts, and which is still there for the second."""
    place = {"directory": automatic.directory, "store_url": automatic.store_url}
    here = partial(BufferConfig, **place, idle_exit_seconds=2.0)
    monkeypatch.setattr(lookup_buffer, "BufferConfig", here, raising=False)
    # Its 50 ms are for engines, which rather encode than wait: a busy machine may take longer.
    patient = {"timeout": scaled(5.0)}
    monkeypatch.setattr(LookupBuffer.has_caches, "__kwdefaults__", patient)
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/library.md"))
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    of_the_library = [example for example in examples if "LookupBuffer(" in example]
    assert len(of_the_library) == 3
    for example in of_the_library:
        exec(compile(example, "the documents", "exec"), {"torch": torch})


def test_without_torch_the_error_names_what_to_install() -> None:
    without = "import sys; sys.modules['torch'] = None; from lookup_buffer import LookupBuffer"
    done = subprocess.run(
        [sys.executable, "-c", without],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.stderr.splitlines()[-1] == (
        "ImportError: LookupBuffer needs torch, which is not installed: pip install torch"
    )
