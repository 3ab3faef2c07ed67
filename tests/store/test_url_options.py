"""redis-py's options in store URLs, each on a real server: what it does there."""

import asyncio
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from clusters import ValkeyCluster
from command_line import run
from mirrors import Mirroring
from nodes import wait_until
from servers import (
    PASSWORD,
    USER,
    StartServer,
    TlsServer,
    command,
    flush,
    frozen,
    patient,
)
from store import BlockingStore, EmbeddedServer, StoreUnavailable, open_async_store, open_store
from store.testing import BrowsingContract, CoreContract
from store.testing.samples import a_location, a_record
from store.tls import TlsOptionError, tls_context
from store.topology import open_topology
from store.url import parse


class TestResp3Store(CoreContract, BrowsingContract):
    """The contract with protocol=3, in which the server answers in other types."""

    @pytest.fixture
    def store(self, valkey_server: EmbeddedServer) -> Iterator[BlockingStore]:
        flush(valkey_server.url)
        with patient(f"{valkey_server.url}?protocol=3") as store:
            yield store

    def test_its_connections_use_it(
        self, store: BlockingStore, valkey_server: EmbeddedServer
    ) -> None:
        store.ping()
        (one,) = clients(valkey_server.url, "lookup-buffer:calls")
        assert one["resp"] == "3"


def clients(url: str, name: str) -> list[dict[str, str]]:
    """The connections of that name in CLIENT LIST."""
    lines = command(url, "CLIENT", "LIST").decode().splitlines()
    found = [dict(word.partition("=")[::2] for word in line.split()) for line in lines]
    return [one for one in found if one["name"] == name]


def test_a_cluster_with_resp3(valkey_cluster: ValkeyCluster, namespace: str) -> None:
    with patient(f"{valkey_cluster.url}?protocol=3") as store:
        keys = [f"k{n}" for n in range(30)]
        for key in keys:
            store.publish(a_record(namespace, key), a_location())
        assert [one and one.key for one in store.locate(namespace, keys)] == keys
        assert {record.key for record in store.scan(namespace)} == set(keys)
        assert store.server_info().mode == "cluster"


@pytest.mark.processes
def test_commands_say_the_same_with_resp3(
    valkey_server: EmbeddedServer, store: BlockingStore, namespace: str
) -> None:
    store.publish(a_record(namespace, "k"), a_location())
    store.add_hits(namespace, {"k": 3})
    store.add_stats("node-1", {"inserts": 2})
    for words in (["ls"], ["why", "k"], ["show", "k"], ["stats"], ["nodes"]):
        found = [
            run(*words, "--json", LOOKUP_BUFFER_STORE_URL=f"{valkey_server.url}{option}").stdout
            for option in ("", "?protocol=3")
        ]
        assert without_ages(found[0]) == without_ages(found[1])


def without_ages(document: str) -> object:
    return json.loads(document, parse_float=lambda _: 0)


def test_the_mirror_takes_options_of_the_pool_and_ignores_those_it_cannot_use(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    with Mirroring(f"{valkey_server.url}?protocol=2&health_check_interval=0.01") as mirroring:
        assert mirroring.has(namespace, "k") is False
        (tracked,) = clients(valkey_server.url, "lookup-buffer:mirror:mirror")
        assert tracked["resp"] == "3"
        before = calls_of(valkey_server.url, "ping")
        for n in range(20):
            time.sleep(0.02)
            assert mirroring.has(namespace, f"k{n}") is False
        assert calls_of(valkey_server.url, "ping") == before


def calls_of(url: str, name: str) -> int:
    """How often the server ran a command."""
    found = command(url, "INFO", "commandstats").decode().partition(f"cmdstat_{name}:calls=")[2]
    return int(found.partition(",")[0] or 0)


def test_an_idle_connection_is_checked_before_a_call(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    with patient(f"{valkey_server.url}?health_check_interval=0.05") as store:
        store.locate(namespace, ["k"])
        before = calls_of(valkey_server.url, "ping")
        time.sleep(0.1)
        store.locate(namespace, ["k"])
        assert calls_of(valkey_server.url, "ping") == before + 1
        (one,) = clients(valkey_server.url, "lookup-buffer:calls")
        command(valkey_server.url, "CLIENT", "KILL", "ID", one["id"])
        time.sleep(0.1)
        assert store.locate(namespace, ["k"]) == [None]


def test_a_check_of_a_server_that_hangs_ends_with_the_call(
    start_server: StartServer, namespace: str
) -> None:
    server = start_server()
    url = f"{server.url}?health_check_interval=0.05"
    with open_store(url, call_timeout_seconds=0.5, connect_timeout_seconds=5.0) as store:
        wait_until(lambda: answers(store, namespace), 5.0)
        time.sleep(0.1)
        with frozen(server):
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                store.locate(namespace, ["k"])
            assert time.monotonic() - started < 5.0, "a connect of its own"
        wait_until(lambda: answers(store, namespace), 5.0)


def assert_refused(url: str, words: str | None = None) -> None:
    with patient(url) as store, pytest.raises(StoreUnavailable, match=words):
        store.locate("namespace", ["k"])


def answers(store: BlockingStore, namespace: str) -> bool:
    try:
        return store.locate(namespace, ["k"]) == [None]
    except StoreUnavailable:
        return False


def test_the_limit_of_connections(valkey_server: EmbeddedServer) -> None:
    async def two_calls() -> list[object]:
        url = f"{valkey_server.url}?max_connections=1"
        async with open_async_store(url, call_timeout_seconds=5.0) as store:
            both = [store.locate("n", ["k"]), store.locate("n", ["k"])]
            return await asyncio.gather(*both, return_exceptions=True)

    refused = [one for one in asyncio.run(two_calls()) if isinstance(one, StoreUnavailable)]
    assert len(refused) == 1
    assert "at the limit of 1 calls in flight" in str(refused[0])


@pytest.mark.parametrize(("option", "on"), [("true", True), ("false", False)])
def test_keepalive(tls_server: TlsServer, option: str, on: bool) -> None:
    async def is_on() -> bool:
        address = parse(f"{tls_server.url}&socket_keepalive={option}&socket_read_size=4096")
        topology = open_topology(address, call_timeout_seconds=5.0, connect_timeout_seconds=5.0)
        (server,) = await topology.servers(topology.new_budget())
        connection = server.access.connection(server.endpoint, "test", lambda _: None)
        await connection.connect()
        writer = connection._writer
        assert writer is not None
        taken: socket.socket = writer.get_extra_info("socket")
        value = taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        await connection.disconnect(nowait=True)
        await topology.close()
        return bool(value)

    assert asyncio.run(is_on()) is on


# ---- TLS


def tls_url(server: TlsServer, host: str, *options: str) -> str:
    """With the client's certificate, without an authority."""
    files = server.files
    own = (
        f"ssl_certfile={quote(str(files.client))}",
        f"ssl_keyfile={quote(str(files.client_key))}",
    )
    secret = f"{USER}:{quote(PASSWORD, safe='')}"
    return f"rediss://{secret}@{host}:{server.process.port}?{'&'.join((*own, *options))}"


def test_a_server_is_verified_unless_the_url_says_otherwise(
    tls_server: TlsServer, namespace: str
) -> None:
    assert_refused(tls_url(tls_server, "127.0.0.1"), "(?i)certificate")
    with patient(tls_url(tls_server, "127.0.0.1", "ssl_cert_reqs=none")) as store:
        assert store.locate(namespace, ["k"]) == [None]


def test_the_name_in_the_certificate(tls_server: TlsServer, namespace: str) -> None:
    authority = f"ssl_ca_certs={quote(str(tls_server.files.authority))}"
    another = "0.0.0.0"  # reaches this machine, and is no name in the certificate
    assert_refused(tls_url(tls_server, another, authority), "(?i)certificate")
    with patient(tls_url(tls_server, another, authority, "ssl_check_hostname=false")) as store:
        assert store.locate(namespace, ["k"]) == [None]
    assert_refused(tls_url(tls_server, another, "ssl_check_hostname=false"), "(?i)certificate")


def test_a_directory_of_authorities(tls_server: TlsServer, namespace: str, tmp_path: Path) -> None:
    authority = tls_server.files.authority
    words = ["openssl", "x509", "-hash", "-noout", "-in", str(authority)]
    try:
        found = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        pytest.skip("no openssl on the PATH")
    (tmp_path / f"{found}.0").symlink_to(authority)
    with patient(tls_url(tls_server, "127.0.0.1", f"ssl_ca_path={quote(str(tmp_path))}")) as store:
        assert store.locate(namespace, ["k"]) == [None]
    with pytest.raises(TlsOptionError, match="ssl_ca_path /not/there: No such file"):
        tls_context({"ssl_ca_path": "/not/there"})


def test_the_least_version_of_tls(tls_server: TlsServer, namespace: str) -> None:
    url = f"{tls_server.url}&ssl_min_version=772"
    with patient(url) as store:
        assert store.locate(namespace, ["k"]) == [None]
    tls_server.admin("CONFIG", "SET", "tls-protocols", "TLSv1.2")
    try:
        assert_refused(url)
        with patient(f"{tls_server.url}&ssl_ciphers=ECDHE-ECDSA-AES256-GCM-SHA384") as store:
            assert store.locate(namespace, ["k"]) == [None]
        assert_refused(f"{tls_server.url}&ssl_ciphers=ECDHE-RSA-AES256-GCM-SHA384")
    finally:
        tls_server.admin("CONFIG", "SET", "tls-protocols", "TLSv1.2 TLSv1.3")


def test_options_of_the_context() -> None:
    strict, partial = ssl.VerifyFlags.VERIFY_X509_STRICT, ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context = tls_context({"ssl_include_verify_flags": (strict.name, partial.name)})
    assert context.verify_flags & strict
    assert context.verify_flags & partial
    context = tls_context({"ssl_exclude_verify_flags": (strict.name,)})
    assert not context.verify_flags & strict
    with pytest.raises(TlsOptionError, match="ssl_ciphers NONE-SUCH: OpenSSL has none of these"):
        tls_context({"ssl_ciphers": "NONE-SUCH"})
