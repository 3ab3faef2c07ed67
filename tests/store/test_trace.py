"""Traces: everything stored about a key, on one server and spread over a cluster."""

import time
from collections.abc import Iterator

import pytest

from clusters import ValkeyCluster
from servers import command, flush, patient
from store import BlockingStore, ClaimState, EmbeddedServer, Failure, Withdrawing, layout
from store.answers import Claim, Gone, Trace
from store.blocking import BlockingTraces
from store.testing.samples import BOOT, a_location, a_record

LONG_KEY = "a key with spaces " + "x" * 200


def traces_of(store: BlockingStore) -> BlockingTraces:
    return store.traces()


class TraceContract:
    """Subclasses choose the servers."""

    @pytest.fixture
    def store(self) -> Iterator[BlockingStore]:
        raise NotImplementedError

    def test_everything_about_a_key(self, store: BlockingStore, namespace: str) -> None:
        for key in ("k", LONG_KEY, "\udcff odd"):
            empty, other = traces_of(store).of([(namespace, key), (namespace, "other")])
            assert empty.is_empty
            assert other.is_empty
            store.publish(a_record(namespace, key), a_location(), ttl_seconds=1800)
            store.add_hits(namespace, {key: 5})
            store.claim(
                namespace,
                key,
                holder="n:b:17",
                token="t",
                state=ClaimState.INTENT,
                lease_seconds=90.0,
            )
            failure = Failure(namespace, key, "checksum", "node-1", "node-2")
            store.note_failures([failure])
            found, _ = traces_of(store).of([(namespace, key), (namespace, "other")])
            assert found.record == a_record(namespace, key, locations=(a_location(),))
            assert 1700 < found.record_remaining_seconds <= 1800
            assert found.claim is not None
            assert found.claim[:2] == Claim("n:b:17", ClaimState.INTENT, 0)[:2]
            assert 80 < found.claim.remaining_seconds <= 90
            assert (found.failure, found.hits, found.gone) == (failure, 5, None)
            assert 0 <= found.failed_seconds_ago < 60
            store.withdraw(namespace, key, "node-1", reason="evicted")
            (found,) = traces_of(store).of([(namespace, key)])
            assert (found.record, found.unreadable) == (None, "")
            assert found.gone is not None
            assert found.gone[:2] == Gone("evicted", "node-1", 0)[:2]

    def test_many_keys_at_once(self, store: BlockingStore, namespace: str) -> None:
        keys = [f"k{n}" for n in range(250)]
        for key in keys[::2]:
            store.publish(a_record(namespace, key), a_location())
        found = traces_of(store).of([(namespace, key) for key in keys])
        assert [trace.key for trace in found] == keys
        assert [trace.is_empty for trace in found] == [False, True] * 125

    @pytest.mark.parametrize("part", ["needle", "eedl", "[needle]*?"])
    def test_keys_are_found_by_a_part(
        self, store: BlockingStore, namespace: str, part: str
    ) -> None:
        wanted = {f"in-a-record-{part}", f"{part}#layer.1@request", f"{part} " + "y" * 300}
        for key in wanted:
            store.publish(a_record(namespace, key), a_location())
        store.publish(a_record(namespace, "hay"), a_location())
        if part == "needle":  # if the name is a hash, only the record has the key
            store.claim(
                namespace, "claimed-needle", holder="n:b:1", token="t",
                state=ClaimState.ENCODING, lease_seconds=60.0,
            )  # fmt: skip
            gone = Withdrawing(namespace, "gone-needle", "n", "expired", may_have_ended=True)
            store.withdraw_many([gone])
            store.note_failures([Failure(namespace, "failed-needle", "checksum", "a", "b")])
            wanted |= {"claimed-needle", "gone-needle", "failed-needle"}
        found = {key for space, key in traces_of(store).find(part) if space == namespace}
        assert found == wanted

    def test_how_nodes_left(self, store: BlockingStore) -> None:
        unknown, left = "never-heard-of", "node-that-left"
        store.beat(left, BOOT, 1)
        store.leave(left, BOOT, reason="stopped")
        found = traces_of(store).departures([unknown, left])
        assert found[unknown][:2] == ("", "")
        assert found[left][:2] == ("stopped", BOOT)
        assert 0 <= found[left].seconds_ago < 60
        assert found[left].silent_seconds is None
        assert traces_of(store).departures([]) == {}


class TestOnOneServer(TraceContract):
    @pytest.fixture
    def store(self, valkey_server: EmbeddedServer) -> Iterator[BlockingStore]:
        with patient(valkey_server.url) as store:
            yield store


class TestOnACluster(TraceContract):
    @pytest.fixture
    def store(self, valkey_cluster: ValkeyCluster) -> Iterator[BlockingStore]:
        with patient(valkey_cluster.url) as store:
            yield store


@pytest.fixture
def url(valkey_server: EmbeddedServer) -> str:
    flush(valkey_server.url)
    return valkey_server.url


def the_trace(url: str, namespace: str, key: str = "k") -> Trace:
    with patient(url) as store:
        (trace,) = traces_of(store).of([(namespace, key)])
    return trace


def test_foreign_values_are_no_error(url: str, namespace: str) -> None:
    names = [
        layout.record(namespace, "k"), layout.claim(namespace, "k"), layout.gone(namespace, "k"),
        layout.fail(namespace, "k"), layout.hits(namespace),
    ]  # fmt: skip
    for name in names:
        command(url, "RPUSH", name, "foreign")
    assert the_trace(url, namespace) == Trace(namespace, "k", unreadable="a list")
    for name in names:
        command(url, "DEL", name)
        command(url, "SET", name, "foreign", "EX", "60")
    trace = the_trace(url, namespace)
    assert trace.unreadable == "a string"
    assert (trace.record, trace.claim, trace.failure, trace.hits) == (None, None, None, 0)
    assert trace.gone is not None
    assert trace.gone[:2] == ("foreign", ""), "as versions before wrote it"


def test_a_record_of_another_version_is_named(url: str, namespace: str) -> None:
    command(url, "HSET", layout.record(namespace, "k"), "v", "7")
    assert the_trace(url, namespace).unreadable == "of version 7"


def test_a_claim_as_versions_before_wrote_it(url: str, namespace: str) -> None:
    command(url, "SET", layout.claim(namespace, "k"), "node:boot:encoding:token", "EX", "60")
    claim = the_trace(url, namespace).claim
    assert claim is not None
    assert claim[:2] == ("node:boot", ClaimState.ENCODING)


def test_an_entry_that_was_just_written_has_age_zero(url: str, namespace: str) -> None:
    with patient(url) as store:
        store.note_failures([Failure(namespace, "k", "checksum", "a", "b")])
        time.sleep(0.2)
    assert 0.15 < the_trace(url, namespace).failed_seconds_ago < 60
