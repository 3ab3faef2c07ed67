"""Hosts on a network with delay, limited rate, loss and cuts, for tests of several nodes.

`Network` compiles and runs `tests/network/hub.c`, a switch in user space. Each of its hosts has a
network namespace of its own, with eth0 and lo, and a host name. `Network.node` starts a node on a
host; its socket is in the test's file system, so clients in the test's process use it as if they
were on that host. Valkey runs on a host of its own, "store".
"""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lookup_buffer import LookupBuffer, TensorKey
from nodes import ROOT, NodeProcess, Nodes, key, wait_until
from patience import scaled
from servers import free_port, valkey_executable
from store import EmbeddedServer

SOURCE = ROOT / "tests/network/hub.c"
STORE = "store"
STORE_PORT = 6379
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000}
"""Those that processes of a host are in, with the flags of setns(2)."""
_PROTECTED_MODE = ("--protected-mode", "no")


def why_not() -> str:
    """Why this machine cannot simulate a network; "" if it can."""
    for program in ("cc", "nsenter"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


@dataclass(frozen=True)
class Host:
    name: str
    pid: int
    address: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs on this host."""
        namespaces = [f"--{name}" for name in _NAMESPACES]
        return ["nsenter", "--target", str(self.pid), *namespaces, *arguments]

    @property
    def prelude(self) -> str:
        """Python by which a process moves to this host."""
        return (
            "import ctypes, os\n"
            "libc = ctypes.CDLL(None, use_errno=True)\n"
            f"for name, flag in {_NAMESPACES}.items():\n"
            f"    file = os.open(f'/proc/{self.pid}/ns/{{name}}', os.O_RDONLY)\n"
            "    assert libc.setns(file, flag) == 0, os.strerror(ctypes.get_errno())\n"
            "    os.close(file)\n"
        )


class Network:
    """`hosts` by name, and the ways between them. End it with `close`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="lbn-"))
        hub = self._directory / "hub"
        subprocess.run(["cc", "-O2", "-o", str(hub), str(SOURCE)], check=True)
        self._names = [STORE, *names]
        self._hub = subprocess.Popen(
            [str(hub), *self._names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        word, *pids = self._answer().split()
        assert word == "ready", word
        self.hosts = {
            name: Host(name, int(pid), f"10.77.0.{number}")
            for number, (name, pid) in enumerate(zip(self._names, pids, strict=True), start=1)
        }
        self._store: EmbeddedServer | None = None
        self._nodes: Nodes | None = None

    def close(self) -> None:
        try:
            if self._nodes is not None:
                self.reset()
                self._nodes.end()
            if self._store is not None:
                self._store.close()
        finally:
            assert self._hub.stdin is not None
            self._hub.stdin.close()
            self._hub.wait(scaled(10.0))
            assert self._hub.stdout is not None
            self._hub.stdout.close()
            shutil.rmtree(self._directory)

    # -- what runs on the hosts

    @property
    def store_url(self) -> str:
        """Of the Valkey on its host, as the other hosts reach it."""
        self._started_store()
        return f"redis://{self.hosts[STORE].address}:{STORE_PORT}"

    @property
    def store(self) -> EmbeddedServer:
        """The same server, which the test itself reaches by its socket."""
        return self._started_store()

    def node(self, host: str, *, prelude: str = "", **settings: Any) -> NodeProcess:
        """A node on `host`, which ends with the network."""
        at = self.hosts[host]
        if self._nodes is None:
            self._nodes = Nodes(self.store_url)
        settings = {
            "listen": f"tcp://{at.address}:{free_port()}",
            "node_id": host,
            "token": "the token of all hosts",
            **settings,
        }
        return self._nodes(prelude=at.prelude + prelude, **settings)

    def _started_store(self) -> EmbeddedServer:
        if self._store is None:
            at = self.hosts[STORE]
            program = self._directory / "valkey-on-its-host"
            words = at.command(valkey_executable(), '"$@"', "--bind", at.address)
            options = ["--port", str(STORE_PORT), *_PROTECTED_MODE]
            program.write_text(f"#!/bin/sh\nexec {' '.join([*words, *options])}\n")
            program.chmod(0o755)
            self._store = EmbeddedServer.start(
                self._directory / "kv", timeout_seconds=scaled(10.0), executable=str(program)
            )
        return self._store

    # -- the ways between them

    def set(self, source: str, target: str, **values: float) -> None:
        """The way from `source` to `target`: see hub.c for `values`."""
        words = [f"{name}={value}" for name, value in values.items()]
        self._command("set", source, target, *words)

    def set_both(self, one: str, other: str, **values: float) -> None:
        self.set(one, other, **values)
        self.set(other, one, **values)

    @contextmanager
    def cut(self, one: str, other: str) -> Iterator[None]:
        """Nothing passes between the two, as if a router between them had stopped."""
        self.set_both(one, other, cut=1)
        try:
            yield
        finally:
            self.set_both(one, other, cut=0)

    def kill(self, one: str, other: str, how: str) -> int:
        """End the state of their TCP connections on the way, see hub.c; returns how many."""
        return int(self._command("kill", one, other, how).split()[1])

    def sent_bytes(self, source: str, target: str) -> int:
        return int(self._command("stats", source, target).split()[1])

    def reset(self) -> None:
        """All ways as at the start."""
        self._command("reset")

    def wait_for_bytes(self, source: str, target: str, nbytes: int, seconds: float) -> None:
        """Until `nbytes` more went from one to the other."""
        due = self.sent_bytes(source, target) + nbytes
        what = f"{nbytes} bytes go from {source} to {target}"
        wait_until(lambda: self.sent_bytes(source, target) >= due, seconds, what)

    # -- tensors

    def put(
        self, client: LookupBuffer, count: int, nbytes: int
    ) -> list[tuple[TensorKey, torch.Tensor]]:
        """Insert so many tensors of random bytes."""
        items = [(key(), torch.randint(0, 255, (nbytes,), dtype=torch.uint8)) for _ in range(count)]
        client.insert_many(items)
        return items

    def wait_for(self, client: LookupBuffer, keys: Sequence[TensorKey]) -> None:
        """Until the client's node finds them."""
        wait_until(lambda: all(client.has_caches(keys, timeout=2.0)), 10.0, "the keys are visible")

    def _command(self, *words: str) -> str:
        assert self._hub.stdin is not None
        self._hub.stdin.write(" ".join(words) + "\n")
        self._hub.stdin.flush()
        answer = self._answer()
        assert answer.startswith("ok"), f"{' '.join(words)}: {answer}"
        return answer

    def _answer(self) -> str:
        assert self._hub.stdout is not None
        line = self._hub.stdout.readline()
        assert line, "the hub ended"
        return line.strip()


def equal(found: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return found is not None and torch.equal(found, tensor)


MakeNetwork = Callable[..., Network]


@pytest.fixture
def make_network() -> Iterator[MakeNetwork]:
    """make_network("a", "b"): a network with these hosts and the store's, for one test."""
    if reason := why_not():
        pytest.skip(f"no simulated network: {reason}")
    networks: list[Network] = []

    def make(*names: str) -> Network:
        networks.append(Network(names))
        return networks[-1]

    yield make
    for network in networks:
        network.close()
