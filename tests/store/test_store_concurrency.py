"""RedisStore used by several processes and threads at once, and compared with MemoryStore."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from hypothesis_profiles import examples
from memory_store import MemoryStore
from patience import scaled
from servers import command, flush, python
from store import (
    LOCATIONS_MAX,
    Beat,
    BlockingStore,
    ClaimState,
    EmbeddedServer,
    NodeTaken,
    Record,
    layout,
    open_store,
)
from store.testing.samples import a_location, a_record


@pytest.fixture
def store(valkey_server: EmbeddedServer) -> Iterator[BlockingStore]:
    flush(valkey_server.url)
    with open_store(valkey_server.url, call_timeout_seconds=5) as store:
        yield store


PUBLISHER = """
import sys
from store import ClaimState, Location, Record, open_store

url, node, namespace, count = sys.argv[1:]
with open_store(url, call_timeout_seconds=10, connect_timeout_seconds=10) as store:
    print("ready", flush=True)
    while store.gone(namespace, "start") is None:
        pass
    outcomes, claims = {}, 0
    for n in range(int(count)):
        key, token = f"k{n}", f"{node}-{n}"
        claim = {"holder": node, "token": token, "lease_seconds": 60}
        claims += store.claim(namespace, key, state=ClaimState.ENCODING, **claim).granted
        record = Record(namespace, key, "uint8", (4,), 4, "tensor", 1.0)
        answer = store.publish(record, Location(node, "b" * 16, n + 1, n), claim_token="never")
        outcomes[answer.value] = outcomes.get(answer.value, 0) + 1
    print(claims, outcomes.get("added", 0), outcomes.get("full", 0), len(outcomes))
"""


def test_processes_publish_and_claim_the_same_keys_at_once(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    count, publishers = 150, LOCATIONS_MAX + 1
    processes = [
        python(PUBLISHER, valkey_server.url, f"node-{n}", namespace, str(count))
        for n in range(publishers)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        command(valkey_server.url, "SET", layout.gone(namespace, "start"), "now")
        answers = [process.communicate(timeout=scaled(60))[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    claims, added, full = (sum(int(answer[n]) for answer in answers) for n in range(3))
    assert claims == count, "each claim was granted to exactly one"
    assert added == count * LOCATIONS_MAX
    assert full == count, "of five publishers of a key, one found it full"
    for record in store.locate(namespace, [f"k{n}" for n in range(count)]):
        assert record is not None
        assert len({location.node for location in record.locations}) == LOCATIONS_MAX


def test_threads_share_one_store(store: BlockingStore, namespace: str) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for n in range(100):
                keys = [f"t{seed}-{n}-{m}" for m in range(dice.randrange(1, 5))]
                for key in keys:
                    store.publish(a_record(namespace, key), a_location())
                found = store.locate(namespace, keys)
                assert [record and record.key for record in found] == keys
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []


# ---- the same results as the reference

_keys = st.sampled_from(["a", "b" * 200])
_nodes = st.sampled_from([f"n{n}" for n in range(6)])
_boots = st.sampled_from(["boot1", "boot2"])


class SameAsMemory(RuleBasedStateMachine):
    """Any sequence of operations has the same results from RedisStore as from MemoryStore."""

    def __init__(self, redis: BlockingStore) -> None:
        super().__init__()
        self.redis, self.memory = redis, MemoryStore()
        self.namespace = ""

    @initialize()
    def start(self) -> None:
        self.namespace = f"{random.getrandbits(128):032x}{time.monotonic_ns()}"

    @rule(
        key=_keys, node=_nodes, boot=_boots, generation=st.integers(1, 3),
        dtype=st.sampled_from(["uint8"] * 4 + ["int8"]), token=st.sampled_from([None, "t1", "t2"]),
    )  # fmt: skip
    def publish(
        self, key: str, node: str, boot: str, generation: int, dtype: str, token: str | None
    ) -> None:
        record = a_record(self.namespace, key, dtype=dtype)
        location = a_location(node, boot=boot, generation=generation)
        first, second = (
            store.publish(record, location, claim_token=token) for store in self.both()
        )
        assert first is second
        self.same_records()

    @rule(key=_keys, node=_nodes, boot=_boots, generation=st.integers(1, 3), exact=st.booleans())
    def withdraw(self, key: str, node: str, boot: str, generation: int, exact: bool) -> None:
        location = a_location(node, boot=boot, generation=generation) if exact else None
        first, second = (
            store.withdraw(self.namespace, key, node, reason=f"by {node}", exactly=location)
            for store in self.both()
        )
        assert first is second
        self.same_records()

    @rule(
        key=_keys, holder=_nodes, token=st.sampled_from(["t1", "t2"]),
        state=st.sampled_from(ClaimState),
    )  # fmt: skip
    def claim(self, key: str, holder: str, token: str, state: ClaimState) -> None:
        first, second = (
            store.claim(
                self.namespace, key, holder=holder, token=token, state=state, lease_seconds=600
            )
            for store in self.both()
        )
        assert (first.granted, first.holder, first.state) == (
            second.granted,
            second.holder,
            second.state,
        )
        assert _sorted(first.record) == _sorted(second.record)

    @rule(
        node=_nodes, boot=_boots, sequence=st.integers(1, 2),
        replacing=st.one_of(st.none(), st.builds(Beat, _boots, st.integers(1, 2))),
    )  # fmt: skip
    def beat(self, node: str, boot: str, sequence: int, replacing: Beat | None) -> None:
        name = f"{node}-{self.namespace}"  # the nodes are shared by all examples
        answers: list[object] = []
        for store in self.both():
            try:
                answers.append(store.beat(name, boot, sequence, replacing=replacing))
            except NodeTaken as taken:
                answers.append(taken.beat)
        assert answers[0] == answers[1]

    @rule(key=_keys, token=st.sampled_from(["t1", "t2"]))
    def release(self, key: str, token: str) -> None:
        first, second = (
            store.release_claim(self.namespace, key, token=token) for store in self.both()
        )
        assert first is second

    def both(self) -> tuple[BlockingStore, BlockingStore]:
        return self.redis, self.memory

    def same_records(self) -> None:
        keys = ["a", "b" * 200]
        first, second = (
            [_sorted(record) for record in store.locate(self.namespace, keys)]
            for store in self.both()
        )
        assert first == second
        for key in keys:
            reasons = {store.gone(self.namespace, key) for store in self.both()}
            assert len(reasons) == 1


def _sorted(record: Record | None) -> Record | None:
    """The record with its locations in an order that is independent of the store."""
    return record and record._replace(locations=tuple(sorted(record.locations, key=str)))


def test_redis_and_memory_return_the_same(store: BlockingStore) -> None:
    run_state_machine_as_test(
        lambda: SameAsMemory(store),  # type: ignore[arg-type]  # any factory will do
        settings=settings(
            max_examples=examples(40), stateful_step_count=30, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
