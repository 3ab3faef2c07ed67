"""What the torture does to a fleet: kills, freezes, limits, a failing store, a network, clocks."""

import os
import resource
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from clocks import Clock
from clusters import Sentinels
from network import Network
from nodes import NodeProcess
from resp import RespError
from servers import ServerProcess, children_of
from torture_fleet import Client, Fault, Fleet, Undo

AWAY_SECONDS = (0.0, 1.0)
FROZEN_SECONDS = (0.3, 3.0)
"""The longest is a node that is about to be taken for dead, or a store that calls give up on."""
LIMITED_SECONDS = (0.5, 3.0)
CUT_SECONDS = (0.5, 6.0)
FULL_STORE_BYTES = 1 << 20
DAY_SECONDS = 86_400


def process_faults() -> dict[str, Fault]:
    """Kills and freezes of nodes, clients and dashboards."""
    return {
        "node killed": _node_killed,
        "node frozen": _node_frozen,
        "client killed": _client_killed,
        "client frozen": _client_frozen,
        "dashboard killed": _dashboard_killed,
        "dashboard frozen": _dashboard_frozen,
    }


def calm_faults() -> dict[str, Fault]:
    """Those of `process_faults` that leave every node what it was."""
    kept = ("node frozen", "client killed", "client frozen", "dashboard frozen")
    return {name: process_faults()[name] for name in kept}


def _node_of(fleet: Fleet) -> NodeProcess | None:
    up = [node for node in fleet.nodes if fleet.is_up(node)]
    return fleet.chance.choice(up) if up else None


def _client_of(fleet: Fleet) -> Client | None:
    ready = [one for one in fleet.clients if one.ready and not one.frozen]
    return fleet.chance.choice(ready) if ready else None


def _node_killed(fleet: Fleet) -> tuple[float, Undo] | None:
    if (node := _node_of(fleet)) is None:
        return None
    fleet.totals.count("killed: node")
    return fleet.chance.uniform(*AWAY_SECONDS), fleet.kill_node(node)


def _node_frozen(fleet: Fleet) -> tuple[float, Undo] | None:
    if (node := _node_of(fleet)) is None:
        return None
    return _freeze(fleet, node.pid)


def _client_killed(fleet: Fleet) -> None:
    if client := _client_of(fleet):
        fleet.totals.count("killed: client")
        fleet.kill_client(client)


def _client_frozen(fleet: Fleet) -> tuple[float, Undo] | None:
    if (client := _client_of(fleet)) is None:
        return None
    seconds, thaw = _freeze(fleet, client.process.pid)
    client.frozen = True

    def undo() -> None:
        thaw()
        client.frozen, client.since = False, fleet.now()

    return seconds, undo


def _dashboard_of(fleet: Fleet) -> int | None:
    node = _node_of(fleet)
    children = sorted(children_of(node.pid)) if node else []
    return children[0] if children else None


def _dashboard_killed(fleet: Fleet) -> None:
    if (pid := _dashboard_of(fleet)) is not None:
        fleet.totals.count("killed: dashboard")
        _send(pid, signal.SIGKILL)


def _dashboard_frozen(fleet: Fleet) -> tuple[float, Undo] | None:
    pid = _dashboard_of(fleet)
    return None if pid is None else _freeze(fleet, pid)


def _freeze(fleet: Fleet, pid: int) -> tuple[float, Undo]:
    _send(pid, signal.SIGSTOP)
    return fleet.chance.uniform(*FROZEN_SECONDS), lambda: _send(pid, signal.SIGCONT)


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# -- limits of a process


def limit_faults() -> dict[str, Fault]:
    return {
        "no descriptor left": _no_descriptor_left,
        "a few descriptors left": _few_descriptors_left,
        "no memory left": _no_memory_left,
        "client killed": _client_killed,
    }


def _no_descriptor_left(fleet: Fleet) -> tuple[float, Undo] | None:
    return _descriptors(fleet, 0)


def _few_descriptors_left(fleet: Fleet) -> tuple[float, Undo] | None:
    return _descriptors(fleet, fleet.chance.randrange(1, 6))


def _descriptors(fleet: Fleet, left: int) -> tuple[float, Undo] | None:
    if (node := _node_of(fleet)) is None:
        return None
    used = max(int(name) for name in os.listdir(f"/proc/{node.pid}/fd"))
    return _limit(fleet, node.pid, resource.RLIMIT_NOFILE, used + 1 + left)


def _no_memory_left(fleet: Fleet) -> tuple[float, Undo] | None:
    if (node := _node_of(fleet)) is None:
        return None
    fleet.limited.add(node)
    fleet.starved.add(node)
    fleet.was_starved.add(node)
    pages = int(Path(f"/proc/{node.pid}/statm").read_text().split()[0])
    seconds, undo = _limit(fleet, node.pid, resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE"))

    def lifted() -> None:
        undo()
        if node.alive():
            fleet.limited.discard(node)

    return seconds, lifted


def _limit(fleet: Fleet, pid: int, kind: int, most: int) -> tuple[float, Undo]:
    """The soft limit alone, of a running process. Where limits overlap, the end of the first is
    the end of all: one that gave back what it had found would leave the limit of another."""
    now, hard = resource.prlimit(pid, kind)
    before = fleet.soft_limits.setdefault((pid, kind), now)
    resource.prlimit(pid, kind, (most, hard))

    def undo() -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, kind, (before, hard))

    return fleet.chance.uniform(*LIMITED_SECONDS), undo


# -- the store


def store_faults(server: ServerProcess) -> dict[str, Fault]:
    def killed(fleet: Fleet) -> tuple[float, Undo] | None:
        if not server.running:
            return None
        fleet.totals.count("killed: Redis")
        server.kill()
        return fleet.chance.uniform(*AWAY_SECONDS), server.restart

    return {"Redis killed": killed, **store_faults_without_death(server)}


def store_faults_without_death(server: ServerProcess) -> dict[str, Fault]:
    def frozen(fleet: Fleet) -> tuple[float, Undo] | None:
        return _freeze(fleet, server.pid) if server.running else None

    def out_of_memory(fleet: Fleet) -> tuple[float, Undo] | None:
        if not _commanded(server, "CONFIG", "SET", "maxmemory", FULL_STORE_BYTES):
            return None
        undo = lambda: _again(fleet, server, "CONFIG", "SET", "maxmemory", 0)  # noqa: E731
        return fleet.chance.uniform(*LIMITED_SECONDS), undo

    def flushed(fleet: Fleet) -> None:
        _commanded(server, "FLUSHALL")

    def disconnected(fleet: Fleet) -> None:
        _commanded(server, "CLIENT", "KILL", "TYPE", "normal")

    return {
        "Redis frozen": frozen,
        "Redis out of memory": out_of_memory,
        "Redis flushed": flushed,
        "connections to Redis cut": disconnected,
    }


def _commanded(server: ServerProcess, *parts: str | int) -> bool:
    """Whether it answered; it may be dead or frozen."""
    try:
        server.command(*parts)
    except (OSError, RespError):
        return False
    return True


def _again(fleet: Fleet, server: ServerProcess, *parts: str | int) -> None:
    """Until it answers: what was set must not stay set. A server that was started again is as at
    the start."""
    if server.running and not _commanded(server, *parts):
        fleet.later(0.3, lambda: _again(fleet, server, *parts))


def failover_faults(sentinels: Sentinels) -> dict[str, Fault]:
    """Of the master: killed, so that the replica takes over, or cut off for less than that."""

    def killed(fleet: Fleet) -> None:
        master = sentinels.master()
        successor = sentinels.fail_over()
        fleet.totals.count("killed: Redis")
        master.restart()
        sentinels.wait_for_master(successor)

    def frozen(fleet: Fleet) -> tuple[float, Undo]:
        return _freeze(fleet, sentinels.master().pid)

    def flushed(fleet: Fleet) -> None:
        _commanded(sentinels.master(), "FLUSHALL")

    return {"failover": killed, "master frozen": frozen, "master flushed": flushed}


# -- the network


def network_faults(network: Network) -> dict[str, Fault]:
    names = list(network.hosts)

    def between(fault: Callable[[Fleet, str, str], tuple[float, Undo] | None]) -> Fault:
        return lambda fleet: fault(fleet, *fleet.chance.sample(names, 2))

    def way(**values: float) -> Fault:
        normal = dict.fromkeys(values, 0.0)

        def changed(fleet: Fleet, one: str, other: str) -> tuple[float, Undo]:
            network.set_both(one, other, **values)
            undo = lambda: network.set_both(one, other, **normal)  # noqa: E731
            return fleet.chance.uniform(*CUT_SECONDS), undo

        return between(changed)

    def forgotten(how: str) -> Fault:
        def killed(fleet: Fleet, one: str, other: str) -> None:
            network.kill(one, other, how)

        return between(killed)

    return {
        "hosts cut off": way(cut=1),
        "a slow link": way(delay=50, rate=20),
        "a lossy link": way(loss=5, delay=5),
        "a corrupting link": way(corrupt=20_000),
        "connections reset": forgotten("reset"),
        "connections die silently": forgotten("drop"),
    }


# -- clocks


def clock_faults(clocks: Mapping[str, Clock]) -> dict[str, Fault]:
    def jumps(clock: Clock) -> Fault:
        def jumped(fleet: Fleet) -> None:
            clock.set(fleet.chance.choice((0, 60, -60, 3_600, -3_600, DAY_SECONDS, -DAY_SECONDS)))

        return jumped

    return {f"the clock of {name} jumps": jumps(clock) for name, clock in clocks.items()}
