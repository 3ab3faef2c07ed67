"""Claims under fire: 64 contenders in eight processes want 10,000 keys; some die or freeze."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from claim_contender import ENCODING_SECONDS
from patience import scaled
from servers import StartServer, command
from store import open_store

TESTS = Path(__file__).resolve().parents[1]
PROCESSES = 8
KILLED = 2
FREEZES = 6
FREEZE_SECONDS = 0.6  # longer than any lease
END_SECONDS = scaled(240.0)
WAKE_SECONDS_MAX = 2.5
"""Eight processes on two cores, frozen ones among them."""


def _start(url: str, namespace: str, seed: int, output: Path) -> "subprocess.Popen[bytes]":
    with output.open("wb") as file:
        return subprocess.Popen(
            [
                sys.executable,
                str(TESTS / "support" / "claim_contender.py"),
                url,
                namespace,
                str(seed),
            ],
            stdout=file,
            cwd=TESTS.parent,
            env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        )


def _torment(processes: list["subprocess.Popen[bytes]"], chance: random.Random) -> None:
    """Freeze some for longer than a lease, and kill some for good."""
    for _ in range(FREEZES):
        time.sleep(0.5)
        frozen = chance.choice(processes[KILLED:])
        if frozen.poll() is None:
            os.kill(frozen.pid, signal.SIGSTOP)
            time.sleep(FREEZE_SECONDS)
            os.kill(frozen.pid, signal.SIGCONT)
    for process in processes[:KILLED]:
        process.kill()


def _told(outputs: list[Path]) -> dict[str, list[list[Any]]]:
    told: dict[str, list[list[Any]]] = defaultdict(list)
    for output in outputs:
        for line in output.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a killed process may have left half a line
                kind, *rest = json.loads(line)
                told[kind].append(rest)
    return told


def _overlaps(held: list[list[Any]]) -> list[object]:
    """Pairs of claims on one key that were surely held at the same time by different tokens."""
    by_key = defaultdict(list)
    for key, token, since, until in held:
        if since < until:
            by_key[key].append((since, until, token))
    found: list[object] = []
    for key, spans in by_key.items():
        spans.sort()
        for first, second in itertools.pairwise(spans):
            if second[0] < first[1] and first[2] != second[2]:
                found.append((key, first, second))
    return found


def test_contenders_for_the_same_keys(
    start_server: StartServer, namespace: str, tmp_path: Path
) -> None:
    server = start_server()
    outputs = [tmp_path / f"{n}.jsonl" for n in range(PROCESSES)]
    processes = [_start(server.url, namespace, n, outputs[n]) for n in range(PROCESSES)]
    try:
        _torment(processes, random.Random(11))
        deadline = time.monotonic() + END_SECONDS
        for process in processes[KILLED:]:
            assert process.wait(max(1.0, deadline - time.monotonic())) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = _told(outputs)
    assert len(told["done"]) == PROCESSES - KILLED
    assert len(told["held"]) > 5_000
    assert len(told["woken"]) > 1_000, "nobody waited for anybody"
    assert _overlaps(told["held"]) == [], "two holders of one claim at a time"
    assert told["asleep"] == [], "a waiter slept through a publication"
    late = [entry for entry in told["woken"] if entry[1] > WAKE_SECONDS_MAX]
    assert late == []

    time.sleep(ENCODING_SECONDS + 0.1)
    left = command(server.url, "EVAL", "return #redis.call('KEYS', 'lb:claim:*')", 0)
    assert left == b":0", "a claim stuck longer than its lease"

    shapes = {(key, node): shape for key, node, shape, _ in told["publish"]}
    outcomes = [outcome for *_, outcome in told["publish"]]
    assert "conflict" in outcomes, "nobody tried to merge what differs"
    with open_store(server.url, call_timeout_seconds=5.0) as store:
        for record in store.scan(namespace):
            for at in record.locations:
                # A killed process may not have told of its last publication.
                shape = shapes.get((record.key, at.node), record.shape[0])
                assert (shape,) == record.shape, f"a conflict was merged at {record.key}"
