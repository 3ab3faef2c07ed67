"""Store URLs: what is understood, what is refused with which words, and what is never shown."""

import subprocess
import sys
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import MemoryStore, StoreUrlError, open_store, redact
from store.url import SCHEMES, StoreUrl, parse

UNDERSTOOD = {
    "memory://": StoreUrl("memory"),
    "redis://host": StoreUrl("redis", "host"),
    "REDIS://host/": StoreUrl("redis", "host"),
    "redis://10.0.0.1:7000/2": StoreUrl("redis", "10.0.0.1", 7000, database=2),
    "valkey://host?db=3": StoreUrl("valkey", "host", database=3),
    "redis://[::1]:7000": StoreUrl("redis", "::1", 7000),
    "redis://:p%40ss%2Fword@host": StoreUrl("redis", "host", password="p@ss/word"),
    "redis://me:pw@host": StoreUrl("redis", "host", username="me", password="pw"),
    "unix:///run/a%20b%25.sock?db=1": StoreUrl("unix", path="/run/a b%.sock", database=1),
    "unix://me:pw@/run/s": StoreUrl("unix", path="/run/s", username="me", password="pw"),
    "unix:///run/a@b": StoreUrl("unix", path="/run/a@b"),
    "rediss://host?ssl_ca_certs=/etc/ca.pem": StoreUrl(
        "rediss", "host", tls_files=(("ssl_ca_certs", "/etc/ca.pem"),)
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
        ("memory://shared", "nothing follows"),
        ("redis://", "host is missing"),
        ("redis:///0", "host is missing"),
        ("redis://host:port", "cannot be read"),
        ("redis://host:99999", "cannot be read"),
        ("redis://[::1", "cannot be read"),
        ("redis://host/zero", "database is a number"),
        ("redis://host/-1", "database is a number"),
        ("redis://host/1?db=2", "twice"),
        ("redis://host?timeout=5", "unknown option"),
        ("redis://host?ssl_ca_certs=/x", "unknown option"),
        ("redis://host#1", "%23"),
        ("unix://run/valkey.sock", "absolute path"),
        ("unix://", "absolute path"),
    ],
)
def test_refused(url: str, words: str) -> None:
    with pytest.raises(StoreUrlError, match=words) as caught:
        open_store(url)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_scheme_is_told_what_is_allowed() -> None:
    with pytest.raises(StoreUrlError) as caught:
        open_store("http://host")
    for scheme in SCHEMES:
        assert f"{scheme}://" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://[::1]:6379", "redis://[::1]:6379"),
        ("redis://me:secret@host", "redis://***@host"),
        ("redis://:sec/r?e#t@host/1", "redis://***@host/1"),
        ("redis://:secret", "redis://***"),
        ("unix:///run/a@b?db=1&password=secret", "unix:///run/a@b?db=1&***"),
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
    ).filter(lambda text: "@" not in text),
    st.sampled_from(
        [
            "redis://:{}@host", "redis://me:{}@host:1/0", "unix://:{}@/run/s", "rediss://:{}@h?x=1",
            "valkey://me:{}@[::1]", "redis://host?password={}", "redis://:{}@", "http://:{}@host",
        ]
    ),
)  # fmt: skip
def test_no_password_is_ever_shown(password: str, form: str) -> None:
    secret = f"zQ{password}Qz"
    url = form.format(secret)
    pieces = [piece for piece in (secret, secret[:6]) if piece]
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


def test_memory() -> None:
    assert isinstance(open_store("memory://"), MemoryStore)


def test_redis_py_is_imported_by_the_first_store_that_needs_it() -> None:
    source = """
import sys
import store
store.open_store("memory://")
assert "redis" not in sys.modules and "asyncio" not in sys.modules
store.open_store("redis://192.0.2.1")
assert "redis" in sys.modules
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)
