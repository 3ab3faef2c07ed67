"""Store URLs: which are accepted, which error the others get, and what is never shown."""

import inspect
import subprocess
import sys
import traceback
from urllib.parse import quote

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from redis.asyncio.connection import (
    URL_QUERY_ARGUMENT_PARSERS,
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)

from hypothesis_profiles import examples
from patience import scaled
from store import StoreUrlError, open_store, redact
from store.url import SCHEMES, StoreUrl, parse
from store.url_options import CONNECTION, OWN, TCP, TLS, read_options

GROUPS = (OWN, CONNECTION, TCP, TLS)
ONE = (("host", 6379),)
OF_CONSTRUCTORS_ONLY = {
    *("self", "args", "kwargs", "connection_kwargs"),
    # redis-py passes these from a pool to its connections.
    *("maint_notifications_pool_handler", "maintenance_state", "maintenance_notification_hash"),
    *("orig_host_address", "orig_socket_timeout", "orig_socket_connect_timeout"),
    "oss_cluster_maint_notifications_handler",
}
UNDERSTOOD = {
    "redis://host": StoreUrl("redis", ONE),
    "REDIS://Host/": StoreUrl("redis", ONE),
    "redis://10.0.0.1:7000/2": StoreUrl("redis", (("10.0.0.1", 7000),), database=2),
    "valkey://host?db=3": StoreUrl("valkey", ONE, database=3),
    "redis://[::1]:7000": StoreUrl("redis", (("::1", 7000),)),
    "redis://[fe80::1%25eth0]": StoreUrl("redis", (("fe80::1%eth0", 6379),)),
    "redis://:p%40ss%2Fword@host": StoreUrl("redis", ONE, password="p@ss/word"),
    "redis://:p,w@h@host": StoreUrl("redis", ONE, password="p,w@h"),
    "redis://me:pw@host": StoreUrl("redis", ONE, username="me", password="pw"),
    "unix:///run/a%20b%25.sock?db=1": StoreUrl("unix", path="/run/a b%.sock", database=1),
    "unix://me:pw@/run/s": StoreUrl("unix", path="/run/s", username="me", password="pw"),
    "unix:///run/a@b": StoreUrl("unix", path="/run/a@b"),
    "rediss://host?ssl_ca_certs=/etc/a+b.pem": StoreUrl(
        "rediss", ONE, tls_options={"ssl_ca_certs": "/etc/a+b.pem"}
    ),
    "redis-sentinel://host/mymaster": StoreUrl(
        "redis-sentinel", (("host", 26379),), service="mymaster"
    ),
    "redis-sentinel://me:pw@a,b:1,[::1]:2/m.y-1_/3": StoreUrl(
        "redis-sentinel",
        (("a", 26379), ("b", 1), ("::1", 2)),
        database=3,
        service="m.y-1_",
        username="me",
        password="pw",
    ),
    "valkeys-sentinel://host/s?db=1&sentinel_username=u&sentinel_password=p%40+&ssl_keyfile=/k": (
        StoreUrl(
            "valkeys-sentinel",
            (("host", 26379),),
            database=1,
            service="s",
            sentinel_username="u",
            sentinel_password="p@+",
            tls_options={"ssl_keyfile": "/k"},
        )
    ),
    "redis-cluster://host": StoreUrl("redis-cluster", ONE),
    "redis://host?protocol=3&health_check_interval=0.5&socket_read_size=4096": StoreUrl(
        "redis",
        ONE,
        options={"protocol": 3, "health_check_interval": 0.5, "socket_read_size": 4096},
    ),
    "redis-cluster://host?socket_keepalive=No&client_name=a.b:c&max_connections=7": StoreUrl(
        "redis-cluster",
        ONE,
        options={"socket_keepalive": False},
        client_name="a.b:c",
        connections_max=7,
    ),
    "unix:///run/s?socket_read_size=4096": StoreUrl(
        "unix", path="/run/s", options={"socket_read_size": 4096}
    ),
    "rediss://host?ssl_cert_reqs=none&ssl_check_hostname=false&ssl_min_version=772": StoreUrl(
        "rediss",
        ONE,
        tls_options={
            "ssl_cert_reqs": "none",
            "ssl_check_hostname": False,
            "ssl_min_version": 772,
        },
    ),
    "valkeys://host?ssl_exclude_verify_flags=[VERIFY_X509_STRICT,%20VERIFY_X509_PARTIAL_CHAIN]": (
        StoreUrl(
            "valkeys",
            ONE,
            tls_options={
                "ssl_exclude_verify_flags": ("VERIFY_X509_STRICT", "VERIFY_X509_PARTIAL_CHAIN")
            },
        )
    ),
    "rediss-cluster://:pw@[::1]:7000,b/": StoreUrl(
        "rediss-cluster", (("::1", 7000), ("b", 6379)), password="pw"
    ),
}


@pytest.mark.parametrize("url", UNDERSTOOD)
def test_understood(url: str) -> None:
    assert parse(url) == UNDERSTOOD[url]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "unknown scheme"),
        ("localhost:6379", "unknown scheme"),
        ("http://host", "unknown scheme"),
        ("embedded", "unknown scheme"),
        ("memory://", "unknown scheme"),
        ("redis://", "host is missing"),
        ("redis:///0", "host is missing"),
        ("redis://host:port", "cannot be read"),
        ("redis://host:99999", "cannot be read"),
        ("redis://[::1", "cannot be read"),
        ("redis://host:", "cannot be read"),
        ("redis://host:0", "cannot be read"),
        ("redis://ho st", "cannot be read"),
        ("redis://host/zero", "database must be a number"),
        ("redis://host/-1", "database must be a number"),
        ("redis://host/1?db=2", "twice"),
        ("redis://host?timeout=5", "option timeout is not for store URLs: set 'store_timeout_s"),
        ("redis://host?ssl_ca_certs=/x", "option ssl_ca_certs is not allowed here: it is for TLS"),
        ("redis://host#1", "%23"),
        ("unix://run/valkey.sock", "absolute path"),
        ("unix://", "absolute path"),
        ("redis://a,b", r"several hosts are for redis-sentinel:// and redis-cluster://"),
        ("redis://host?db=1&db=2", "twice"),
        ("redis://host?db", "the option db has no value"),
        ("rediss://host?verify=no", "unknown option verify; allowed are db, client_name, max_con"),
        (
            "redis://host?sentinel_password=p",
            "is not allowed here: it is for redis-sentinel",
        ),
        ("redis://host?Verify=no", "unknown option; allowed are db"),
        ("redis://host?unknown", "unknown option; allowed are db"),
        ("redis-sentinel://a,b", "the service must be"),
        ("redis-sentinel://a,b/", "the service must be"),
        ("redis-sentinel://a,b/my service", "the service must be 1 to 128 characters"),
        ("redis-sentinel://a,b/s/zero", "database must be a number"),
        ("redis-sentinel://a,b/s/1/2", "database must be a number"),
        ("redis-sentinel://a,b/s/1?db=1", "twice"),
        ("redis-sentinel:///s", "host is missing"),
        ("redis-sentinel://a,/s", "cannot be read"),
        ("redis-sentinel://a/s?ssl_keyfile=/k", "ssl_keyfile is not allowed here: it is for TLS"),
        ("redis-cluster://", "host is missing"),
        ("redis-cluster://a,,b", "cannot be read"),
        ("redis-cluster://a/0", "a cluster has only database 0.*allowed: redis-cluster://"),
        ("redis-cluster://a?db=0", "option db is not allowed here: a cluster has only database 0"),
        ("redis-cluster://u:p@a,u:p@b", "once, before the first host"),
        ("valkeys-cluster://a?db=0", "a cluster has only database 0"),
        ("unix:///run/s?socket_keepalive=1", "a Unix socket has no such option"),
        ("rediss://a?ssl_cert_reqs=none&ssl_check_hostname=1", "needs ssl_cert_reqs=required"),
        ("redis-ring://a,b", "unknown scheme"),
    ],
)
def test_refused(url: str, words: str) -> None:
    with pytest.raises(StoreUrlError, match=words) as caught:
        open_store(url)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("protocol=4", "a whole number from 2 to 3"),
        ("protocol=three", "a whole number from 2 to 3"),
        ("health_check_interval=often", r"seconds from 0 \(off\) to 86400"),
        ("health_check_interval=1e3", r"seconds from 0 \(off\) to 86400"),
        ("client_name=two%20words", "1 to 64 characters of"),
        ("client_name=", "1 to 64 characters of"),
        ("max_connections=0", "a whole number from 1 to 4096"),
        ("max_connections=²", "a whole number from 1 to 4096"),
        ("socket_read_size=1", "a whole number from 1024 to 16777216"),
        ("socket_keepalive=perhaps", "true or false"),
        ("ssl_check_hostname=", "true or false"),
        ("ssl_cert_reqs=optional", "required, or none"),
        ("ssl_min_version=TLSv1", r"771 \(TLS 1.2\) or 772 \(TLS 1.3\)"),
        ("ssl_ciphers=;", "a list of ciphers"),
        ("ssl_ca_path=", "an absolute path"),
        ("ssl_ca_certs=ca.pem", "an absolute path, since a node runs in /"),
        ("ssl_certfile=./c.pem", "an absolute path"),
        ("ssl_keyfile=~/k.pem", "an absolute path"),
        ("ssl_include_verify_flags=STRICT", "one or more of VERIFY_ALLOW_PROXY_CERTS"),
    ],
)
def test_a_wrong_value_names_the_option_and_what_is_allowed(option: str, allowed: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(StoreUrlError, match=f"the option {name} .*allowed: {allowed}"):
        parse(f"rediss://host?{option}")


def test_every_option_of_redis_py_works_or_is_refused_with_advice() -> None:
    """Of its URLs, and of the constructors that these are for."""
    kinds = (AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection)
    names = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    names |= set(URL_QUERY_ARGUMENT_PARSERS) | set(
        inspect.signature(ConnectionPool.__init__).parameters
    )
    for name in sorted(names - OF_CONSTRUCTORS_ONLY - {"db"}):
        options = read_options(f"{name}=", *GROUPS)
        assert f"{name} is not for store URLs: " in options.fault or (
            f"{name} has another value than allowed: " in options.fault
        ), options.fault


def test_an_unknown_option_is_named_unless_it_may_be_a_part_of_a_secret() -> None:
    def said(url: str) -> str:
        with pytest.raises(StoreUrlError) as caught:
            parse(url)
        return str(caught.value)

    assert "unknown option verify;" in said("redis://host?verify=hunter")
    assert "hunter" not in said("redis://host?verify=hunter")
    for url in (
        "redis://host?hunter",
        "redis://host?Hunter=x",
        "redis://host?hunter2=x",
        f"redis://host?{'hunter' * 7}=x",
        "redis://:1?hunter=x@host",
        "redis-sentinel://a/s?sentinel_password=x&hunter=y",
    ):
        assert "hunter" not in said(url).lower(), url


def test_an_unknown_scheme_names_the_allowed_ones() -> None:
    with pytest.raises(StoreUrlError) as caught:
        open_store("http://host")
    for scheme in ("redis", "redis-sentinel", "redis-cluster", "unix"):
        assert f"{scheme}://" in str(caught.value)
    for product in ("rediss", "valkey", "valkeys"):
        assert product in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "topology", "tls"),
    [
        ("unix", "standalone", False),
        ("redis", "standalone", False),
        ("valkey", "standalone", False),
        ("rediss", "standalone", True),
        ("valkeys", "standalone", True),
        ("redis-sentinel", "sentinel", False),
        ("valkey-sentinel", "sentinel", False),
        ("rediss-sentinel", "sentinel", True),
        ("valkeys-sentinel", "sentinel", True),
        ("redis-cluster", "cluster", False),
        ("valkey-cluster", "cluster", False),
        ("rediss-cluster", "cluster", True),
        ("valkeys-cluster", "cluster", True),
    ],
)
def test_schemes(scheme: str, topology: str, tls: bool) -> None:
    assert scheme in SCHEMES
    assert (StoreUrl(scheme).topology, StoreUrl(scheme).tls) == (topology, tls)


@settings(max_examples=examples(40))  # names from a regular expression take long to draw
@given(
    st.sampled_from(["redis-cluster", "valkeys-sentinel"]),
    st.lists(
        st.tuples(
            st.one_of(
                st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True),
                st.ip_addresses().map(str),
            ),
            st.integers(1, 65535),
        ),
        min_size=1,
        max_size=5,
    ),
    st.text(min_size=1, max_size=12),
    st.text(min_size=1, max_size=12),
)
def test_quoted_parts_are_decoded(
    scheme: str, hosts: list[tuple[str, int]], username: str, password: str
) -> None:
    listed = ",".join(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts
    )
    path = "/service/1" if "sentinel" in scheme else ""
    rest = f"{listed}{path}"
    taken = parse(f"{scheme}://{quote(username, safe='')}:{quote(password, safe='')}@{rest}")
    assert (taken.hosts, taken.username, taken.password) == (tuple(hosts), username, password)
    assert redact(f"{scheme}://{rest}") == f"{scheme}://{rest}"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://[::1]:6379", "redis://[::1]:6379"),
        ("redis://me:secret@host", "redis://***@host"),
        ("redis://:sec/r#t@host/1", "redis://***@host/1"),
        # What stands behind a '?' may be an option, and the '@' a character of it.
        ("redis://:sec/r?e#t@host/1", "redis://***"),
        ("redis-sentinel://a/s?sentinel_password=x@secret", "redis-sentinel://***"),
        ("redis://:secret", "redis://***"),
        ("redis://:sec/ret", "redis://***"),
        ("redis:///:secret@host", "redis://***@host"),
        ("redis:///secret", "redis://***"),
        ("redis://host#secret", "redis://***"),
        ("redis-cluster://a:1,[::1]:2", "redis-cluster://a:1,[::1]:2"),
        ("redis-cluster://me:secret@a:1,b", "redis-cluster://***@a:1,b"),
        ("redis-cluster://a,me:secret@b,c", "redis-cluster://***@b,c"),
        ("redis-cluster://a,me:secret", "redis-cluster://***"),
        (
            "rediss-sentinel://a,b:1/s/2?sentinel_password=secret&ssl_keyfile=/k",
            "rediss-sentinel://a,b:1/s/2?***&ssl_keyfile=/k",
        ),
        ("unix:///run/a@b?db=1&password=secret", "unix:///run/a@b?db=1&***"),
        (
            "redis://host?protocol=3&client_name=a&x=secret",
            "redis://host?protocol=3&client_name=a&***",
        ),
        ("unix://me:secret@/run/s", "unix://***@/run/s"),
        ("https://secret@host", "https://***"),
        ("secret@host", "***"),
        ("localhost:6379", "localhost:6379"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown


@given(
    st.text(
        st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=8, max_size=20
    ),
    st.sampled_from(
        [
            "redis://:{}@host", "redis://me:{}@host:1/0", "unix://:{}@/run/s", "rediss://:{}@h?x=1",
            "valkey://me:{}@[::1]", "redis://host?password={}", "redis://:{}@", "http://:{}@host",
            "redis://:{}", "redis://me:{}", "redis-cluster://:{}@a,b", "redis-cluster://a,:{}@b",
            "redis-cluster://:{}@a/1", "redis-sentinel://me:{}@a:1,b/s", "redis-sentinel://:{}@a,b",
            "redis-sentinel://a,b/s?sentinel_password={}", "rediss-sentinel://a/s/x?ssl=1&p={}",
            "redis-sentinel://me:{}@a/s?sentinel_password=other", "redis-cluster://a:1,me:{}",
        ]
    ),
)  # fmt: skip
def test_no_password_is_ever_shown(password: str, form: str) -> None:
    # After an '@' without an escape the rest is the host, if the form has no host, or the path of
    # a socket.
    has_host = ("@" in form or "?" in form) and not form.startswith("unix")
    assume("@" not in password or has_host)
    secret = f"zQ{password}Qz"
    url = form.format(secret)
    pieces = (secret, secret[:6], secret[-6:])
    shown = redact(url)
    refusal: StoreUrlError | None = None
    try:
        shown += repr(parse(url))
    except StoreUrlError as error:
        refusal = error
    if refusal is not None:
        shown += "".join(traceback.format_exception_only(refusal))
        assert refusal.__cause__ is None
        assert refusal.__context__ is None
    for piece in pieces:
        assert piece not in shown


@pytest.mark.processes
def test_a_store_imports_its_driver_when_it_is_opened() -> None:
    """redis-py takes longer to import than some commands take."""
    source = """
import sys
import store
store.redact("redis://192.0.2.1")
assert "hiredis" not in sys.modules and "redis" not in sys.modules
store.open_store("redis://192.0.2.1")
assert "hiredis" in sys.modules and "redis.asyncio.connection" in sys.modules
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=scaled(60))


@pytest.mark.processes
def test_parsing_a_url_reads_no_file() -> None:
    """A disk that hangs would be waited for without a time-out."""
    source = """
import sys
import store
opened = []
sys.addaudithook(lambda event, given: event == "open" and opened.append(given[0]))
with store.open_store("redis://127.0.0.1:1") as to_nobody:
    for _ in range(2):
        opened.clear()
        try:
            to_nobody.ping()
        except store.StoreUnavailable:
            pass
        else:
            raise SystemExit("somebody listens")
    assert not opened, opened
    open("/dev/null").close()
    assert opened
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=scaled(60))
