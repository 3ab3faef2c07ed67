"""The locator: while its store cannot be opened, what it answers from its mirror, and without."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from awaited import at_once, awaited
from clusters import ValkeyCluster, names_in_slots, slot_of
from lookup_buffer.config import BufferConfig
from lookup_buffer.node.locate import NOT_REACHED, Located, Locator, Waiting
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.storage import Storage
from lookup_buffer.shm.index import RemoteIndex, RemoteIndexReader, digest_of
from patience import scaled
from store import (
    BlockingStore,
    EmbeddedServer,
    Found,
    Location,
    MetadataStore,
    NodeInfo,
    Record,
    StoreUnavailable,
    layout,
    open_store,
)
from store.entries import ABSENT_SECONDS_MAX


class Unopened(Storage):
    def __init__(self) -> None:
        super().__init__(BufferConfig.of({}), "node-1")
        self.tried = 0

    async def store(self) -> MetadataStore:
        self.tried += 1
        raise StoreUnavailable("it does not start")


def storage_at(url: str) -> Storage:
    config = BufferConfig.of({"store_url": url, "store_timeout_seconds": 5.0})
    return Storage(config, "node-1")


def locator_on(storage: Storage, *, mirrored: bool = True) -> Locator:
    loop = asyncio.get_running_loop()
    return Locator(loop, storage, Directory("us"), RemoteIndex(), mirrored=mirrored)


async def look_up(locator: Locator, namespace: str, key: str) -> Located:
    async with asyncio.timeout(10.0):
        (located,) = await locator.locate([(namespace, key)])
    return located


def without_the_loop(url: str, act: Callable[[BlockingStore], object]) -> None:
    """Act by a store of a thread's own; the loop does nothing meanwhile, and reads no push."""

    def run() -> None:
        with open_store(url, call_timeout_seconds=5.0) as store:
            act(store)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def test_a_cancelled_wait_is_dropped() -> None:
    asyncio.run(_a_cancelled_wait_is_dropped())


async def _a_cancelled_wait_is_dropped() -> None:
    storage = Unopened()
    locator = locator_on(storage)
    waiting = Waiting(asyncio.get_running_loop(), locator)
    locator.start()

    async def wait(key: str) -> None:
        with waiting.changes(("ns", key), math.inf) as changed:
            while True:
                await changed()

    kept, *others = (asyncio.ensure_future(wait(f"k{n}")) for n in range(100))
    await asyncio.sleep(0)
    for one in others:
        one.cancel()
    assert await look_up(locator, "ns", "k") == NOT_REACHED
    await asyncio.wait(others)
    assert list(waiting._waiters) == [("ns", "k0")], "only who still waits"
    assert await look_up(locator, "ns", "k") == NOT_REACHED
    assert storage.tried == 1, "it is not tried again so soon"
    kept.cancel()
    await asyncio.wait([kept])
    assert not waiting._waiters
    locator.close()


def test_an_absent_key_is_cached_for_a_second(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    asyncio.run(_what_is_absent_is_known_for_a_second(valkey_server.url, namespace))


async def _what_is_absent_is_known_for_a_second(url: str, namespace: str) -> None:
    storage = storage_at(url)
    locator = locator_on(storage)
    locator.start()
    for _ in range(2):
        assert locator.known(namespace, ["k"]) == [None], "never asked, or too long ago"
        assert locator.cached((namespace, "k")) is None
        assert (await look_up(locator, namespace, "k")).reason == "absent"
        assert locator.known(namespace, ["k"]) == [False]
        cached = locator.cached((namespace, "k"))
        assert cached is not None
        assert cached.reason == "absent"
        await asyncio.sleep(ABSENT_SECONDS_MAX + 0.1)
    locator.close()
    await storage.close()


def test_keys_removed_with_all_others_are_listed_again(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    """A lane that is lost voids all; what others had read is still known, and true."""
    asyncio.run(_removed_keys_are_listed_again(valkey_server.url, namespace))


async def _removed_keys_are_listed_again(url: str, namespace: str) -> None:
    storage, directory, elsewhere = storage_at(url), Directory("us"), RemoteIndex()
    node = f"node-{namespace[:8]}"
    record = Record(namespace, "k", "uint8", (1,), 1, "tensor", 1.0)

    def prepare(store: BlockingStore) -> None:
        store.describe_node(NodeInfo(node, "boot", "tcp://127.0.0.1:1", "host", "0", 1, 1, 1))
        store.beat(node, "boot", 1)
        store.publish(record, Location(node, "boot", 1, 1), ttl_seconds=60.0)
        at_once(directory.refresh(awaited(store)))

    without_the_loop(url, prepare)
    locator = Locator(asyncio.get_running_loop(), storage, directory, elsewhere, mirrored=True)
    reader = RemoteIndexReader(elsewhere.fd)
    locator.start()
    await look_up(locator, namespace, "k")
    for _ in range(2):
        assert locator.known(namespace, ["k"]) == [True]
        assert reader.contains(digest_of(namespace, "k"))
        locator._forgotten(None)
        assert not reader.contains(digest_of(namespace, "k"))
    without_the_loop(url, lambda store: store.leave(node, "boot"))
    locator.close()
    await storage.close()
    reader.close()
    elsewhere.close()


def test_the_mirror_does_not_contradict_the_reply_to_a_claim(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    """The push may come later than an answer on another connection: here it is never read."""
    asyncio.run(_the_mirror_agrees_with_the_reply_to_a_claim(valkey_server.url, namespace))


async def _the_mirror_agrees_with_the_reply_to_a_claim(url: str, namespace: str) -> None:
    storage = storage_at(url)
    locator = locator_on(storage)
    locator.start()
    assert (await look_up(locator, namespace, "k")).reason == "absent"
    record = Record(namespace, "k", "uint8", (1,), 1, "tensor", 1.0)
    there = Location("node-k", "boot", 1, 1)
    without_the_loop(url, lambda store: store.publish(record, there, ttl_seconds=60.0))
    assert locator.known(namespace, ["k"]) == [False], "the loop has read no push yet"
    locator.forget((namespace, "k"))
    assert locator.known(namespace, ["k"]) == [None]
    assert (await look_up(locator, namespace, "k")).record is not None

    under_way = asyncio.ensure_future(look_up(locator, namespace, "other"))
    await asyncio.sleep(0)
    locator.forget((namespace, "other"))
    assert (await under_way).reason == "absent"
    assert locator.known(namespace, ["other"]) == [None], "it was read before"
    locator.close()
    await storage.close()


def test_a_key_in_a_slot_that_moves_is_found_where_it_is(
    valkey_cluster: ValkeyCluster, namespace: str
) -> None:
    """Its server refers to the other one by ASK, which only the store follows."""
    slot = slot_of(layout.record(namespace, "k0"))
    there, absent = names_in_slots(namespace, 2, range(slot, slot + 1))
    source = valkey_cluster.owner(slot)
    target = next(master for master in valkey_cluster.masters() if master is not source)
    with open_store(valkey_cluster.url, call_timeout_seconds=5.0) as store:
        record = Record(namespace, there, "uint8", (1,), 1, "tensor", 1.0)
        store.publish(record, Location("node-k", "boot", 1, 1), ttl_seconds=60.0)
    elsewhere = [(namespace, f"nowhere{n}") for n in range(64)]
    found: list[Located] = []

    async def look() -> None:
        storage = storage_at(valkey_cluster.url)
        locator = locator_on(storage)
        locator.start()
        async with asyncio.timeout(scaled(10.0)):
            while NOT_REACHED in await locator.locate(elsewhere):  # which servers there are
                await asyncio.sleep(0.01)
        found.extend(await locator.locate([(namespace, absent), (namespace, there)]))
        locator.close()
        await storage.close()

    def run() -> None:
        asyncio.run(look())

    valkey_cluster.move_slot(slot, target, between=run, emptied=run)
    valkey_cluster.move_slot(slot, source)
    assert [one.reason for one in found] == ["absent", "owner_dead"] * 2, "node-k is none"


def test_look_ups_without_a_mirror_share_round_trips(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    asyncio.run(_look_ups_share_round_trips(valkey_server.url, namespace))


async def _look_ups_share_round_trips(url: str, namespace: str) -> None:
    storage = storage_at(url)
    locator = locator_on(storage, mirrored=False)
    locator.start()
    assert (await look_up(locator, namespace, "k")).reason == "absent"
    store, calls = await storage.store(), 0
    read = store.look_up

    async def counted(items: Sequence[tuple[str, str]]) -> list[Found]:
        nonlocal calls
        calls += 1
        return await read(items)

    store.look_up = counted  # type: ignore[method-assign]
    looks = [asyncio.ensure_future(look_up(locator, namespace, f"k{n}")) for n in range(50)]
    looks[0].cancel()
    found = await asyncio.gather(*looks, return_exceptions=True)
    assert [one.reason for one in found[1:] if isinstance(one, Located)] == ["absent"] * 49
    assert calls <= 2
    assert locator.known(namespace, ["k1"]) == [None], "nothing is cached"
    locator.close()
    await storage.close()
