"""Who can write Redis, or sits between two nodes, and has no token."""

import asyncio
import dataclasses
import itertools
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from awaited import awaited
from command_line import beating, boot_of, publish, run, run_json
from connectors.settings import parse_settings
from lookup_buffer.config import parse_tcp
from lookup_buffer.dashboard.fleet import FleetSampler, PageUpdate
from lookup_buffer.device.lane import DeviceLane
from lookup_buffer.errors import ConfigError, MissingTensor, NodeRefused, PipeError
from lookup_buffer.inspection.history import Sample
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import COUNTERS, ENCODE_MILLISECONDS, ENCODES
from lookup_buffer.node.invalidations import Invalidations
from lookup_buffer.node.items import Item
from lookup_buffer.node.links import HANDOFFS, TENSORS, dial
from lookup_buffer.protocol.auth import Purpose, connect
from lookup_buffer.protocol.framing import encode_frame
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket
from memory_store import MemoryStore
from nodes import MIB, NodeProcess, StartNode, handoff, key, tensor_of, wait_until, with_store
from patience import scaled
from peer_servers import NAMESPACE, TOKEN, WITH_TOKEN, Bench, answered, on_a_loop
from proxies import Relay
from servers import StartServer, command, redis_executable, user_rule, valkey_executable
from store import (
    COUNTER_MAX,
    LOCATIONS_MAX,
    NODES_MAX,
    BrowsableStore,
    EmbeddedServer,
    layout,
    open_async_store,
    open_store,
)
from store.record_fields import read_record
from store.testing.samples import a_mark
from store.trace import HOTTEST_CHARACTERS_MAX

ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def relay(endpoint: str, forged: list[bytes]) -> AsyncIterator[str]:
    """An attacker who passes all bytes on, and then adds `forged` ones to those of the client."""
    loop, host_port = asyncio.get_running_loop(), parse_tcp(endpoint)

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*host_port)
        back = loop.create_task(pump(far_reader, writer))
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                far_writer.write(data)
                for one in forged[:] if b"items" in data else []:
                    far_writer.write(one)
        back.cancel()
        writer.close()
        far_writer.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"tcp://127.0.0.1:{port}"


@contextmanager
def forging(store_url: str, forged: dict[tuple[str, str], str]) -> Iterator[None]:
    """Write these fields of hashes in Redis again and again, faster than the nodes theirs."""
    over = threading.Event()

    def write() -> None:
        while not over.wait(0.01):
            for (name, field), value in forged.items():
                command(store_url, "HSET", name, field, value)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def why_missed(node: NodeProcess, name: TensorKey) -> str:
    """Empty if it gave the true tensor."""
    with node.client() as client:
        try:
            tensor = client.select(name)
        except MissingTensor as missing:
            return str(missing)
    assert tensor is not None
    assert torch.equal(tensor, tensor_of("true", 1000))
    return ""


def served(nodes: list[NodeProcess]) -> int:
    return sum(node.stats().get("bytes_served", 0) for node in nodes)


def test_a_forged_address_of_a_node_leads_to_no_tensor(
    start_node: StartNode, start_server: StartServer
) -> None:
    """The attacker makes node A dial him, passes its handshake on to node B, and would then ask B
    for tensors, and give A other ones."""
    url, attacker, name = start_server().url, Relay(), key()
    b = start_node(node_id="b", store_url=url, token=TOKEN)
    with_store(b)
    with b.client() as client:
        client.insert(name, tensor_of("true", 1000))
    with open_store(url) as store:
        wait_until(lambda: store.node_infos(["b"]), 10.0)
        true = store.node_infos(["b"])["b"].endpoint
    attacker.connect_to(parse_tcp(true)[1])
    try:
        nodes, reason = [b], ""
        with forging(url, {("lb:node:b", "endpoint"): f"tcp://127.0.0.1:{attacker.port}"}):
            while attacker.connections == 0 and len(nodes) < 10:
                nodes.append(start_node(store_url=url, token=TOKEN))
                wait_until(lambda: nodes[-1].stats()["nodes_alive"] == len(nodes), 10.0)
                reason = why_missed(nodes[-1], name)
            assert attacker.connections > 0, "the attack took place"
            assert "peer_failed" in reason
            with nodes[-1].client() as client, pytest.raises(MissingTensor):
                client.drop_select(handoff(), timeout=0.0)
        assert served(nodes) == 1000 * (len(nodes) - 2), "only to those that were not misled"
    finally:
        attacker.close()
    command(url, "HSET", "lb:node:b", "endpoint", true)
    honest = start_node(node_id="c", store_url=url, token=TOKEN)
    wait_until(lambda: honest.stats()["nodes_alive"] == len(nodes) + 1, 10.0)
    with honest.client() as client:
        tensor = client.select(name, timeout=10.0)
        assert tensor is not None
        assert torch.equal(tensor, tensor_of("true", 1000))
    assert served(nodes) == 1000 * (len(nodes) - 1)


def test_a_forged_holder_without_the_token_gives_no_tensor(
    start_node: StartNode, start_server: StartServer
) -> None:
    """The attacker adds a node of his own to the fleet, and to the record. He passes handshakes on
    to a real node."""
    url, attacker, name = start_server().url, Relay(), key()
    b = start_node(node_id="b", store_url=url, token=TOKEN)
    a = start_node(node_id="a", store_url=url, token=TOKEN)
    with open_store(url) as store:
        wait_until(lambda: store.node_infos(["b"]), 10.0)
        info = store.node_infos(["b"])["b"]
        attacker.connect_to(parse_tcp(info.endpoint)[1])
        endpoint = f"tcp://127.0.0.1:{attacker.port}"
        mine = dataclasses.replace(info, node="mallory", boot=boot_of("mallory"), endpoint=endpoint)
        store.describe_node(mine)
        namespace = Namespace.named("tests").fingerprint
        with beating(store, "mallory"):
            publish(store, namespace, str(name), "mallory", shape=(10, 10))
            wait_until(lambda: a.stats()["nodes_alive"] == 3, 10.0)
            with a.client() as client, pytest.raises(MissingTensor, match="peer_failed"):
                client.select(name)
    assert attacker.connections > 0, "the attack took place"
    attacker.close()
    assert b.stats().get("bytes_served", 0) == 0


def test_a_handshake_that_is_passed_on_is_refused() -> None:
    """Who can write Redis makes a node dial him; he cannot use its proof for another node."""

    async def test(bench: Bench) -> None:
        async with relay(bench.endpoint, []) as forged_location:
            for role in (TENSORS, HANDOFFS):
                with pytest.raises(NodeRefused, match="node node-b listens here"):
                    await dial(bench.loop, bench.location, forged_location, role, WITH_TOKEN)
        assert not bench.server._readers
        assert not bench.askers

    on_a_loop(test)


@pytest.mark.parametrize("is_passed_on", [True, False])
def test_nor_is_that_of_a_worker_for_the_pool_of_another_one(*, is_passed_on: bool) -> None:
    """By a record or a description of a node he makes a worker dial him. The control is a worker
    that dials the pool itself."""
    said: list[object] = []

    def pass_on() -> None:
        with (
            FramedSocket(listener.accept()[0]) as worker,
            FramedSocket(socket.create_connection(("127.0.0.1", pool.port))) as far,
        ):
            for one, other in ((worker, far), (far, worker), (worker, far)):
                other.send(one.recv_header(5.0).header, timeout=5.0)
            said.extend(far.recv_header(5.0).header)  # else he goes on as that worker

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(DeviceLane("gloo", pool_bytes=MIB, token=TOKEN)) as pool,
        closing(DeviceLane("gloo", pool_bytes=MIB, token=TOKEN)) as worker,
    ):
        port = listener.getsockname()[1] if is_passed_on else pool.port
        seen = ["127.0.0.1", "gloo", worker.version.library, port, pool.id]
        attack = threading.Thread(target=pass_on)
        if is_passed_on:
            attack.start()
        worker.on_event({"event": "pools", "there": [seen], "gone": []})
        if is_passed_on:
            attack.join()
            assert said == ["refused", f"a lane listens here, at 127.0.0.1 {pool.port}"]
        wait_until(lambda: worker.pairs() == pool.pairs() == (0 if is_passed_on else 1), 10.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_a_pool_listens_at_no_address_that_other_hosts_have_too(host: str) -> None:
    """At 127.0.0.1 of two hosts he could pass on what a worker says to him at the first one."""
    with pytest.raises(ConfigError, match="one address of this host"):
        DeviceLane("gloo", pool_bytes=MIB, host=host, token=TOKEN)


@pytest.mark.parametrize(
    ("listen", "lane_host"), [("tcp://0.0.0.0:7", "192.0.2.1"), ("tcp://192.0.2.2:7", "192.0.2.2")]
)
def test_nor_do_those_of_workers(tmp_path: Path, listen: str, lane_host: str) -> None:
    settings = {"listen": listen, "advertise": "tcp://192.0.2.1:7", "device_lane": "gloo"}
    token = tmp_path / "token"
    token.write_text(TOKEN)
    assert parse_settings({**settings, "token_file": str(token)}).lane_host == lane_host


@pytest.mark.parametrize(
    ("purpose", "reason"),
    [
        (Purpose("tensors", "", "another-node"), "node node-b listens here"),
        (Purpose("handoffs", "", "node-b", "another boot"), "started again"),
        (Purpose("pipe", "", "node-b"), "a node listens here"),
    ],
)
def test_who_expects_another_end_is_refused(purpose: Purpose, reason: str) -> None:
    async def test(bench: Bench) -> None:
        meant = purpose._replace(endpoint=bench.endpoint)
        with pytest.raises(NodeRefused, match=reason):
            await asyncio.to_thread(
                connect, *parse_tcp(bench.endpoint), token=TOKEN, timeout=5.0, purpose=meant
            )

    on_a_loop(test)


def test_a_request_that_is_injected_ends_the_connection() -> None:
    """An attacker on the path passes the handshake on unchanged, since the address is the right
    one, and then asks for tensors himself."""

    async def test(bench: Bench) -> None:
        item = [NAMESPACE, "k", "boot", bench.insert("k", 100)]
        own = encode_frame({"op": "get", "items": [item]})
        async with relay(bench.endpoint, [own]) as address:
            purpose = Purpose("tensors", bench.endpoint, "node-b")
            link = await asyncio.to_thread(
                connect, *parse_tcp(address), token=TOKEN, timeout=5.0, purpose=purpose
            )
            with suppress(PipeError):
                await answered(link, item, item)
            await bench.until(lambda: bench.counters.totals().get("protocol_errors") == 1)
            await bench.until(lambda: not bench.server._readers and bench.pins() == 0)
            link.abort()

    on_a_loop(test)


def hash_set(url: str, name: str, fields: dict[str, str]) -> None:
    flat = [text for pair in fields.items() for text in pair]
    for start in range(0, len(flat), 10_000):
        command(url, "HSET", name, *flat[start : start + 10_000])


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


def test_huge_records_are_misses_and_are_not_kept(
    start_node: StartNode, start_server: StartServer
) -> None:
    url, huge = start_server().url, "A" * (40 * MIB)
    node = start_node(store_url=url)
    with_store(node)
    before = resident_bytes(node.pid)
    with node.client() as client:
        for number in range(4):
            name = key()
            record = layout.record(Namespace.named("tests").fingerprint, str(name))
            fields = {"v": "1", "shape": "[1]", "nbytes": "4", "kind": "tensor", "created": "1"}
            hash_set(url, record, fields | {"dtype": huge, "at:ghost": f"b{number}:1:{1:016x}"})
            with pytest.raises(MissingTensor, match="absent"):
                client.select(name)
            command(url, "DEL", record)
    wait_until(lambda: resident_bytes(node.pid) < before + 100 * MIB, 10.0)


def test_of_many_locations_readers_keep_as_many_as_nodes_write() -> None:
    """A reader tries each, and its mirror keeps them."""
    fields = {b"v": b"1", b"dtype": b"uint8", b"shape": b"[1]", b"nbytes": b"1", b"kind": b"tensor"}
    for number in range(40):
        fields[b"at:n%d" % number] = b"boot:1:%016x" % number
    for number in range(10):
        fields[b"on:n%d" % number] = b"1:gloo:00000000:1:000000000000"
    record = read_record("a" * 64, "k", fields | {b"created": b"1"})
    assert record is not None
    assert [at.node for at in record.locations] == ["n0", "n1", "n2", "n3"]
    assert len(record.locations) == len(record.devices) == LOCATIONS_MAX


def describe(url: str, node: str, *, sequence: int = 1, **described: str) -> None:
    """Write a description and a beat of a node, as its boot would."""
    others = dict.fromkeys(("version", "capacity", "used", "items"), "1")
    hash_set(url, f"lb:node:{node}", described | others)
    hash_set(url, "lb:nodes", {node: f"{described['boot']}:{sequence}"})


def test_huge_descriptions_of_nodes_are_not_kept(
    start_node: StartNode, start_server: StartServer
) -> None:
    url, huge = start_server().url, "A" * (40 * MIB)
    node = start_node(store_url=url)
    with_store(node)
    before = resident_bytes(node.pid)
    for number in range(4):
        describe(url, f"ghost-{number}", boot=boot_of("g"), endpoint=huge, host="h")
        wait_until(lambda: node.stats()["nodes_alive"] == 2, 30.0, "it has read the description")
        command(url, "DEL", f"lb:node:ghost-{number}")
        command(url, "HDEL", "lb:nodes", f"ghost-{number}")
        wait_until(lambda: node.stats()["nodes_alive"] == 1, 30.0)
    wait_until(lambda: resident_bytes(node.pid) < before + 100 * MIB, 10.0)


def test_a_node_takes_no_more_nodes_than_a_bound(
    start_node: StartNode, start_server: StartServer
) -> None:
    url = start_server().url
    node = start_node(store_url=url)
    with_store(node)
    hash_set(url, "lb:nodes", {f"ghost-{n}": f"{boot_of('g')}:1" for n in range(2 * NODES_MAX)})
    wait_until(lambda: "others are ignored" in node.log_text(), 30.0)
    assert node.stats()["nodes_alive"] <= NODES_MAX
    command(url, "DEL", "lb:nodes")
    wait_until(lambda: node.stats()["nodes_alive"] == 1, 90.0)


def test_what_a_node_says_when_its_id_is_taken_is_one_line_of_its_log(
    start_node: StartNode, start_server: StartServer
) -> None:
    """By beats under its id he ends it, and it quotes what he says of the other node."""
    url = start_server().url
    node = start_node(store_url=url)
    with_store(node)
    evil, sequences = {"boot": "evil", "host": "h\nforged \x1b[31m"}, itertools.count()

    def ended() -> bool:
        describe(url, node.node_id, sequence=next(sequences), endpoint="tcp://x:1", **evil)
        return "took this id over" in node.log_text()

    wait_until(ended, 30.0)
    (line,) = [line for line in node.log_text().splitlines() if "boot evil" in line]
    assert r"on host h\nforged \x1b[31m took this id over" in line


class CountingArena(Arena):
    walks = 0

    def items_of(
        self, namespaces: Container[str] | None, *, fetched_only: bool = False
    ) -> list[Item]:
        self.walks += 1
        return super().items_of(namespaces, fetched_only=fetched_only)


def test_any_number_of_invalidations_costs_few_walks_over_the_items_of_a_node() -> None:
    arena, store = CountingArena(MIB, lambda *_: None), MemoryStore()
    for number in range(1000):
        store.mark_invalid(f"{number}", a_mark())
        header = TensorHeader("uint8", (1,), 1)
        item = arena.reserve((f"{number}", "k"), header, origin="local", ttl_seconds=None)
        assert item is not None
        arena.release([arena.commit(item, 1, 1).ticket], 1)

    async def applied() -> None:
        invalidations = Invalidations(asyncio.get_running_loop(), arena, lambda: 0.0)
        await invalidations.apply(awaited(store))
        await invalidations.apply(awaited(store))
        while arena.addresses():
            await asyncio.sleep(0)

    try:
        asyncio.run(applied())
    finally:
        arena.close()
    assert arena.walks <= 3


FAR_FUTURE = "0123456789abcdef:999999999999"


def test_no_mark_keeps_the_operator_from_removing_tensors(
    start_server: StartServer, start_node: StartNode
) -> None:
    """Not one of a far future, nor one that is no mark, in the store or removed from it again."""
    url, space = start_server().url, Namespace.named("tests").fingerprint
    node = start_node(store_url=url)
    wait_until(lambda: node.stats()["store_up"], 10.0)

    def is_removed_by_the_operator() -> bool:
        name = key()
        client.insert(name, tensor_of("wrong", 1000))
        done = run("invalidate", space, "--store-url", url)
        assert (done.returncode, done.stderr) == (0, "")
        wait_until(lambda: not client.has_caches([name])[0], 10.0)
        return True

    with node.client() as client:
        for forged in (FAR_FUTURE, "1e300", "nan", ""):
            name = key()
            client.insert(name, tensor_of("x", 1000))
            command(url, "HSET", layout.INVALID, space, forged)
            if forged == FAR_FUTURE:  # he can remove what is there, once
                wait_until(lambda: not client.has_caches([name])[0], 10.0)  # noqa: B023
            assert is_removed_by_the_operator()
            command(url, "HDEL", layout.INVALID, space)
            assert is_removed_by_the_operator()


def test_a_description_leads_no_invalidation_to_another_namespace(
    start_server: StartServer,
) -> None:
    """`invalidate` of a whole fingerprint took the only described namespace that began with it."""
    url, space = start_server().url, "ab" * 32
    command(url, "HSET", layout.namespace(f"{space}0"), "a", "b")
    assert run_json("invalidate", space, "--store-url", url)["namespace"] == space


def test_counters_have_names_of_counters() -> None:
    """`top` shows the reasons of misses, and the dashboard keeps a minute of them."""
    hostile = [b"misses_\x1b]0;title\x07", b"misses_\xe2\x80\xae", b"x" * 65, b"", b"A"]
    assert layout.read_counters({**dict.fromkeys(hostile, b"7"), b"misses_absent": b"3"}) == {
        "misses_absent": 3
    }
    assert len(layout.read_counters({b"c%d" % n: b"1" for n in range(5000)})) == 512


def test_what_many_nodes_counted_to_the_most_is_shown(start_server: StartServer) -> None:
    """Their sums are above what 64 bits hold."""
    url, nodes = start_server().url, [f"n{number}" for number in range(20)]
    names = (*COUNTERS, ENCODES, ENCODE_MILLISECONDS)
    most = [text for name in names for text in (name, str(COUNTER_MAX))]
    for node in nodes:
        command(url, "HSET", layout.NODES, node, "boot:1")
        command(url, "HSET", layout.stats(node), *most)
    totals = run_json("stats", "--store-url", url)["totals"]
    assert totals["hits_local"] == len(nodes) * COUNTER_MAX
    for shown in ("stats", "top"):
        done = run(shown, "--store-url", url)
        assert (done.returncode, done.stderr) == (0, ""), shown

    async def sampled() -> PageUpdate:
        async with open_async_store(url, call_timeout_seconds=5.0) as store:
            assert isinstance(store, BrowsableStore)
            sampler = FleetSampler(store)
            await sampler.sample()
            return await sampler.sample()

    update = asyncio.run(sampled())
    assert json.loads(json.dumps(update.now))["hits"] == 3 * len(nodes) * COUNTER_MAX
    assert update.point is not None


def test_namespaces_without_number_leave_the_page_as_it_is(start_server: StartServer) -> None:
    """Of a client, too: with the longest keys in 300 of them a minute of samples took 1.5 GiB, and
    with 600 the reply was larger than a server sends."""
    url = start_server().url
    spaces, honest = [f"{number:064x}" for number in range(300)], "f" * 64
    with open_store(url) as store:
        for space in (*spaces, honest):
            store.describe_namespace(space, {"a": "b"})
    for space in spaces:
        keys = [text for n in range(20) for text in (str(n + 1), f"{n:0>4000}")]
        command(url, "ZADD", layout.hits(space), *keys)
    command(url, "ZADD", layout.hits(honest), "1000", "hot")

    async def sampled() -> list[Sample]:
        async with open_async_store(url, call_timeout_seconds=5.0) as store:
            assert isinstance(store, BrowsableStore)
            sampler = FleetSampler(store)
            async with asyncio.timeout(scaled(20.0)):
                while not sampler._spaces:
                    await sampler.sample()
            for _ in range(10):  # each namespace has had its turn
                update = await sampler.sample()
            assert update.now["hottest"][0]["key"] == "hot"
            return list(sampler._samples)[-3:]

    names = [name for one in asyncio.run(sampled()) for address in one.hits for name in address]
    assert sum(map(len, names)) <= 3 * HOTTEST_CHARACTERS_MAX
    assert sum(map(len, {id(name): name for name in names}.values())) < 2 * HOTTEST_CHARACTERS_MAX


# -- a server that others use, too


OTHERS: list[tuple[str, ...]] = [
    ("GET", "other"), ("SET", "other", "x"), ("EVAL", "return 1", "1", "other"),
    ("FUNCTION", "LOAD", "REPLACE", "#!lua name=a"), ("FUNCTION", "DELETE", "a"),
    ("FUNCTION", "FLUSH"), ("FUNCTION", "RESTORE", "x"), ("FCALL", "f", "0"), ("SCRIPT", "FLUSH"),
    ("SCRIPT", "KILL"), ("FLUSHALL",), ("SWAPDB", "0", "1"), ("CONFIG", "SET", "maxmemory", "1"),
    ("ACL", "LIST"), ("PUBLISH", "other", "x"), ("SUBSCRIBE", "other"), ("MONITOR",),
]  # fmt: skip


def test_the_documented_user_can_change_nothing_of_others(valkey_server: EmbeddedServer) -> None:
    """It could replace functions of others, which run with the rights of who calls them."""
    url, user = valkey_server.url, "documented"
    assert command(url, "ACL", "SETUSER", user, *user_rule("a-password")) == b"+OK"
    try:
        for allowed in (("GET", "lb:x"), ("EVAL", "return 1", "1", "lb:x")):
            assert command(url, "ACL", "DRYRUN", user, *allowed) == b"+OK"
        for refused in OTHERS:
            answer = command(url, "ACL", "DRYRUN", user, *refused)
            assert b"permission" in bytes(answer), (refused, answer)
    finally:
        command(url, "ACL", "DELUSER", user)


# -- his password is replaced


@pytest.mark.parametrize("executable", [valkey_executable, redis_executable])
def test_a_connection_that_subscribes_does_not_outlive_its_password(
    start_server: StartServer, executable: Callable[[], str]
) -> None:
    """It is not of the TYPE normal, and may run all commands by RESP3. Ended as docs/operations.md
    says."""
    server = start_server(executable=executable())
    command(server.url, "ACL", "SETUSER", "lookup-buffer", *user_rule("leaked"))
    with socket.socket(socket.AF_UNIX) as thief, thief.makefile("rb") as replies:
        thief.settimeout(scaled(5.0))
        thief.connect(server.url.removeprefix("unix://"))
        thief.sendall(b"HELLO 3 AUTH lookup-buffer leaked\r\nSUBSCRIBE lb:pipe:x\r\n")
        thief.sendall(b"SET lb:rec:forged x\r\n")
        while (line := replies.readline()) != b"+OK\r\n":
            assert line, "the control: he is logged in"
        command(server.url, "ACL", "SETUSER", "lookup-buffer", ">new", "<leaked")
        steps = (ROOT / "docs/operations.md").read_text()
        (documented,) = set(re.findall(r"`(CLIENT KILL [^`]+)`", steps))
        assert command(server.url, *documented.split()) == b":1"
        with suppress(ConnectionError):
            assert replies.read() == b""
