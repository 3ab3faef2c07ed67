"""A standalone server that is replaced: its address leads to its former replica, and it is demoted.

So do a load balancer, a proxy and a name that moves. The old server lives on, and closes nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes import wait_until
from proxies import Relay
from servers import QUIET, ServerProcess, free_ports, valkey_executable

IN_STEP_SECONDS = 10.0
AT_ONCE = ("--repl-diskless-sync-delay", "0")


class Switchover:
    """`url` is for open_store, before and after."""

    def __init__(self, program: str, directory: Path) -> None:
        *ports, self._nobody = free_ports(3)
        self.old, self.new = (
            ServerProcess(
                program,
                directory / str(port),
                port,
                ["--port", str(port), "--bind", "127.0.0.1", *AT_ONCE, *QUIET],
            )
            for port in ports
        )
        self.new.command("REPLICAOF", "127.0.0.1", self.old.port)
        self._relay = Relay()
        self._relay.connect_to(self.old.port)
        self.url = f"redis://127.0.0.1:{self._relay.port}"

    def demote(self) -> None:
        """The old server takes no more writes, and learns nothing of those of its successor."""
        wait_until(self._in_step, IN_STEP_SECONDS, "the replica is in step")
        self.new.command("REPLICAOF", "NO", "ONE")
        self.old.command("REPLICAOF", "127.0.0.1", self._nobody)

    def lead_to_the_new_one(self) -> None:
        """Who connects from now on reaches the successor."""
        self._relay.connect_to(self.new.port)

    def close(self) -> None:
        self._relay.close()
        self.old.kill()
        self.new.kill()

    def _in_step(self) -> bool:
        offset = b"master_repl_offset:"
        infos = [server.command("INFO", "replication") for server in (self.old, self.new)]
        written, read = (info.partition(offset)[2].split()[0] for info in infos)
        return b"master_link_status:up" in infos[1] and written == read


@pytest.fixture
def switchover(tmp_path: Path) -> Iterator[Switchover]:
    switchover = Switchover(valkey_executable(), tmp_path / "switchover")
    yield switchover
    switchover.close()
