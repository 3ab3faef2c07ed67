"""Real clusters and real Sentinel groups for tests, on this machine.

A cluster has three masters with a replica each. `valkey_cluster` is one for the whole session, and
is whole again at the start of each test that takes it; tests that break one take `own_cluster`.

A Sentinel group has a master, its replica, and three sentinels that replace a dead master.
`sentinels` is one for the session, without passwords; tests that break one take `own_sentinels`,
where servers and sentinels have a password each.
"""

import binascii
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nodes import wait_until
from resp import RespConnection, RespError
from servers import QUIET, ServerProcess, free_ports, redis_executable, valkey_executable
from store import layout

SLOTS = 16384
MASTERS = 3
FIRST_SLOTS = range(SLOTS // MASTERS)
"""Of the first master, in the beginning."""
NODE_TIMEOUT_MS = 2000
REDIRECTS_MAX = 5
MOVED_SECONDS = 10.0
WHOLE_SECONDS = 30.0
"""Members elect and replicate in seconds; on a machine with two busy cores in more of them."""


class ValkeyCluster:
    """Members 0 to 2 begin as masters, 3 to 5 as their replicas. `url` is for open_store."""

    def __init__(self, program: str, directory: Path) -> None:
        ports = free_ports(4 * MASTERS)
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        self.members = [
            ServerProcess(program, directory / f"member{n}", port, _options(port, bus), wait=False)
            for n, (port, bus) in enumerate(pairs)
        ]
        self.url = "redis-cluster://" + ",".join(f"127.0.0.1:{port}" for port, _ in pairs)
        try:
            for member in self.members:
                member.wait_until_it_answers()
            self._ids: list[str] = [m.command("CLUSTER", "MYID").decode() for m in self.members]
            self._introduce(pairs)
        except BaseException:
            self.close()
            raise

    def _introduce(self, pairs: Sequence[tuple[int, int]]) -> None:
        masters, replicas = self.members[:MASTERS], self.members[MASTERS:]
        for n, member in enumerate(self.members):
            member.command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        bounds = [SLOTS * n // MASTERS for n in range(MASTERS + 1)]
        for n, master in enumerate(masters):
            master.command("CLUSTER", "ADDSLOTSRANGE", bounds[n], bounds[n + 1] - 1)
        for member in self.members:  # everybody to everybody, so that nobody waits for gossip
            for port, bus in pairs:
                if port != member.port:
                    member.command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        # Before any becomes a replica: on a busy machine two members, which met one later, took it
        # for a master without slots for two minutes, while it answered all others.
        wait_until(lambda: all(map(self._met_all, self.members)), WHOLE_SECONDS, "members meet")
        for replica, master_id in zip(replicas, self._ids, strict=False):
            replica.command("CLUSTER", "REPLICATE", master_id)
        self.wait_until_whole()

    def _met_all(self, member: ServerProcess) -> bool:
        nodes = _lines(member.command("CLUSTER", "NODES"))
        met = {fields[0] for fields in nodes if fields[7] == "connected"} == set(self._ids)
        return met and not any("handshake" in fields[2] for fields in nodes)

    # ---- who is what

    def masters(self) -> list[ServerProcess]:
        """Those that serve slots now, in the eyes of the living."""
        ports = {fields[1] for fields in self._nodes() if "master" in fields[2] and len(fields) > 8}
        return [member for member in self.members if _listed(member) in ports]

    def replica_of(self, master: ServerProcess) -> ServerProcess:
        """A living replica of that master."""
        wanted = self._id(master)
        ports = {fields[1] for fields in self._nodes() if fields[3] == wanted}
        return next(m for m in self.members if _listed(m) in ports and m.running)

    def owner(self, key: str | bytes | int) -> ServerProcess:
        """The master that serves the slot of a key, or a slot."""
        slot = key if isinstance(key, int) else slot_of(key)
        server = self._server_of(slot, self._nodes())
        assert server is not None, f"nobody serves slot {slot}"
        return server

    def _server_of(self, slot: int, nodes: list[list[str]]) -> ServerProcess | None:
        for fields in nodes:
            for slots in fields[8:]:
                first, _, last = slots.partition("-")
                if first.isdigit() and int(first) <= slot <= int(last or first):
                    return next(m for m in self.members if _listed(m) == fields[1])
        return None

    def command(self, key: str | bytes, *parts: str | bytes | int) -> Any:
        """The reply to one command, from the master that serves the slot of `key`.

        While members elect a master they differ in who serves it: redirects are followed.
        """
        server = self.owner(key)
        for _ in range(REDIRECTS_MAX):
            try:
                return server.command(*parts)
            except RespError as error:
                code, _, place = str(error).partition(" ")
                if code != "MOVED":
                    raise
                server = next(m for m in self.members if place.endswith(f":{m.port}"))
        return server.command(*parts)

    # ---- what tests do to it

    def move_slot(
        self,
        slot: int,
        target: ServerProcess,
        *,
        between: Callable[[], object] = lambda: None,
        emptied: Callable[[], object] = lambda: None,
    ) -> None:
        """Give a slot and its keys to another master, as operators do while all goes on.

        While the slot is on its way `between` runs when the source still has all keys, `emptied`
        when it has none: whoever asks it for one that is not there is sent to the target by ASK.
        """
        source = self.owner(slot)
        if source is target:
            return
        with source.connect() as giving, target.connect() as taking:
            taking("CLUSTER", "SETSLOT", slot, "IMPORTING", self._id(source))
            giving("CLUSTER", "SETSLOT", slot, "MIGRATING", self._id(target))
            between()
            while keys := giving("CLUSTER", "GETKEYSINSLOT", slot, 100):
                giving("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            emptied()
            for connection in (taking, giving):
                connection("CLUSTER", "SETSLOT", slot, "NODE", self._id(target))
        self._settle_slot(slot, target)

    def move_slots(self, first: int, last: int, target: ServerProcess) -> None:
        """Give these slots of one master and their keys to another, all at once (Valkey 9)."""
        source = self.owner(first)
        slots = ("SLOTSRANGE", first, last, "NODE", self._id(target))
        source.command("CLUSTER", "MIGRATESLOTS", *slots)
        living = [member for member in self.members if member.running]
        wait_until(
            lambda: all(
                self._owner_by(m, slot) is target for m in living for slot in (first, last)
            ),
            MOVED_SECONDS,
            "all members know that the slots have moved",
        )

    def _settle_slot(self, slot: int, target: ServerProcess) -> None:
        """Until every living member knows of it. A member that bumped its epoch meanwhile may claim
        the slot again, for good: the target's claim is then made the newer one."""
        for attempt in range(60):
            living = [member for member in self.members if member.running]
            if all(self._owner_by(member, slot) is target for member in living):
                return
            if attempt % 10 == 9:
                target.command("CLUSTER", "BUMPEPOCH")
                for master in self.masters():
                    master.command("CLUSTER", "SETSLOT", slot, "NODE", self._id(target))
            time.sleep(0.1)
        raise AssertionError(f"members do not agree who serves slot {slot}")

    def _owner_by(self, member: ServerProcess, slot: int) -> ServerProcess | None:
        """Who serves a slot, as one member sees it."""
        with RespConnection(member.port, timeout_seconds=2.0) as asking:
            return self._server_of(slot, _lines(asking("CLUSTER", "NODES")))

    def flush(self) -> None:
        """Empty all masters, as if the cluster had lost its data."""
        for master in self.masters():
            master.command("FLUSHALL")

    def wait_until_whole(self, seconds: float = WHOLE_SECONDS) -> None:
        """Every living member agrees that living ones serve all slots, and every replica is in
        step. For a moment after a master's death all members still agree that it serves."""
        try:
            wait_until(self._whole, seconds, "the cluster is whole")
        except pytest.fail.Exception as failure:
            views = {m.port: sorted(_served(m)) for m in self.members if m.running}
            steps = {m.port: _in_step(m) for m in self.members if m.running}
            pytest.fail(f"{failure}; who serves what: {views}; in step: {steps}")

    def close(self) -> None:
        for member in self.members:
            member.kill()

    def _whole(self) -> bool:
        living = [member for member in self.members if member.running]
        with suppress(OSError, RespError):
            views = {frozenset(_served(member)) for member in living}
            serving = {node for view in views for node, slots in view if slots}
            return (
                len(views) == 1
                and serving <= {self._id(member) for member in living}
                and all(b"cluster_state:ok" in m.command("CLUSTER", "INFO") for m in living)
                and all(_in_step(m) for m in living)
            )
        return False

    def _id(self, member: ServerProcess) -> str:
        return self._ids[self.members.index(member)]

    def _nodes(self) -> list[list[str]]:
        """The lines of CLUSTER NODES, from the first member that answers."""
        for member in self.members:
            if member.running:
                with suppress(OSError), RespConnection(member.port, timeout_seconds=0.5) as asking:
                    return _lines(asking("CLUSTER", "NODES"))
        raise AssertionError("no member of the cluster answers")


def slot_of(key: str | bytes) -> int:
    """The slot of a key: of what stands in its first braces, where there is something in them."""
    raw = key.encode() if isinstance(key, str) else key
    _, opened, rest = raw.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if opened and closed and tag else raw, 0) % SLOTS


def names_in_slots(namespace: str, count: int, slots: range) -> dict[str, str]:
    """Keys, and the names of their records, which lie in these slots."""
    names: dict[str, str] = {}
    for n in itertools.count():
        name = layout.record(namespace, f"k{n}")
        if slot_of(name) in slots:
            names[f"k{n}"] = name
        if len(names) == count:
            break
    return names


def _options(port: int, bus_port: int) -> list[str]:
    return [
        "--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes",
        "--cluster-port", str(bus_port), "--cluster-node-timeout", str(NODE_TIMEOUT_MS),
        # A replica takes over however long it was cut off, and is filled without a delay.
        "--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0", *QUIET,
    ]  # fmt: skip


def _lines(nodes: bytes) -> list[list[str]]:
    """Address without bus port and name, and the fields of its line, of each node."""
    lines = [line.split() for line in nodes.decode().splitlines()]
    for fields in lines:
        fields[1] = fields[1].partition("@")[0]
    return lines


def _served(member: ServerProcess) -> Iterator[tuple[str, str]]:
    """Who serves which slots, as one member sees it."""
    for fields in _lines(member.command("CLUSTER", "NODES")):
        if "master" in fields[2] and "fail" not in fields[2]:
            yield fields[0], " ".join(field for field in fields[8:] if not field.startswith("["))


def _in_step(member: ServerProcess) -> bool:
    info = member.command("INFO", "replication")
    return b"role:master" in info or b"master_link_status:up" in info


def _listed(member: ServerProcess) -> str:
    return f"127.0.0.1:{member.port}"


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    """Take `valkey_cluster`, which is this one, empty."""
    cluster = ValkeyCluster(valkey_executable(), tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture
def valkey_cluster(shared_cluster: ValkeyCluster) -> ValkeyCluster:
    """A cluster that is whole and empty; do not break it."""
    shared_cluster.wait_until_whole()
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture
def own_cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ValkeyCluster]:
    """A cluster to break: killed, frozen and moved about. Of Valkey, or of what `param` names."""
    executable = getattr(request, "param", valkey_executable)
    cluster = ValkeyCluster(executable(), tmp_path / "cluster")
    yield cluster
    cluster.close()


@pytest.fixture
def redis_cluster(tmp_path: Path) -> Iterator[ValkeyCluster]:
    """The same of Redis 7.0, where the machine has one."""
    cluster = ValkeyCluster(redis_executable(), tmp_path / "cluster")
    yield cluster
    cluster.close()


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
