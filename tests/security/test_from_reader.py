"""A node that may only read (`read_only`), and who uses it or has its certificate and its password.

It finds and gets what others stored. It stores, takes and claims nothing, writes nothing to Redis,
and no other node takes bytes from it.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from cryptography.x509 import DNSName, UniformResourceIdentifier
from redis import Redis

from command_line import beating, boot_of, run
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError, MissingTensor, NodeRefused, PipeError, ReadOnly
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.node import peers
from lookup_buffer.node.links import HANDOFFS, REACHABILITY, TENSORS, Credentials, dial
from lookup_buffer.node.membership import Identity
from lookup_buffer.node.peers import (
    ITEMS_MAX,
    LINKS_PER_CLIENT,
    SENDERS_MAX,
    Asked,
    PeerServer,
    Reply,
)
from lookup_buffer.node.reachability import LINKS_MAX
from lookup_buffer.protocol import messages
from lookup_buffer.protocol.fields import EXCHANGED_BYTES
from lookup_buffer.protocol.framing import encode_frame
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import ClaimOutcome
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.protocol.tls import READER, Tls
from node_certificates import Files, settings_of
from nodes import MIB, NodeProcess, StartNode, handoff, key, tensor_of, wait_until, with_store
from patience import scaled
from peer_servers import NAMESPACE, Bench, answered, on_a_loop
from raw_clients import raw
from servers import ServerProcess, command, free_port, user_rule, valkey_executable
from store import ClaimState, EmbeddedServer, Location, NodeInfo, Record, StoreError, open_store
from store.testing.samples import a_mark

SPACE = Namespace.named("tests").fingerprint
PASSWORD = "of-the-reader"
USER = "lookup-buffer-reader"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls") / "fleet")


@pytest.fixture(scope="module")
def readers_url(valkey_server: EmbeddedServer) -> Iterator[str]:
    """The store, as the documented user of readers."""
    url = valkey_server.url
    assert command(url, "ACL", "SETUSER", USER, *user_rule(PASSWORD, USER)) == b"+OK"
    yield f"unix://{USER}:{PASSWORD}@{url.removeprefix('unix://')}"
    command(url, "ACL", "DELUSER", USER)


@pytest.fixture(scope="module")
def writer(module_nodes: StartNode, certified: Files) -> NodeProcess:
    node = module_nodes(**settings_of(certified.of("writer"), "writer"))
    with_store(node)
    return node


@pytest.fixture(scope="module")
def reader(module_nodes: StartNode, certified: Files, readers_url: str) -> NodeProcess:
    files = certified.of("reader", reader=True)
    settings = {**settings_of(files, "reader"), "read_only": True, "store_url": readers_url}
    node = module_nodes(**settings)
    with_store(node)
    return node


def stored_by(writer: NodeProcess, nbytes: int = 1000) -> tuple[TensorKey, torch.Tensor]:
    name, tensor = key(), tensor_of("stored", nbytes)
    with writer.client() as client:
        client.insert(name, tensor)
    return name, tensor


# -- what it is for


@pytest.mark.parametrize("nbytes", [0, 1000, 8 * MIB])
def test_it_gets_what_others_stored(writer: NodeProcess, reader: NodeProcess, nbytes: int) -> None:
    name, tensor = stored_by(writer, nbytes)
    with reader.client() as client:
        found = client.select(name, timeout=10.0)
        assert found is not None
        assert torch.equal(found, tensor)
        assert client.has_caches([name, key()]) == [True, False]
        assert client.stats()["unpublished"] == 0


def test_it_writes_nothing_to_the_store(
    writer: NodeProcess, reader: NodeProcess, valkey_server: EmbeddedServer
) -> None:
    name, _ = stored_by(writer)
    with reader.client() as client:
        client.select(name, timeout=10.0)
        with pytest.raises(MissingTensor):
            client.select(key())
    refused = reader.stats().get("store_failures", 0)
    with open_store(valkey_server.url) as store:
        (record,) = store.locate(SPACE, [name.text])
        assert isinstance(record, Record)
        assert [at.node for at in record.locations] == ["writer"]
        assert "reader" not in store.beats()
        assert store.node_infos(["reader"]) == {}
        assert "reader" not in store.stats()
    assert refused == 0, "it did not even try"
    assert "NOPERM" not in reader.log_text()


def test_an_invalidated_namespace_is_dropped_there_too(
    writer: NodeProcess, reader: NodeProcess, valkey_server: EmbeddedServer
) -> None:
    space, name = Namespace.named("of-old-weights"), key()
    with writer.client("of-old-weights") as client:
        client.insert(name, tensor_of("old", 1000))
    with reader.client("of-old-weights") as client:
        assert client.select(name, timeout=10.0) is not None
        done = run("invalidate", space.fingerprint, "--store-url", valkey_server.url)
        assert done.returncode in (0, 1), "1: nodes of other tests are silent"
        wait_until(lambda: client.has_caches([name]) == [False], 15.0)


# -- its clients


def test_its_clients_change_nothing(writer: NodeProcess, reader: NodeProcess) -> None:
    item, passing = key(), handoff()
    with writer.client() as there, reader.client() as here:
        there.insert(passing, tensor_of("passing", 1000))
        with pytest.raises(ReadOnly, match=r"node reader only reads .*'read_only'.*insert"):
            here.insert(item, tensor_of("forged", 1000))
        with pytest.raises(ReadOnly, match="insert"):
            here.insert(handoff(), tensor_of("forged", 1000))
        with pytest.raises(ReadOnly, match="take"):
            here.drop_select(passing, timeout=5.0)
        with pytest.raises(ReadOnly, match="claim"):
            here.claim(item, lease_seconds=10.0)
        claims = here.claim_all([item], wait_seconds=5.0, timeout=10.0)
        assert claims.state is ClaimOutcome.FAILED
        _, claims = here.prefetch_and_claim([item], wait_seconds=5.0, timeout=10.0)
        wait_until(lambda: claims.state is ClaimOutcome.FAILED, 5.0)
        assert there.claim(item, lease_seconds=1.0).outcome is ClaimOutcome.GRANTED
        assert there.has_caches([item]) == [False]
        taken = there.drop_select(passing, timeout=5.0)
        assert taken is not None
        assert torch.equal(taken, tensor_of("passing", 1000))
    assert reader.stats().get("inserts_stored", 0) == 0


REQUESTS: dict[str, messages.Request] = {
    "insert": messages.Insert(2, SPACE, ["k"], [{}], [0], None, 0.0),
    "take": messages.Take(2, SPACE, "k@request", 0.0),
    "claim": messages.Claim(2, SPACE, "k", 5.0, "intent", 0.0),
    "encoding": messages.Encoding(2, SPACE, ["k"], 5.0),
    "open_pool": messages.OpenPool(2, "gloo", "0" * 8, 7000, "0" * 12, MIB, True, True),
    "prepare": messages.Prepare(2, SPACE, "k", 1),
    "offer": messages.Offer(2, SPACE, "k", 1, 1),
}


def test_each_change_is_tried() -> None:
    assert REQUESTS.keys() == {kind.op for kind in messages.CHANGES}


@pytest.mark.parametrize("op", REQUESTS)
def test_each_request_that_changes_something_is_refused(reader: NodeProcess, op: str) -> None:
    with raw(reader) as client:
        answer = client.ask(REQUESTS[op])
        assert (answer["error"], op in answer["message"]) == ("ReadOnly", True)


def test_a_client_that_means_to_write_is_told_at_once(
    reader: NodeProcess, writer: NodeProcess
) -> None:
    for node in (reader, writer):
        with raw(node, session=False) as client:
            has = node.config.read_only
            expects = {**node.config.expectations(), "read_only": not has}
            answer = client.hello(expects=expects)
            assert f"read_only = {has}, but this configuration has {not has}" in answer["message"]


# -- its certificate


def test_other_nodes_give_it_tensors_and_no_hand_off(
    writer: NodeProcess, certified: Files, valkey_server: EmbeddedServer
) -> None:
    """Who has the certificate and the key of a reader, and needs no node of ours."""
    with open_store(valkey_server.url) as store:
        wait_until(lambda: store.node_infos(["writer"]), 10.0)
        info = store.node_infos(["writer"])["writer"]

    async def dialled(role: str, *, reader: bool) -> None:
        name = "reader" if reader else "honest"
        credentials = Credentials(None, certified.tls(name, reader=reader))
        location, loop = Location("writer", info.boot, 1, 1), asyncio.get_running_loop()
        link = await dial(loop, location, info.endpoint, role, credentials)
        link.stream.close()

    for role, is_reader in ((TENSORS, True), (TENSORS, False), (HANDOFFS, False)):
        asyncio.run(dialled(role, reader=is_reader))
    with pytest.raises(NodeRefused, match="a node that only reads, and this connection is for ha"):
        asyncio.run(dialled(HANDOFFS, reader=True))


def stored_in(bench: Bench, name: str, data: bytes) -> Location:
    header = TensorHeader.for_tensor("uint8", (len(data),))
    item = bench.arena.reserve((SPACE, name), header, origin="local", ttl_seconds=None)
    assert item is not None
    bench.arena.bytes_of(item)[:] = data
    checksum = xxhash.xxh3_64_intdigest(data)
    bench.arena.release([bench.arena.commit(item, checksum, owner=1).ticket], 1)
    identity = bench.server.identity
    return Location(identity.node, identity.boot, item.generation, checksum)


@pytest.mark.parametrize("is_reader", [True, False])
def test_no_node_takes_bytes_from_it(
    writer: NodeProcess, certified: Files, valkey_server: EmbeddedServer, is_reader: bool
) -> None:
    """A reader that got hold of Redis too says that it holds a key. The control is a node that may
    store: its bytes are believed, since a node is trusted with that."""
    node, name, forged = "forger" if is_reader else "honest", key(), b"forged" * 100

    def select(client: LookupBuffer) -> bytes:
        """What a client gets, or why it gets nothing."""
        try:
            found = client.select(name)
        except MissingTensor as error:
            return str(error).encode()
        assert found is not None
        return bytes(found.tolist())

    def attack(identity: Identity, at: Location) -> None:
        with open_store(valkey_server.url, call_timeout_seconds=5.0) as store:
            info = NodeInfo(node, identity.boot, identity.endpoint, "h", "1", 1, 0, 1)
            record = Record(SPACE, name.text, "uint8", (len(forged),), len(forged), "tensor", 1.0)
            with beating(store, node), writer.client() as client:
                store.describe_node(info)
                store.publish(record, at, ttl_seconds=60)
                expected = b"peer_failed" if is_reader else forged
                wait_until(lambda: expected in select(client), 10.0)
                assert (forged in select(client)) != is_reader
            store.leave(node, identity.boot)

    async def test(bench: Bench) -> None:
        bench.server.identity = Identity(node, boot_of(node), bench.endpoint)
        at = stored_in(bench, name.text, forged)
        await asyncio.to_thread(attack, bench.server.identity, at)

    on_a_loop(test, Credentials(None, certified.tls(node, reader=is_reader)))


@pytest.mark.parametrize(
    ("of_reader", "reads_only", "reason"),
    [
        (True, False, f"with the URI name '{READER}'; allowed: set 'read_only'"),
        (False, True, f"with no URI name '{READER}'; allowed: one with it"),
    ],
)
def test_certificate_and_setting_have_to_agree(
    certified: Files, of_reader: bool, reads_only: bool, reason: str
) -> None:
    files = certified.of("either", reader=of_reader)
    with pytest.raises(ConfigError, match=reason):
        Tls(files, "either", read_only=reads_only)


def test_the_embedded_store_has_nothing_to_read() -> None:
    with pytest.raises(ConfigError, match="'read_only' is set, and 'store_url' is 'embedded'"):
        BufferConfig.of({"read_only": True})


# -- its user of Redis


def test_the_documented_user_cannot_write(readers_url: str, writer: NodeProcess) -> None:
    name, _ = stored_by(writer)
    record = Record(SPACE, name.text, "uint8", (10,), 10, "tensor", 1.0)
    at = Location("reader", "boot", 1, 1)
    with open_store(readers_url, call_timeout_seconds=5.0) as store:
        wait_until(lambda: store.locate(SPACE, [name.text]) != [None], 10.0)  # the control
        attempts: list[Any] = [
            lambda: store.publish(record, at, ttl_seconds=60),
            lambda: store.withdraw(SPACE, name.text, "writer", reason="evicted"),
            lambda: store.beat("reader", "boot", 1),
            lambda: store.leave("writer", "boot"),
            lambda: store.describe_node(
                NodeInfo("writer", "boot", "tcp://1.2.3.4:5", "h", "1", 1, 0, 1)
            ),
            lambda: store.describe_namespace(SPACE, {"a": "b"}),
            lambda: store.add_hits(SPACE, {name.text: 1}),
            lambda: store.add_stats("writer", {"hits_local": 1}),
            lambda: store.mark_invalid(SPACE, a_mark()),
            lambda: store.clear(SPACE),
            lambda: store.claim(
                SPACE,
                "k",
                holder="reader:boot",
                token="t",
                state=ClaimState.INTENT,
                lease_seconds=1,
            ),
        ]
        for attempt in attempts:
            with pytest.raises(StoreError, match="permission"):
                attempt()
        assert store.locate(SPACE, [name.text]) != [None]


@pytest.mark.parametrize("rights", ["+@write", "+hset +evalsha"])
def test_doctor_names_what_a_readers_user_may_write(
    reader: NodeProcess, valkey_server: EmbeddedServer, rights: str
) -> None:
    url, name = valkey_server.url, "half-a-reader"
    rule = ("on", ">of-half", "resetkeys", "~lb:*", "resetchannels", "-@all", "+@read")
    given = (*rule, "+@connection", "-@dangerous", "+info", *rights.split())
    assert command(url, "ACL", "SETUSER", name, *given) == b"+OK"
    try:
        done = run(
            "doctor",
            LOOKUP_BUFFER_STORE_URL=f"unix://{name}:of-half@{url.removeprefix('unix://')}",
            LOOKUP_BUFFER_READ_ONLY="true",
            LOOKUP_BUFFER_DIRECTORY=str(reader.config.directory),
        )
    finally:
        command(url, "ACL", "DELUSER", name)
    (line,) = [line for line in done.stdout.splitlines() if "store rights" in line]
    assert line.startswith("warn")
    assert "may do more than read: HSET" in line


# -- what it can do to the nodes that serve it


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that waits for readers however slow they are. A busy machine takes as long to make
    their connections as a node waits for one that reads nothing."""
    monkeypatch.setattr(peers, "PEER_PROGRESS_SECONDS", 600.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("names", [["slow"], ["slow", "slower"]], ids=["one name", "two names"])
def test_it_fills_only_its_own_places(certified: Files, names: list[str]) -> None:
    """It asks on many connections and reads none of them, by each name of its certificate."""
    own = [UniformResourceIdentifier(READER), *map(DNSName, names)]
    files = certified.named(names[-1], *own)

    async def test(bench: Bench) -> None:
        generation, links = bench.insert("k", 8 * MIB), []

        async def ask(tls: Tls) -> None:
            credentials = Credentials(None, tls)
            link = await dial(bench.loop, bench.location, bench.endpoint, TENSORS, credentials)
            links.append(link.framed())
            item = [NAMESPACE, "k", bench.location.boot, generation]
            await asyncio.to_thread(links[-1].send, {"op": "get", "items": [item]}, timeout=5.0)

        try:
            for number in range(LINKS_PER_CLIENT + 4):
                with suppress(PipeError):  # its place was refused meanwhile
                    await ask(Tls(files, names[number % len(names)], read_only=True))
            await until(lambda: len(bench.server._readers) == LINKS_PER_CLIENT)
            await ask(certified.tls("another"))
            answer = await asyncio.to_thread(links[-1].recv_header, timeout=5.0)
            assert answer.header["status"] == "ok"
            assert len(bench.server._readers) == LINKS_PER_CLIENT + 1
        finally:
            for link in links:
                link.abort()

    on_a_loop(test, Credentials(None, certified.tls("node-b")))


@pytest.mark.usefixtures("patient")
def test_many_that_read_slowly_delay_no_other_node(certified: Files) -> None:
    """As many connections as there are threads, by several certificates. They read nothing."""

    async def test(bench: Bench) -> None:
        item = [NAMESPACE, "k", bench.location.boot, bench.insert("k", 8 * MIB)]

        async def dialled(tls: Tls) -> FramedSocket:
            credentials = Credentials(None, tls)
            link = await dial(bench.loop, bench.location, bench.endpoint, TENSORS, credentials)
            return stack.enter_context(closing(link.framed()))

        with ExitStack() as stack:
            slow = []
            for number in range(SENDERS_MAX // LINKS_PER_CLIENT):
                tls = certified.tls(f"slow-{number}", reader=True)
                slow += [await dialled(tls) for _ in range(LINKS_PER_CLIENT)]
            for link in slow:
                await asyncio.to_thread(link.send, {"op": "get", "items": [item]}, timeout=5.0)
            await until(lambda: bench.pins() == len(slow))
            other = await dialled(certified.tls("another"))
            (answer,) = await answered(other, item)
            assert answer["status"] == "ok"
            for link in slow[:-1]:
                link.abort()
            header, nbytes = await asyncio.to_thread(slow[-1].recv_header, scaled(5.0))
            data = memoryview(bytearray(nbytes))
            await asyncio.to_thread(slow[-1].recv_into, data, timeout=scaled(5.0))
            assert (header["status"], nbytes) == ("ok", 8 * MIB), "its turn has come"
            await until(lambda: bench.pins() == 0)

    on_a_loop(test, Credentials(None, certified.tls("node-b")))


def test_what_it_asks_for_ahead_is_bounded(certified: Files) -> None:
    """A request may have 1 MiB: its items are long names of nothing. It reads no answer, so the
    first request stays in work."""
    name = "k" * 4_000

    async def test(bench: Bench) -> None:
        credentials = Credentials(None, certified.tls("slow", reader=True))
        link = await dial(bench.loop, bench.location, bench.endpoint, TENSORS, credentials)
        big = [NAMESPACE, "k", bench.location.boot, bench.insert("k", 8 * MIB)]
        with link.framed() as framed:

            async def ask(*items: list[object]) -> None:
                await asyncio.to_thread(framed.send, {"op": "get", "items": items}, timeout=5.0)

            await ask(big, *[[NAMESPACE, name, "boot", 1]] * (ITEMS_MAX - 1))
            await until(lambda: bench.pins() == 1)
            (asker,) = bench.server._readers
            await ask(*[[NAMESPACE, name, "boot", 1]] * ITEMS_MAX)
            await until(lambda: len(asker._requests) == 1)
            assert bench.askers.pending._used < 2.5 * MIB
            await ask([NAMESPACE, name, "boot", 1])
            await until(lambda: not bench.server._readers)
            assert bench.counters._totals["protocol_errors"] == 1

    on_a_loop(test, Credentials(None, certified.tls("node-b")))


def test_it_takes_no_places_from_others_that_look_whether_they_reach_a_node(
    certified: Files,
) -> None:
    async def test(bench: Bench) -> None:
        links = []

        async def look(client: str, *, reader: bool) -> FramedSocket:
            credentials = Credentials(None, certified.tls(client, reader=reader))
            link = await dial(bench.loop, bench.location, bench.endpoint, REACHABILITY, credentials)
            links.append(link.framed())
            return links[-1]

        try:
            for _ in range(LINKS_MAX):
                await look("hoarder", reader=True)
            await until(lambda: len(bench.reachability._links) == LINKS_MAX)
            asked = await look("another", reader=False)
            request = {"id": 1, "op": "exchange", "data": b""}
            await asyncio.to_thread(asked.send, request, timeout=5.0)
            answer = await asyncio.to_thread(asked.recv_header, timeout=5.0)
            assert answer.header == {"id": 1}
            one_more = await look("hoarder", reader=True)
            with pytest.raises(PipeError):
                await asyncio.to_thread(one_more.recv_header, timeout=5.0)
            assert len(bench.reachability._links) == LINKS_MAX
        finally:
            for link in links:
                link.abort()

    on_a_loop(test, Credentials(None, certified.tls("node-b")))


def test_it_sends_no_larger_requests_than_it_needs_to_look_whether_it_reaches_a_node(
    certified: Files,
) -> None:
    """Large headers on all of its connections at once held the loop for many seconds."""

    async def test(bench: Bench) -> None:
        credentials = Credentials(None, certified.tls("reader", reader=True))
        dialled = await dial(bench.loop, bench.location, bench.endpoint, REACHABILITY, credentials)
        with closing(dialled.stream):
            await until(lambda: bench.reachability._links)
            request = {"id": 1, "op": "exchange", "data": bytes(2 * EXCHANGED_BYTES)}
            dialled.stream.send(encode_frame(request)[:1000])  # the rest need not come
            await until(lambda: not bench.reachability._links)
        assert bench.counters._totals["protocol_errors"] == 1

    on_a_loop(test, Credentials(None, certified.tls("node-b")))


def test_answers_on_all_of_its_connections_together_do_not_hold_the_loop(
    certified: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = PeerServer._reply

    def slow_reply(server: PeerServer, asked: Asked) -> Reply:
        time.sleep(0.001)
        return reply(server, asked)

    async def test(bench: Bench) -> None:
        credentials = Credentials(None, certified.tls("reader", reader=True))
        monkeypatch.setattr(PeerServer, "_reply", slow_reply)
        absent = [NAMESPACE, "absent", "boot", 1]
        with ExitStack() as stack:
            links = []
            for _ in range(LINKS_PER_CLIENT):
                made = await dial(bench.loop, bench.location, bench.endpoint, TENSORS, credentials)
                links.append(stack.enter_context(closing(made.framed())))
            for link in links:
                link.send({"op": "get", "items": [absent] * ITEMS_MAX}, timeout=5.0)

            def receive() -> None:
                for link in links:
                    for _ in range(ITEMS_MAX):
                        assert link.recv_header(timeout=scaled(10.0)).header == {"status": "stale"}

            answered, turns = asyncio.create_task(asyncio.to_thread(receive)), [bench.loop.time()]
            while not answered.done():
                await asyncio.sleep(0)
                turns.append(bench.loop.time())
            await answered
        longest = max(later - earlier for earlier, later in pairwise(turns))
        assert longest < (turns[-1] - turns[0]) / 4

    on_a_loop(test, Credentials(None, certified.tls("node-b")))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(scaled(10.0)):
        while not condition():
            await asyncio.sleep(0.01)


def test_replies_that_a_reader_does_not_read_evict_no_record(tmp_path: Path) -> None:
    """On a server as shipped. They count as its memory, and it would evict all records for them."""
    port, records = free_port(), 20_000
    options = [str(ROOT / "deploy/valkey/valkey.conf"), "--port", str(port), "--bind", "127.0.0.1"]
    server = ServerProcess(valkey_executable(), tmp_path / "kv", port, options)
    try:
        with closing(Redis(port=port)) as admin:
            admin.execute_command("ACL", "SETUSER", USER, *user_rule(PASSWORD, USER))
            fields: dict[Any, Any] = {"kind": "tensor", "at:node": "boot:1:1", "shape": "x" * 60}
            for start in range(0, records, 1000):
                with admin.pipeline(transaction=False) as pipeline:
                    for number in range(start, start + 1000):
                        pipeline.hset(f"lb:rec:{number}", mapping=fields)
                        pipeline.expire(f"lb:rec:{number}", 1800)
                    pipeline.execute()
            with socket.create_connection(("127.0.0.1", port)) as reader:
                reader.settimeout(scaled(5.0))
                reader.sendall(f"AUTH {USER} {PASSWORD}\r\n".encode())
                with suppress(ConnectionError):
                    for _ in range(60):
                        reader.sendall(b"SCAN 0 COUNT 1000000\r\n" * 20)
            assert admin.dbsize() == records
            assert admin.info("stats")["evicted_keys"] == 0
    finally:
        server.kill()
