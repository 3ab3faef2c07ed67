"""The mirror under fire: eight processes change records, expire and evict them, and are cut off.

After each round there is quiet; then what every mirror knows must equal what Redis holds.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers import StartServer, command
from store import EmbeddedServer

TESTS = Path(__file__).resolve().parents[1]
PROCESSES = 8
ROUNDS = 5
OPERATIONS = 100_000
LAST_OPERATIONS = 30
CUTS_A_ROUND = 12


@pytest.fixture(params=["volatile-lru", "allkeys-lru"])
def server(start_server: StartServer, request: pytest.FixtureRequest) -> EmbeddedServer:
    # Room for about half of the records: the rest is evicted all the time.
    return start_server(maxmemory_bytes=_empty_bytes(start_server) + 600_000, policy=request.param)


def _empty_bytes(start_server: StartServer) -> int:
    """What a server with as many clients takes without any record."""
    server = start_server()
    info = command(server.url, "INFO", "memory").decode()
    server.close()
    used = next(line for line in info.splitlines() if line.startswith("used_memory:"))
    return int(used.partition(":")[2]) + PROCESSES * 3 * 40_000


@pytest.fixture
def soakers(server: EmbeddedServer, namespace: str) -> Iterator[list["subprocess.Popen[str]"]]:
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(TESTS / "support" / "mirror_soaker.py"),
                server.url,
                namespace,
                str(seed),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS.parent,
            env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        )
        for seed in range(PROCESSES)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def _tell(soakers: list["subprocess.Popen[str]"], text: str) -> None:
    for process in soakers:
        assert process.stdin is not None
        process.stdin.write(text + "\n")
        process.stdin.flush()


def _hear(soakers: list["subprocess.Popen[str]"]) -> list[dict[str, object]]:
    answers = []
    for process in soakers:
        assert process.stdout is not None
        answers.append(json.loads(process.stdout.readline()))
    return answers


def _cut(server: EmbeddedServer, chance: random.Random) -> None:
    """End some client's connection, as a network that fails does."""
    clients = command(server.url, "CLIENT", "LIST").decode().splitlines()
    ids = [line.split()[0].removeprefix("id=") for line in clients]
    command(server.url, "CLIENT", "KILL", "ID", chance.choice(ids))


def test_after_each_quiet_moment_every_mirror_equals_redis(
    server: EmbeddedServer, soakers: list["subprocess.Popen[str]"]
) -> None:
    chance = random.Random(7)
    pushes = 0
    for _ in range(ROUNDS):
        _tell(soakers, f"work {OPERATIONS // PROCESSES // ROUNDS}")
        for _ in range(CUTS_A_ROUND):
            time.sleep(0.1)
            _cut(server, chance)
        worked = _hear(soakers)
        assert all(answer["asked"] for answer in worked)
        # Mirrors that know something, and then a few changes more.
        _tell(soakers, "look")
        _hear(soakers)
        _tell(soakers, f"work {LAST_OPERATIONS}")
        _cut(server, chance)
        _hear(soakers)
        _tell(soakers, "compare")
        compared = _hear(soakers)
        assert [answer["differ"] for answer in compared] == [[]] * PROCESSES, compared
        sizes = sorted(int(str(answer["size"])) for answer in compared)
        assert sizes[2] > 100, "most mirrors know something"  # one may just have been cut off
        pushes = sum(int(str(answer["pushes"])) for answer in compared)
    assert pushes > 1000, "mirrors that are never corrected prove nothing"
    stats = command(server.url, "INFO", "stats").decode()
    counts = dict(line.split(":") for line in stats.splitlines() if ":" in line)
    assert int(counts["evicted_keys"]) > 100, "nothing was evicted"
    assert int(counts["expired_keys"]) > 100, "nothing expired"
