"""Mutual TLS between nodes: what works over it, and who is refused."""

import asyncio
import datetime
import gc
import logging
import shutil
import socket
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509

from command_line import run, run_json
from connectors.settings import parse_settings
from lookup_buffer.cli import certificates
from lookup_buffer.cli.check_fleet import _certificates_check
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.config import TLS_FILES, BufferConfig, TlsFiles, parse_address
from lookup_buffer.errors import (
    ConfigError,
    LookupBufferError,
    MissingTensor,
    NodeRefused,
    PipeBroken,
    PipeClosed,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.node.links import (
    HANDOFFS,
    HANDSHAKE_SECONDS,
    TENSORS,
    Credentials,
    dial,
)
from lookup_buffer.protocol.auth import Purpose, connect, request_handshake
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.protocol.tls import OF_ONE_AT_ONCE, Tls, TlsSocket
from node_certificates import DAY, Files, install, settings_of
from nodes import MIB, NodeProcess, StartNode, handoff, key, tensor_of, wait_until, with_store
from patience import scaled
from peer_servers import NAMESPACE, Bench, answered, on_a_loop
from store import Location, open_store

TOKEN = "correct horse battery staple"
SIZES = (0, 1000, 20_000, 300_000, 8 * MIB)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls") / "others")


@pytest.fixture(scope="module")
def pair(module_nodes: StartNode, ours: Files) -> tuple[NodeProcess, NodeProcess]:
    a, b = (
        module_nodes(**settings_of(ours.of(name), name), token=TOKEN) for name in ("tls-a", "tls-b")
    )
    with_store(a, b)
    return a, b


def selected(client: LookupBuffer, name: TensorKey) -> torch.Tensor:
    tensor = client.select(name, timeout=10.0)
    assert tensor is not None
    return tensor


def endpoint_of(node: NodeProcess) -> str:
    with open_store(node.settings.store_url) as store:
        wait_until(lambda: store.node_infos([node.node_id]), 10.0)
        return str(store.node_infos([node.node_id])[node.node_id].endpoint)


def checks_of(node: NodeProcess, *, code: int, **settings: str) -> dict[str, list[str]]:
    """What `doctor` finds on the host of a node: "verdict: sentence" by name."""
    config = node.settings
    variables = {
        "LOOKUP_BUFFER_DIRECTORY": str(config.directory),
        "LOOKUP_BUFFER_STORE_URL": config.store_url,
        "LOOKUP_BUFFER_CAPACITY_BYTES": str(config.capacity_bytes),
        "LOOKUP_BUFFER_LISTEN": config.listen,
        "LOOKUP_BUFFER_NODE_ID": config.node_id or "",
        "LOOKUP_BUFFER_TOKEN": config.token.get_secret_value() if config.token else "",
        **{f"LOOKUP_BUFFER_{name.upper()}": str(getattr(config, name) or "") for name in TLS_FILES},
        **settings,
    }
    found: dict[str, list[str]] = {}
    for one in run_json("doctor", code=code, **variables)["checks"]:
        found.setdefault(one["name"], []).append(f"{one['verdict']}: {one['found']}")
    return found


# -- what works


@pytest.mark.parametrize("nbytes", SIZES)
def test_tensors_of_each_size_arrive(pair: tuple[NodeProcess, NodeProcess], nbytes: int) -> None:
    a, b = pair
    with a.client() as here, b.client() as there:
        stored, names = tensor_of(str(nbytes), nbytes), [key() for _ in range(3)]
        for name in names:
            here.insert(name, stored)
        for name in names:
            assert torch.equal(selected(there, name), stored)
    assert b.stats()["bytes_fetched"] >= 3 * nbytes


def test_handoffs_and_has_caches(pair: tuple[NodeProcess, NodeProcess]) -> None:
    a, b = pair
    with a.client() as here, b.client() as there:
        for nbytes in (100, 3 * MIB):
            name, stored = handoff(), tensor_of("h", nbytes)
            here.insert(name, stored)
            taken = there.drop_select(name, timeout=10.0)
            assert taken is not None
            assert torch.equal(taken, stored)
            with pytest.raises(MissingTensor):
                here.drop_select(name, timeout=0.0)
        names = [key() for _ in range(8)]
        here.insert_many([(name, tensor_of("x", 50_000)) for name in names])
        wait_until(lambda: all(there.has_caches(names)), 10.0)


def test_many_at_once_in_both_directions(pair: tuple[NodeProcess, NodeProcess]) -> None:
    """Threads send while the loop reads requests on the same connection."""
    a, b = pair
    with a.client() as here, b.client() as there:
        stored = {name: tensor_of(str(name), 700_000) for name in (key() for _ in range(24))}
        here.insert_many(list(stored.items())[::2])
        there.insert_many(list(stored.items())[1::2])
        for client in (here, there):
            for name, tensor in stored.items():
                assert torch.equal(selected(client, name), tensor)


def test_doctor_reaches_nodes_with_its_certificate(
    pair: tuple[NodeProcess, NodeProcess], ours: Files
) -> None:
    a, b = pair
    wait_until(lambda: a.stats()["nodes_alive"] >= 2 and b.stats()["nodes_alive"] >= 2, 10.0)
    found = checks_of(a, code=0)
    (tls,) = found["tls"]
    assert tls.startswith("ok: nodes that accept this certificate, and whose own is valid: 2")
    assert any("reached by others" in one for one in found["addresses"])
    ours.of("tls-a", days=7)
    expected = "warn: the certificate set here expires in 6 d"
    assert checks_of(a, code=0)["tls"] == [expected]
    ours.of("tls-a")
    blank = dict.fromkeys((f"LOOKUP_BUFFER_{name.upper()}" for name in TLS_FILES), "")
    found = checks_of(a, code=0, LOOKUP_BUFFER_LISTEN="", **blank)
    assert found["tls"] == ["warn: all nodes use TLS; no certificate is set here"]


def test_doctor_warns_of_an_authority_that_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificates may be valid for longer: they end with it."""
    monkeypatch.setattr("lookup_buffer.cli.certificates.AUTHORITY_DAYS", 7)
    tls = Files(tmp_path / "short").tls("node-a")
    check = _certificates_check([], 2, tls)
    assert check.verdict == "warn"
    assert "the authority's certificate expires in 6 d" in check.found


def test_a_certificate_that_is_its_own_authority(tmp_path: Path) -> None:
    """Each node's file then lists those of all nodes, which certify nobody."""
    now, until = certificates._now(), certificates._now() + datetime.timedelta(days=30)
    key = certificates._new_key()
    names: list[x509.GeneralName] = [x509.DNSName("node-a")]
    own = certificates._signed("node-a", key, "node-a", key, now - DAY, until, names=names)
    files = TlsFiles(tmp_path / "own.pem", tmp_path / "own.key", tmp_path / "own.pem")
    files.certificate.write_bytes(certificates._pem(own))
    files.key.write_bytes(certificates._key_pem(key))
    tls = Tls(files, "node-a")
    assert tls.authority_expires == tls.expires


def test_of_two_authorities_the_newer_one_counts(ours: Files, tmp_path: Path) -> None:
    """While they are exchanged, a node's file has both."""
    files, other = ours.of("node-a"), Files(tmp_path / "other").of("node-a")
    both = tmp_path / "both.pem"
    both.write_bytes(files.authority.read_bytes() + other.authority.read_bytes())
    alone = Tls(files, "node-a").authority_expires
    assert Tls(files._replace(authority=both), "node-a").authority_expires >= alone


def test_the_keys_of_links_are_written_nowhere(
    ours: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SSLKEYLOGFILE others who may write an environment get all keys, by default of Python."""
    log = tmp_path / "keys"
    monkeypatch.setenv("SSLKEYLOGFILE", str(log))
    assert ssl.create_default_context().keylog_filename == str(log), "the control"
    tls = ours.tls("node-a")
    here, there = socket.socketpair()
    dialled, accepted = tls.dialled(here), tls.accepted(there)
    other = threading.Thread(target=accepted.shake_hands, args=(scaled(5.0),))
    other.start()
    dialled.shake_hands(scaled(5.0))
    other.join()
    dialled.close()
    accepted.close()
    assert "TRAFFIC_SECRET" not in log.read_text()


def test_doctor_says_which_nodes_refuse_its_certificate(
    pair: tuple[NodeProcess, NodeProcess], others: Files, ours: Files, tmp_path: Path
) -> None:
    a, _ = pair
    files, both = others.of("tls-a"), tmp_path / "both.pem"
    both.write_bytes(files.authority.read_bytes() + (ours.folder / "authority.pem").read_bytes())
    given = dict(zip(TLS_FILES, files._replace(authority=both), strict=True))
    variables = {f"LOOKUP_BUFFER_{name.upper()}": str(path) for name, path in given.items()}
    (tls,) = checks_of(a, code=1, **variables)["tls"]
    assert tls.startswith("fail: no TLS with tls-a at tls://")
    assert "it ended TLS with this node: unknown ca" in tls


# -- who is refused


def context_of(files: TlsFiles | None) -> ssl.SSLContext:
    """Of an attacker, who checks nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


def refusal(
    node: NodeProcess, context: ssl.SSLContext, client: str, token: str | None = TOKEN
) -> str:
    """Why `node` refuses a connection by TLS of what says that it is node `client`."""
    endpoint = endpoint_of(node)
    stream = socket.create_connection(parse_address(endpoint), scaled(5.0))
    secured = TlsSocket(stream, context, server_side=False)
    purpose = Purpose(TENSORS, endpoint, node.node_id, "", client)
    try:
        secured.shake_hands(scaled(5.0))
        request_handshake(secured, token=token, timeout=scaled(5.0), purpose=purpose).close()
    except (LookupBufferError, OSError) as error:
        return str(error)
    finally:
        secured.close()
    return ""


class Blocked:
    """Replaces `go_on`, which OpenSSL does not leave until `over` is set, for those that this
    process accepts at `port`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over, self.begun = threading.Event(), 0
        self.is_on = True
        honest = TlsSocket.go_on

        def go_on(stream: TlsSocket) -> int:
            if self.is_on and stream.getsockname()[1] == self.port:
                self.begun += 1
                self.over.wait(scaled(20.0))
            return honest(stream)

        monkeypatch.setattr(TlsSocket, "go_on", go_on)

    port = 0


def test_handshakes_that_take_openssl_long_stop_nobody(
    monkeypatch: pytest.MonkeyPatch, ours: Files
) -> None:
    """By certificates of a stranger with keys that take long to read: no other call waits for them
    on the loop, and who connects from elsewhere has places."""
    blocked = Blocked(monkeypatch)

    async def test(bench: Bench) -> None:
        blocked.port = parse_address(bench.endpoint)[1]
        strangers = [socket.create_connection(parse_address(bench.endpoint)) for _ in range(12)]
        try:
            for stranger in strangers:
                stranger.sendall(b"\x16\x03\x01")
            await bench.until(lambda: blocked.begun == OF_ONE_AT_ONCE)
            await asyncio.sleep(2 * HANDSHAKE_SECONDS)
            assert blocked.begun == OF_ONE_AT_ONCE, "their places are taken"
            assert not bench.server._greetings, "though nobody waits for them"
            blocked.is_on = False
            elsewhere = asyncio.create_task(dialled_from("127.0.0.2", bench))
            await bench.until(lambda: elsewhere.done())
            elsewhere.result().close()
        finally:
            blocked.over.set()
            for stranger in strangers:
                stranger.close()
        link = await bench.reader()
        assert await answered(link, [NAMESPACE, "absent", "boot", 1]) == [{"status": "stale"}]
        link.close()

    on_a_loop(test, Credentials(None, Tls(ours.of("node-b"), "node-b")))


def test_handshakes_that_fail_leave_no_garbage(ours: Files) -> None:
    """A node collects the oldest generation hardly ever: 140 KB of handshakes took 230 MB."""

    async def test(bench: Bench) -> None:
        for hello in (b"\x16\x03\x01\x02\x00\x01\x01\xff\xfc\x03\x03", b"\x16\x03\x01\x00\x01\x00"):
            address = parse_address(bench.endpoint)
            strangers = [socket.create_connection(address) for _ in range(8)]
            for stranger in strangers:
                stranger.sendall(hello)
            await bench.until(lambda: len(bench.server._greetings) == 8)
            for stranger in strangers:
                stranger.close()
            await bench.until(lambda: not bench.server._greetings)
        with pytest.raises(NodeRefused):
            await dial(
                bench.loop,
                bench.location._replace(node="x"),
                bench.endpoint,
                TENSORS,
                bench.credentials,
            )
        await bench.until(lambda: not [one for one in gc.get_objects() if type(one) is TlsSocket])

    gc.collect()
    gc.disable()
    try:
        on_a_loop(test, Credentials(None, Tls(ours.of("node-b"), "node-b")))
    finally:
        gc.enable()


async def dialled_from(host: str, bench: Bench) -> TlsSocket:
    """A connection by TLS from another address."""
    tls = bench.credentials.tls
    assert tls is not None

    def connect() -> TlsSocket:
        address = parse_address(bench.endpoint)
        stream = socket.create_connection(address, scaled(5.0), (host, 0))
        return tls.connected(stream, "node-b", scaled(5.0))

    return await asyncio.to_thread(connect)


def test_who_has_no_valid_certificate_is_refused(
    pair: tuple[NodeProcess, NodeProcess], ours: Files, others: Files
) -> None:
    a, _ = pair
    assert refusal(a, context_of(ours.of("honest")), "honest") == ""  # the control
    expired = ours.of("late", now=datetime.datetime.now(datetime.UTC) - 31 * DAY)
    for files, node, reason in (
        (None, "tls-b", "certificate required"),
        (others.of("tls-b"), "tls-b", "unknown ca"),
        (expired, "late", "certificate expired"),
    ):
        assert reason in refusal(a, context_of(files), node), reason


def test_a_certified_node_cannot_pose_as_another(
    pair: tuple[NodeProcess, NodeProcess], ours: Files
) -> None:
    a, _ = pair
    said = refusal(a, context_of(ours.of("evil")), "tls-b")
    assert said == "refused: the certificate is of 'evil', not of tls-b"
    assert "not of " in refusal(a, context_of(ours.of("evil")), "")
    assert "not of " in refusal(a, context_of(ours.named("nobody", x509.DNSName(""))), "")


def test_a_certificate_replaces_no_token(
    pair: tuple[NodeProcess, NodeProcess], ours: Files
) -> None:
    a, _ = pair
    assert "token" in refusal(a, context_of(ours.of("honest")), "honest", TOKEN[::-1])


@pytest.mark.parametrize("role", [TENSORS, HANDOFFS])
def test_a_forged_location_leads_to_no_other_node(
    pair: tuple[NodeProcess, NodeProcess], ours: Files, role: str
) -> None:
    """Who can write Redis says that node tls-b is where another certified node listens."""
    a, _ = pair
    forged = endpoint_of(a)

    async def dialled() -> None:
        credentials = Credentials(TOKEN, ours.tls("reader"))
        location, loop = Location("tls-b", "boot", 1, 1), asyncio.get_running_loop()
        await dial(loop, location, forged, role, credentials)

    with pytest.raises(NodeRefused, match="is of 'tls-a', not of tls-b"):
        asyncio.run(dialled())


def test_who_speaks_no_tls_is_told_so(pair: tuple[NodeProcess, NodeProcess]) -> None:
    a, _ = pair
    endpoint = endpoint_of(a)
    purpose = Purpose(TENSORS, endpoint, a.node_id)
    with pytest.raises(NodeRefused, match="TLS only"):
        connect(*parse_address(endpoint), token=TOKEN, timeout=5.0, purpose=purpose)


@pytest.mark.parametrize("said", [b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"])
def test_garbage_instead_of_tls_ends_its_connection(
    pair: tuple[NodeProcess, NodeProcess], said: bytes
) -> None:
    a, b = pair
    address = parse_address(endpoint_of(a))
    with socket.create_connection(address, scaled(5.0)) as stream:
        stream.sendall(said)
        with suppress(ConnectionError):
            while stream.recv(1000):  # an alert, and then the end
                pass
    with a.client() as here, b.client() as there:
        here.insert(name := key(), tensor_of("g", 1000))
        assert torch.equal(selected(there, name), tensor_of("g", 1000))


def test_older_tls_is_refused(pair: tuple[NodeProcess, NodeProcess], ours: Files) -> None:
    a, _ = pair
    context = context_of(ours.of("honest"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert "version" in refusal(a, context, "honest").lower()


def test_nodes_with_and_without_tls_refuse_each_other(
    start_node: StartNode, ours: Files, start_server: Any
) -> None:
    url = start_server().url
    by_tls = start_node(**settings_of(ours.of("by-tls"), "by-tls"), store_url=url)
    plain = start_node(node_id="plain", store_url=url)
    with_store(by_tls, plain)
    name = key()
    with by_tls.client() as here, plain.client() as there:
        here.insert(name, tensor_of("s", 1000))
        wait_until(lambda: plain.stats()["nodes_alive"] == 2, 10.0)
        wait_until(lambda: by_tls.stats()["nodes_alive"] == 2, 10.0)
        wait_until(lambda: here.stats()["unpublished"] == 0, 10.0)
        with pytest.raises(MissingTensor, match="peer_failed"):
            there.select(name)
    for node, reason in ((plain, "TLS, which this node has not"), (by_tls, "without TLS, which")):
        found = checks_of(node, code=1)
        assert any(reason in one for one in found["address"]), found["address"]
        assert found["tls"][0] == ("fail: nodes without TLS: plain; with TLS: by-tls")

    def explained() -> bool:
        said = run("why", name.mm_hash, LOOKUP_BUFFER_STORE_URL=url).stdout
        return "plain could not fetch it from by-tls" in said

    wait_until(explained, 10.0)


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        ("expired", "certificate has expired"),
        ("other authority", "unable to get local issuer certificate|self-signed"),
        ("other node", "of 'another'; allowed: one with the DNS or URI name 'node-a'"),
        ("other key", "does not belong to the certificate"),
        ("no file", "tls_key_file.*No such file"),
    ],
)
def test_a_node_does_not_start_with_files_that_others_refuse(
    ours: Files, others: Files, tmp_path: Path, defect: str, reason: str
) -> None:
    long_ago = datetime.datetime.now(datetime.UTC) - 31 * DAY
    files = ours.of("node-a", now=long_ago if defect == "expired" else None)
    if defect == "other authority":
        files = files._replace(authority=others.of("x").authority)
    elif defect == "other node":
        files = ours.of("another")
    elif defect == "other key":
        files = files._replace(key=ours.of("node-b").key)
    elif defect == "no file":
        files = files._replace(key=tmp_path / "nothing.pem")
    with pytest.raises(ConfigError, match=reason):
        Tls(files, "node-a")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tls_key_file": None}, "set 'tls_key_file' too"),
        ({"node_id": None}, "set 'node_id' too"),
        ({"listen": "tcp://127.0.0.1:0"}, "which is not encrypted"),
        ({"advertise": "tcp://127.0.0.1:7000"}, "both are tls://"),
        ({"listen": "tls://127.0.0.1"}, "tls://host:port"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    ours: Files, changed: dict[str, Any], reason: str
) -> None:
    settings = {**settings_of(ours.of("node-a"), "node-a"), **changed}
    with pytest.raises(ConfigError, match=reason):
        BufferConfig.of({name: value for name, value in settings.items() if value is not None})


def test_a_certificate_replaces_a_token_beyond_loopback(ours: Files) -> None:
    settings = {**settings_of(ours.of("node-a"), "node-a"), "listen": "tls://10.0.0.1:7730"}
    assert BufferConfig.of(settings).token is None


def test_it_replaces_none_of_a_device_lane(ours: Files) -> None:
    """A lane's port does not speak TLS."""
    given = settings_of(ours.of("node-a"), "node-a") | {"listen": "tls://10.0.0.1:7730"}
    raw = {name: str(value) for name, value in given.items()} | {"device_lane": "gloo"}
    with pytest.raises(ConfigError, match=r"'device_lane_host' is at .*set 'token'"):
        parse_settings(raw)
    assert parse_settings(raw | {"device_lane_host": "127.0.0.1"}).token is None


# -- rotation


@pytest.fixture
def rotated(tmp_path: Path) -> Path:
    folder = tmp_path / "in-use"
    folder.mkdir()
    return folder


def test_changed_files_are_used_without_a_restart(
    start_node: StartNode, ours: Files, others: Files, start_server: Any, rotated: Path
) -> None:
    url, names = start_server().url, ("rot-a", "rot-b")
    a, b = (
        start_node(**settings_of(install(ours.of(name), rotated), name), store_url=url)
        for name in names
    )
    with_store(a, b)
    assert refusal(a, context_of(ours.of("honest")), "honest", token=None) == ""
    for node_id in names:
        install(others.of(node_id), rotated)
    wait_until(lambda: a.stats()["nodes_alive"] == 2 and b.stats()["nodes_alive"] == 2, 10.0)
    assert checks_of(a, code=0)["tls"][0].startswith("ok")
    old, new = context_of(ours.of("honest")), context_of(others.of("honest"))
    for node in (a, b):
        assert "unknown ca" in refusal(node, old, "honest", token=None)
        assert refusal(node, new, "honest", token=None) == ""
    with a.client() as here, b.client() as there:
        name = key()
        here.insert(name, tensor_of("r", MIB))
        assert torch.equal(selected(there, name), tensor_of("r", MIB))


def test_connections_of_an_excluded_node_end_soon(
    start_node: StartNode, ours: Files, others: Files, rotated: Path
) -> None:
    """Whatever it uses them for: it would read tensors, and take hand-offs, for as long as it
    likes."""
    sooner = "from lookup_buffer.protocol import tls; tls.EXCLUDED_SECONDS = 1.0"
    node = start_node(prelude=sooner, **settings_of(install(ours.of("rot-a"), rotated), "rot-a"))
    with_store(node)
    endpoint, credentials = endpoint_of(node), Credentials(None, Tls(ours.of("gone"), "gone"))
    with open_store(node.settings.store_url) as store:
        boot = store.node_infos(["rot-a"])["rot-a"].boot

    async def dialled(role: str) -> FramedSocket:
        location = Location("rot-a", boot, 1, 1)
        loop = asyncio.get_running_loop()
        return (await dial(loop, location, endpoint, role, credentials)).framed()

    links = [asyncio.run(dialled(role)) for role in (TENSORS, HANDOFFS)]
    time.sleep(1.0)
    assert not any(link.wait_readable(0.0) for link in links)
    install(others.of("rot-a"), rotated)
    for link in links:
        assert link.wait_readable(scaled(3.0))
        with pytest.raises((PipeClosed, PipeBroken)):
            link.recv_header(timeout=1.0)
        link.abort()


def test_half_changed_files_wait_for_the_other_half(
    ours: Files, others: Files, rotated: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(install(ours.of("node-a"), rotated), "node-a")
    before = tls._current()
    new = others.of("node-a")
    shutil.copy(new.certificate, rotated / "node-a.pem")
    with caplog.at_level(logging.WARNING):
        assert tls._current() is before
        assert tls._current() is before
    assert len(caplog.records) == 1, "said once"
    install(new, rotated)
    assert tls._current() is not before
