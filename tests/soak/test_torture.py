"""The torture: rounds of faults and hostile frames, chosen by chance, for as long as you like.

    make torture TORTURE_MINUTES=60

Each round starts a fleet of its own, does one kind of harm to it, and then checks it; its seed
repeats it. It adds what happened to the file of totals, from which the report is written, beside
it. Ctrl-C ends a run, and the next one goes on. One kind of round, once more:

    pytest tests/soak/test_torture.py::test_torture -s --torture-rounds partitions --soak-seed 7
"""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import network
import torture_fuzz
from clocks import FAKETIME, Clock, environment
from clusters import Sentinels
from node_certificates import Files, settings_of
from nodes import MIB, Nodes
from scripts.run_tests import TORTURE_ROUNDS
from servers import QUIET, ServerProcess, free_port, valkey_executable
from torture_faults import (
    calm_faults,
    clock_faults,
    failover_faults,
    limit_faults,
    network_faults,
    process_faults,
    store_faults,
    store_faults_without_death,
)
from torture_fleet import Fault, Fleet
from torture_totals import Finding, Totals, report

pytestmark = pytest.mark.part(name="torture")

NODES = 3
STORE_SECONDS = 1.0
LEASE_SECONDS = 1.5
SHORT_SECONDS, LONG_SECONDS, SOAK_SECONDS = 3.0, 30.0, 300.0
"""Of faults in one round: in the short form, else, and of a soak."""
LONG_MINUTES = 5.0
"""From here on a run is no short form."""
ALL_CAPACITY_BYTES, FULL_CAPACITY_BYTES = 48 * MIB, 16 * MIB

Round = Callable[[int, float, Path], Totals]
"""Its seed, its seconds, and a folder for it."""


@contextmanager
def a_server(folder: Path) -> Iterator[ServerProcess]:
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", *QUIET]
    server = ServerProcess(valkey_executable(), folder / "kv", port, options)
    try:
        yield server
    finally:
        server.kill()


def url_of(server: ServerProcess) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


@contextmanager
def nodes_on(url: str) -> Iterator[Nodes]:
    nodes = Nodes(url)
    try:
        yield nodes
    finally:
        nodes.end()


def settings(capacity_bytes: int = ALL_CAPACITY_BYTES) -> dict[str, object]:
    return {
        "capacity_bytes": capacity_bytes,
        "store_timeout_seconds": STORE_SECONDS,
        "handoff_lease_seconds": LEASE_SECONDS,
        "http_listen": f"http://127.0.0.1:{free_port()}",
    }


def run(fleet: Fleet, seconds: float, faults: dict[str, Fault]) -> Totals:
    try:
        fleet.run(seconds, faults, clients_per_node=1 if seconds <= SHORT_SECONDS else 2)
    finally:
        fleet.end()
    return fleet.totals


def plain(
    name: str, seed: int, seconds: float, folder: Path,
    faults_of: Callable[[ServerProcess], dict[str, Fault]], *, full: bool = False,
) -> Totals:  # fmt: skip
    """A round of `NODES` nodes on one server."""
    with a_server(folder) as server, nodes_on(url_of(server)) as start:
        capacity = FULL_CAPACITY_BYTES if full else ALL_CAPACITY_BYTES
        nodes = [start(**settings(capacity)) for _ in range(NODES)]
        return run(Fleet(nodes, name, seed, fills=full), seconds, faults_of(server))


def processes(seed: int, seconds: float, folder: Path) -> Totals:
    """Every process is killed and frozen, and Redis loses its data."""
    return plain(
        "processes", seed, seconds, folder, lambda kv: {**process_faults(), **store_faults(kv)}
    )


def full_arenas(seed: int, seconds: float, folder: Path) -> Totals:
    """The same with arenas that are full all the time."""
    return plain(
        "full arenas", seed, seconds, folder,
        lambda kv: {**process_faults(), **store_faults(kv)}, full=True,
    )  # fmt: skip


def limits(seed: int, seconds: float, folder: Path) -> Totals:
    """Nodes without descriptors, and without memory."""
    return plain("limits", seed, seconds, folder, lambda _: limit_faults())


def soak(seed: int, seconds: float, folder: Path) -> Totals:
    """No node dies, so their memory can be compared."""
    return plain(
        "soak", seed, seconds, folder,
        lambda kv: {**calm_faults(), **store_faults_without_death(kv)},
    )  # fmt: skip


def failover(seed: int, seconds: float, folder: Path) -> Totals:
    """A master that Sentinels replace."""
    sentinels = Sentinels(valkey_executable(), folder)
    try:
        with nodes_on(sentinels.url) as start:
            nodes = [start(**settings()) for _ in range(NODES)]
            faults = {**failover_faults(sentinels), **process_faults()}
            return run(Fleet(nodes, "failover", seed), seconds, faults)
    finally:
        sentinels.close()


def partitions(seed: int, seconds: float, folder: Path) -> Totals:
    """Hosts on a network that is cut, slow and lossy."""
    names = ("a", "b", "c")
    hosts = network.Network(names)
    try:
        nodes = [
            hosts.node(
                name,
                capacity_bytes=ALL_CAPACITY_BYTES,
                store_timeout_seconds=STORE_SECONDS,
                handoff_lease_seconds=LEASE_SECONDS,
            )
            for name in names
        ]
        faults = network_faults(hosts)
        for name in ("node killed", "client killed", "client frozen"):
            faults[name] = process_faults()[name]
        return run(Fleet(nodes, "partitions", seed), seconds, faults)
    finally:
        hosts.close()


def clocks(seed: int, seconds: float, folder: Path) -> Totals:
    """The wall clocks of nodes and of Redis jump by up to a day."""
    named = {name: Clock(folder / name) for name in ("Redis", "node 0", "node 1", "node 2")}
    of_redis, *of_nodes = named.values()
    with ExitStack() as closing:
        with environment(of_redis.variables):
            server = closing.enter_context(a_server(folder))
        start = closing.enter_context(nodes_on(url_of(server)))
        nodes = []
        for clock in of_nodes:
            with environment(clock.variables):
                nodes.append(start(prelude="pass", **settings()))  # executed, not forked
        variables = dict(zip(nodes, (clock.variables for clock in of_nodes), strict=True))
        fleet = Fleet(nodes, "clocks", seed, environments=variables)
        killed = {"node killed": process_faults()["node killed"]}
        return run(fleet, seconds, clock_faults(named) | killed)


def fuzz(socket: str) -> Round:
    """Hostile frames on one kind of socket."""

    def attacked(seed: int, seconds: float, folder: Path) -> Totals:
        with a_server(folder) as server, nodes_on(url_of(server)) as start:
            settings = {"http_listen": f"http://127.0.0.1:{free_port()}"}
            if socket == "tls":
                settings |= settings_of(Files(folder / "tls").of("fuzzed"), "fuzzed")
            scheme = "tls" if socket == "tls" else "tcp"
            node = start(**settings | {"listen": f"{scheme}://127.0.0.1:{free_port()}"})
            return torture_fuzz.attack(node, socket, seed, seconds)

    return attacked


ROUNDS: dict[str, Round] = {
    "processes": processes,
    "full arenas": full_arenas,
    "limits": limits,
    "failover": failover,
    "partitions": partitions,
    "clocks": clocks,
    "soak": soak,
    **{f"fuzz {socket}": fuzz(socket) for socket in torture_fuzz.SOCKETS},
}


def why_not(name: str) -> str:
    """Why this machine cannot run such rounds; "" if it can."""
    if name == "partitions":
        return network.why_not()
    if name == "clocks" and not FAKETIME.exists():
        return "there is no libfaketime (make system-packages)"
    return ""


def seconds_of(name: str, minutes: float) -> float:
    if minutes < LONG_MINUTES:
        return SHORT_SECONDS
    return min(SOAK_SECONDS, 30 * minutes) if name == "soak" else LONG_SECONDS


def one_round(name: str, seed: int, seconds: float, folder: Path) -> Totals:
    """What happened in it. An error of the harness, or of a wait in it, is a finding."""
    print(f"-- {name}, seed {seed}, {seconds:.0f} s", flush=True)
    began = time.monotonic()
    totals = Totals.of_today()
    folder.mkdir()
    try:
        totals.add(ROUNDS[name](seed, seconds, folder))
    except (Exception, pytest.fail.Exception) as error:
        text = f"{type(error).__name__}: {error}"
        for place in (os.getcwd(), sys.base_prefix):  # the totals are kept and shown
            text = text.replace(f"{place}/", "")
        print(f"FOUND in {name}, seed {seed}: {text}", flush=True)
        totals.findings.append(Finding("other", name, seed, text))
    totals.rounds = {name: 1}
    totals.seconds = {name: time.monotonic() - began}
    return totals


def chosen(names: Sequence[str]) -> list[str]:
    """The kinds of rounds that were asked for and that can be run."""
    unknown = set(names) - ROUNDS.keys()
    assert not unknown, f"rounds: {', '.join(ROUNDS)}; not {unknown}"
    reasons = {name: why_not(name) for name in names or ROUNDS}
    for name, reason in reasons.items():
        if reason:
            print(f"-- no round {name}: {reason}")
    return [name for name, reason in reasons.items() if not reason]


def test_torture(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    minutes: float = pytestconfig.getoption("--torture-minutes")
    path = Path(pytestconfig.getoption("--torture-totals") or tmp_path / "totals.json")
    asked: str = pytestconfig.getoption("--torture-rounds")
    names = chosen([name for name in asked.split(",") if name])
    whole, of_run = Totals.read(path), Totals()
    first_seed = pytestconfig.getoption("--soak-seed") or sum(whole.rounds.values())
    until = time.monotonic() + 60 * minutes
    try:
        for number in itertools.count():
            if number >= len(names) and (minutes < LONG_MINUTES or time.monotonic() > until):
                break
            name = names[number % len(names)]
            seed = first_seed + number
            totals = one_round(name, seed, seconds_of(name, minutes), tmp_path / str(number))
            of_run.add(totals)
            whole.add(totals)
            whole.write(path)
            path.with_suffix(".md").write_text(report(whole))
    finally:
        print(report(of_run))
    assert not of_run.findings
    assert sum(of_run.rounds.values()) >= len(names)


def test_each_kind_of_round_belongs_to_a_part() -> None:
    assert sorted(itertools.chain(*TORTURE_ROUNDS.values())) == sorted(ROUNDS)


def test_totals_add_up_over_runs(tmp_path: Path) -> None:
    path = tmp_path / "totals" / "file.json"
    for day in ("2026-01-02", "2026-01-01"):
        of_run = Totals(first_day=day, last_day=day, commits=["abc"], rounds={"soak": 1})
        of_run.seconds = {"soak": 90.0}
        of_run.count("killed: node", 3)
        of_run.peak("memory, MiB", 2.0)
        of_run.findings.append(Finding("lost", "soak", 7, "a | b\nc"))
        whole = Totals.read(path)
        whole.add(of_run)
        whole.write(path)
    found = Totals.read(path)
    assert (found.counts, found.rounds, found.commits) == (
        {"killed: node": 6}, {"soak": 2}, ["abc"],
    )  # fmt: skip
    assert (found.first_day, found.last_day) == ("2026-01-01", "2026-01-02")
    text = report(found)
    assert "| processes killed | 1,000 | 6 |" in text
    assert "| acknowledged and lost, though the holder lives | 0 | 2 |" in text
    assert "| lost | soak | 7 | a / b c |" in text
    assert os.listdir(path.parent) == ["file.json"]
