"""The mirroring locator: while its store cannot be opened, and what it answers from its mirror."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lookup_buffer.config import BufferConfig
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.locator import NOT_REACHED, Located
from lookup_buffer.node.mirroring import MirrorLocator
from lookup_buffer.node.storage import Storage
from lookup_buffer.shm.index import RemoteIndex, RemoteIndexReader, digest_of
from store import (
    BlockingStore,
    EmbeddedServer,
    Location,
    NodeInfo,
    Record,
    StoreUnavailable,
    open_store,
)
from store.entries import ABSENT_SECONDS_MAX


class Unopened(Storage):
    def __init__(self) -> None:
        super().__init__(BufferConfig.of({}), asyncio.get_running_loop(), "node-1")
        self.tried = 0

    def store(self) -> BlockingStore:
        self.tried += 1
        raise StoreUnavailable("it does not start")


def storage_at(url: str) -> Storage:
    config = BufferConfig.of({"store_url": url, "store_timeout_seconds": 5.0})
    return Storage(config, asyncio.get_running_loop(), "node-1")


def without_the_loop(url: str, act: Callable[[BlockingStore], object]) -> None:
    """Act by a store of a thread's own; the loop does nothing meanwhile, and reads no push."""

    def run() -> None:
        with open_store(url, call_timeout_seconds=5.0) as store:
            act(store)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def nothing() -> None: ...


def test_a_cancelled_wait_is_dropped() -> None:
    asyncio.run(_a_cancelled_wait_is_dropped())


async def _a_cancelled_wait_is_dropped() -> None:
    storage = Unopened()
    locator = MirrorLocator(asyncio.get_running_loop(), storage, Directory("us"), RemoteIndex())
    locator.start()
    kept = locator.watch(("ns", "kept"), nothing)
    for n in range(100):
        locator.watch(("ns", f"k{n}"), nothing)()
    answers: list[list[Located]] = []
    locator.ask([("ns", "k")], answers.append)
    until = time.monotonic() + 3.0
    while not answers and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert answers == [[NOT_REACHED]]
    assert len(locator._waiting) == 1, "only who still waits"
    kept()
    locator.close()


def test_an_absent_key_is_cached_for_a_second(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    asyncio.run(_what_is_absent_is_known_for_a_second(valkey_server.url, namespace))


async def _what_is_absent_is_known_for_a_second(url: str, namespace: str) -> None:
    loop = asyncio.get_running_loop()
    storage = storage_at(url)
    locator = MirrorLocator(loop, storage, Directory("us"), RemoteIndex())
    locator.start()
    for _ in range(2):
        assert locator.known(namespace, ["k"]) == [None], "never asked, or too long ago"
        answered: asyncio.Future[list[Located]] = loop.create_future()
        locator.ask([(namespace, "k")], answered.set_result)
        (located,) = await asyncio.wait_for(answered, 10.0)
        assert located.reason == "absent"
        assert locator.known(namespace, ["k"]) == [False]
        await asyncio.sleep(ABSENT_SECONDS_MAX + 0.1)
    await asyncio.to_thread(locator.close)
    await asyncio.to_thread(storage.close)


def test_keys_removed_with_all_others_are_listed_again(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    """A lane that is lost voids all; what others had read is still known, and true."""
    asyncio.run(_removed_keys_are_listed_again(valkey_server.url, namespace))


async def _removed_keys_are_listed_again(url: str, namespace: str) -> None:
    loop = asyncio.get_running_loop()
    storage, directory, elsewhere = storage_at(url), Directory("us"), RemoteIndex()
    node = f"node-{namespace[:8]}"
    record = Record(namespace, "k", "uint8", (1,), 1, "tensor", 1.0)

    def prepare(store: BlockingStore) -> None:
        store.describe_node(NodeInfo(node, "boot", "tcp://127.0.0.1:1", "host", "0", 1, 1, 1))
        store.beat(node, "boot", 1)
        store.publish(record, Location(node, "boot", 1, 1), ttl_seconds=60.0)
        directory.refresh(store)

    without_the_loop(url, prepare)
    locator, reader = (
        MirrorLocator(loop, storage, directory, elsewhere),
        RemoteIndexReader(elsewhere.fd),
    )
    locator.start()
    answered: asyncio.Future[list[Located]] = loop.create_future()
    locator.ask([(namespace, "k")], answered.set_result)
    await asyncio.wait_for(answered, 10.0)
    for _ in range(2):
        assert locator.known(namespace, ["k"]) == [True]
        assert reader.contains(digest_of(namespace, "k"))
        locator._forgotten(None)
        assert not reader.contains(digest_of(namespace, "k"))
    without_the_loop(url, lambda store: store.leave(node, "boot"))
    await asyncio.to_thread(locator.close)
    await asyncio.to_thread(storage.close)
    reader.close()
    elsewhere.close()


def test_the_mirror_does_not_contradict_the_reply_to_a_claim(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    """The push may come later than an answer on another connection: here it is never read."""
    asyncio.run(_the_mirror_agrees_with_the_reply_to_a_claim(valkey_server.url, namespace))


async def _the_mirror_agrees_with_the_reply_to_a_claim(url: str, namespace: str) -> None:
    loop = asyncio.get_running_loop()
    storage = storage_at(url)
    locator = MirrorLocator(loop, storage, Directory("us"), RemoteIndex())
    locator.start()

    async def ask() -> Located:
        answered: asyncio.Future[list[Located]] = loop.create_future()
        locator.ask([(namespace, "k")], answered.set_result)
        return (await asyncio.wait_for(answered, 10.0))[0]

    assert (await ask()).reason == "absent"
    record = Record(namespace, "k", "uint8", (1,), 1, "tensor", 1.0)
    there = Location("node-k", "boot", 1, 1)
    without_the_loop(url, lambda store: store.publish(record, there, ttl_seconds=60.0))
    assert locator.known(namespace, ["k"]) == [False], "the loop has read no push yet"
    locator.forget((namespace, "k"))
    assert locator.known(namespace, ["k"]) == [None]
    assert (await ask()).record is not None

    under_way: asyncio.Future[list[Located]] = loop.create_future()
    locator.ask([(namespace, "other")], under_way.set_result)
    locator.forget((namespace, "other"))
    assert (await asyncio.wait_for(under_way, 10.0))[0].reason == "absent"
    assert locator.known(namespace, ["other"]) == [None], "it was read before"
    await asyncio.to_thread(locator.close)
    await asyncio.to_thread(storage.close)
