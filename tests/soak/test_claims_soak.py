"""Claims under fire: 64 contenders in eight processes want 10,000 keys; some are killed or frozen.

As a program (`python test_claims_soak.py URL NAMESPACE SEED`) this file is one of the processes,
with eight contenders that want the same keys as all others. Each contender goes through the keys,
block by block. It claims each key and then "encodes" and publishes it, or waits for the claimant.
Some claimants give up, some fall silent and publish too late, some publish another shape. What
happened is printed as JSON lines; times are seconds of CLOCK_MONOTONIC:

    held     key, token, from, until      the claim was surely held
    publish  key, node, shape, outcome
    woken    key, seconds                 from the publication in its record until the event
    asleep   key                          a watch was not armed, or did not report a publication
    done
"""

import asyncio
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from patience import scaled
from servers import StartServer, command
from store import (
    ClaimAnswer,
    ClaimState,
    Location,
    Publication,
    Record,
    StoreError,
    open_async_store,
    open_store,
)

pytestmark = pytest.mark.part(name="soaks")

CONTENDERS = 8
KEYS = 10_000
BLOCK = 40
VISITED = 0.15
"""The part of each block that a contender goes for; 64 of them want each key nine times or so."""
INTENT_SECONDS, ENCODING_SECONDS = 0.3, 0.4
ASLEEP_SECONDS = 3.0
"""A waiter checks by itself after this long; its watch should have ended the wait before."""


Answer = TypeVar("Answer")


class Contender:
    def __init__(self, process: "Process", number: int) -> None:
        self._process = process
        self._chance = random.Random(process.seed * 100 + number)
        self._node = f"node-{process.seed}-{number}"

    async def run(self) -> None:
        for start in range(0, KEYS, BLOCK):
            block = list(range(start, min(start + BLOCK, KEYS)))
            for n in self._chance.sample(block, int(len(block) * VISITED)):
                await self._have(f"{n:064x}")

    async def _have(self, key: str) -> None:
        """Until the key is published."""
        process = self._process
        while not await process.published(key):
            token = secrets.token_hex(8)
            asked_at = time.monotonic()
            answer = await self._claim(key, token, ClaimState.INTENT, INTENT_SECONDS)
            if answer is None:
                continue
            if not answer.granted:
                await self._wait(key, answer)
            elif answer.record is not None:
                await process.release(key, token)
            else:
                process.held(key, token, asked_at + INTENT_SECONDS)
                await self._produce(key, token)

    async def _claim(
        self, key: str, token: str, state: ClaimState, lease_seconds: float
    ) -> ClaimAnswer | None:
        process = self._process

        def claim() -> ClaimAnswer:
            return process.store.claim(
                process.namespace, key,
                holder=f"{self._node}:b", token=token, state=state, lease_seconds=lease_seconds,
            )  # fmt: skip

        return await process.call(claim)

    async def _produce(self, key: str, token: str) -> None:
        process = self._process
        asked_at = time.monotonic()
        answer = await self._claim(key, token, ClaimState.ENCODING, ENCODING_SECONDS)
        if answer is None or not answer.granted:
            process.lets_go(token)
            return
        process.held(key, token, asked_at + ENCODING_SECONDS)
        await asyncio.sleep(self._chance.random() * 0.004)
        fate = self._chance.random()
        if fate < 0.03:  # falls silent: the lease has to end it, and the publication comes late
            await asyncio.sleep(ENCODING_SECONDS + 0.2)
        process.lets_go(token)
        if 0.03 <= fate < 0.10:
            await process.release(key, token)
            return
        await self._publish(key, token)

    async def _publish(self, key: str, token: str) -> None:
        process = self._process
        shape = (3,) if self._chance.random() < 0.9 else (4,)
        record = Record(
            process.namespace, key, "uint8", shape, shape[0], "tensor", time.monotonic()
        )

        def publish() -> Publication:
            return process.store.publish(record, Location(self._node, "b", 1, 0), claim_token=token)

        outcome = await process.call(publish)
        if outcome is not None:
            process.log("publish", key, self._node, shape[0], outcome.value)

    async def _wait(self, key: str, answer: ClaimAnswer) -> None:
        """For the publication, the release, or the end of the lease."""
        process = self._process
        changed = asyncio.Event()
        cancel = process.mirror.watch(process.namespace, key, changed.set)
        try:
            await self._sleep(key, changed, answer.remaining_seconds)
        except TimeoutError:
            process.log("asleep", key)
        finally:
            cancel()

    async def _sleep(self, key: str, changed: asyncio.Event, lease_seconds: float) -> None:
        process = self._process
        try:
            await asyncio.wait_for(changed.wait(), lease_seconds + 0.05)
        except TimeoutError:  # the holder is silent, or has renewed; or the event is missing
            found = await process.call(lambda: process.store.locate(process.namespace, [key]))
            if found and found[0] is not None:
                await asyncio.wait_for(changed.wait(), ASLEEP_SECONDS)
        record = await process.record(key)
        if record is not None:
            # `created` is the publisher's monotonic clock in this test.
            process.log("woken", key, round(time.monotonic() - record.created, 6))


class Process:
    def __init__(self, url: str, namespace: str, seed: int) -> None:
        self.seed = seed
        self.namespace = namespace
        self._of_mirror = open_async_store(url, call_timeout_seconds=2.0)
        self.store = open_store(url, call_timeout_seconds=2.0)
        self._threads = ThreadPoolExecutor(CONTENDERS)
        self._loop = asyncio.get_running_loop()
        mirrored = self._of_mirror.mirror()
        assert mirrored is not None
        self.mirror, _ = mirrored
        self._holding: dict[str, tuple[str, float, float]] = {}

    async def call(self, function: Callable[[], Answer]) -> Answer | None:
        """On a thread; None where the store failed."""
        try:
            return await self._loop.run_in_executor(self._threads, function)
        except StoreError:
            return None

    async def release(self, key: str, token: str) -> None:
        await self.call(lambda: self.store.release_claim(self.namespace, key, token=token))

    async def record(self, key: str) -> Record | None:
        answered = self._loop.create_future()
        self.mirror.ask(self.namespace, [key], answered.set_result)
        (found,) = await answered
        return found if isinstance(found, Record) else None

    async def published(self, key: str) -> bool:
        return await self.record(key) is not None

    def held(self, key: str, token: str, until: float) -> None:
        """The claim is surely held from now, after the reply, until its lease may have ended."""
        self.lets_go(token)
        self._holding[token] = (key, time.monotonic(), until)

    def lets_go(self, token: str) -> None:
        """From now on it may be another's."""
        if token in self._holding:
            key, since, until = self._holding.pop(token)
            self.log("held", key, token, since, min(until, time.monotonic()))

    def log(self, *what: object) -> None:
        print(json.dumps(what), flush=False)


async def main() -> None:
    url, namespace, seed = sys.argv[1:]
    process = Process(url, namespace, int(seed))
    await asyncio.gather(*(Contender(process, n).run() for n in range(CONTENDERS)))
    print(json.dumps(["done"]), flush=True)
    process.mirror.close()


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
                __file__,
                url,
                namespace,
                str(seed),
            ],
            stdout=file,
            cwd=TESTS.parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )


def _torment(processes: list["subprocess.Popen[bytes]"], chance: random.Random) -> None:
    """Freeze some for longer than a lease, and kill some without a restart."""
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
    assert len(told["woken"]) > 1_000, "no process waited for another"
    assert _overlaps(told["held"]) == [], "two holders of one claim at a time"
    assert told["asleep"] == [], "a waiter slept through a publication"
    late = [entry for entry in told["woken"] if entry[1] > WAKE_SECONDS_MAX]
    assert late == []

    time.sleep(ENCODING_SECONDS + 0.1)
    left = command(server.url, "EVAL", "return #redis.call('KEYS', 'lb:claim:*')", 0)
    assert left == b":0", "a claim stuck longer than its lease"

    shapes = {(key, node): shape for key, node, shape, _ in told["publish"]}
    outcomes = [outcome for *_, outcome in told["publish"]]
    assert "conflict" in outcomes, "no publication differed from its record"
    with open_store(server.url, call_timeout_seconds=5.0) as store:
        for record in store.scan(namespace):
            for at in record.locations:
                # A killed process may not have reported its last publication.
                shape = shapes.get((record.key, at.node), record.shape[0])
                assert (shape,) == record.shape, f"a conflict was merged at {record.key}"


if __name__ == "__main__":
    asyncio.run(main())
