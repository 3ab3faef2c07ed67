"""Sentinel for tests: a master, its replica, and three sentinels that replace a dead master.

`sentinels` is one for the session, without passwords; tests that break one take `own_sentinels`,
where servers and sentinels have a password each.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nodes import wait_until
from ports import free_ports
from resp import RespConnection, RespError
from server_process import QUIET, ServerProcess
from servers import valkey_executable

SERVICE = "lookup.buffer-1"
DOWN_AFTER_MS = 2000
SENTINELS = 3
READY_SECONDS = 20.0
CUT_OFF_MAX = 10
"""How often in succession a server may cut off who asks it."""


class Sentinels:
    """`servers` are the first master and its replica. `url` is for open_store."""

    def __init__(
        self, program: str, directory: Path, *, password: str = "", sentinel_password: str = ""
    ) -> None:
        self._password, self._sentinel_password = password, sentinel_password
        master, replica, *ports = free_ports(2 + SENTINELS)
        self.servers = [
            self._server(program, directory / "master", master),
            self._server(program, directory / "replica", replica, master),
        ]
        self.sentinels = [self._sentinel(program, directory / f"{p}", p, master) for p in ports]
        user = f":{password}@" if password else ""
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        options = f"?sentinel_password={sentinel_password}" if sentinel_password else ""
        self.url = f"redis-sentinel://{user}{hosts}/{SERVICE}{options}"
        try:
            self.wait_until_guarded()
        except BaseException:
            self.close()
            raise

    def master(self) -> ServerProcess:
        """The one that most of the living sentinels name."""
        named = [port for sentinel in self.sentinels if (port := self._named_by(sentinel))]
        assert named, "no sentinel names a master"
        most = max(named, key=named.count)
        return next(server for server in self.servers if server.port == most)

    def replica(self) -> ServerProcess:
        """The other one, living or not."""
        master = self.master()
        return next(server for server in self.servers if server is not master)

    def fail_over(self) -> ServerProcess:
        """Kill the master and wait for its successor, which is the answer."""
        master, successor = self.master(), self.replica()
        master.kill()
        self.wait_for_master(successor)
        return successor

    def wait_for_master(self, server: ServerProcess, seconds: float = READY_SECONDS) -> None:
        """All living sentinels name `server`, and it takes writes."""
        living = [sentinel for sentinel in self.sentinels if sentinel.running]

        def rules() -> bool:
            with suppress(OSError):
                return {self._named_by(s) for s in living} == {server.port} and (
                    b"role:master" in self.ask(server, "INFO", "replication")
                )
            return False

        wait_until(rules, seconds, f"the server on port {server.port} becomes master")

    def wait_until_guarded(self, seconds: float = READY_SECONDS) -> None:
        """The replica is in step, and all sentinels know it and one another."""
        replica = self.servers[1]

        def guarded() -> bool:
            return b"master_link_status:up" in self.ask(replica, "INFO", "replication") and all(
                self._knows_all(sentinel) for sentinel in self.sentinels
            )

        wait_until(guarded, seconds, "the sentinels know all")

    def is_master(self, server: ServerProcess) -> bool:
        """By its own word."""
        with suppress(OSError, RespError):
            return b"role:master" in self.ask(server, "INFO", "replication")
        return False

    def ask(self, server: ServerProcess, *parts: str | bytes | int) -> Any:
        """The reply to one command, logged in as it is needed; it may be carried out twice.

        A sentinel that makes a server a master or a replica cuts the connections of its clients,
        whether their command was carried out or not, so who is cut off asks again. A server that
        refuses connections, or does not answer, raises OSError as ever.
        """
        for _ in range(CUT_OFF_MAX):
            with suppress(ConnectionResetError, BrokenPipeError):
                return self._ask(server, *parts)
        return self._ask(server, *parts)

    def _ask(self, server: ServerProcess, *parts: str | bytes | int) -> Any:
        secret = self._sentinel_password if server in self.sentinels else self._password
        with RespConnection(server.port) as connection:
            if secret:
                connection("AUTH", secret)
            return connection(*parts)

    def close(self) -> None:
        for process in [*self.sentinels, *self.servers]:
            process.kill()

    def _named_by(self, sentinel: ServerProcess) -> int:
        """The port of the master in the eyes of one sentinel; 0 where it does not say."""
        with suppress(OSError, RespError):
            _, port = self.ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
            return int(port)
        return 0

    def _knows_all(self, sentinel: ServerProcess) -> bool:
        told = self.ask(sentinel, "SENTINEL", "MASTER", SERVICE)
        known = dict(zip(told[::2], told[1::2], strict=True))
        others, replicas = known[b"num-other-sentinels"], known[b"num-slaves"]
        return (int(others), int(replicas), known[b"flags"]) == (SENTINELS - 1, 1, b"master")

    def _server(
        self, program: str, directory: Path, port: int, replica_of: int | None = None
    ) -> ServerProcess:
        options = ["--port", str(port), "--bind", "127.0.0.1", *QUIET]
        options += ["--repl-diskless-sync-delay", "0"]
        if self._password:
            options += ["--requirepass", self._password, "--masterauth", self._password]
        if replica_of is not None:
            options += ["--replicaof", f"127.0.0.1 {replica_of}"]
        return ServerProcess(program, directory, port, options)

    def _sentinel(self, program: str, directory: Path, port: int, master: int) -> ServerProcess:
        lines = [
            f"port {port}", "bind 127.0.0.1", "loglevel notice",
            f"sentinel monitor {SERVICE} 127.0.0.1 {master} {SENTINELS // 2 + 1}",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 3000",
        ]  # fmt: skip
        if self._password:
            lines.append(f"sentinel auth-pass {SERVICE} {self._password}")
        if self._sentinel_password:
            lines.append(f"requirepass {self._sentinel_password}")
            lines.append(f"sentinel sentinel-pass {self._sentinel_password}")
        directory.mkdir(parents=True)
        configuration = directory / "sentinel.conf"  # which the sentinel writes as well
        configuration.write_text("\n".join(lines) + "\n")
        return ServerProcess(program, directory, port, [str(configuration), "--sentinel"])


@pytest.fixture(scope="session")
def shared_sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    """Take `sentinels`, which is this one, empty."""
    sentinels = Sentinels(valkey_executable(), tmp_path_factory.mktemp("sentinels"))
    yield sentinels
    sentinels.close()


@pytest.fixture
def sentinels(shared_sentinels: Sentinels) -> Sentinels:
    """Guarded and empty; do not break it."""
    shared_sentinels.ask(shared_sentinels.master(), "FLUSHALL")
    return shared_sentinels


@pytest.fixture
def own_sentinels(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sentinels]:
    """One to break, with passwords. Of Valkey, or of what `param` names."""
    executable = getattr(request, "param", valkey_executable)
    sentinels = Sentinels(
        executable(),
        tmp_path / "sentinels",
        password="of-servers",
        sentinel_password="of-sentinels",
    )
    yield sentinels
    sentinels.close()
