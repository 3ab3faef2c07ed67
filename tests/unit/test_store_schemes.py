"""Stores of other packages: found by the scheme of a URL, opened, refused, and never shown."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.settings import parse_settings
from lookup_buffer.access import StoreAccess, check_store_url
from lookup_buffer.cli.options import refuse_password
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError
from lookup_buffer.inspection.access import CommandError
from store import StoreUrlError, open_async_store, redact

SECRET = "hunter2-hunter2"
OPENER = """
from store import MetadataStore, StoreUrlError

opened = []


class Core(MetadataStore):
    async def nothing(self, *_): ...

    publish_many = look_up = withdraw_many = claim = release_many = beat = leave = beats = nothing
    describe_node = node_infos = close = nothing


def open_store(url, **options):
    opened.append((url, options))
    return Core()


def open_with_fewer(url, *, password): ...
def open_incomplete(url, **_): return MetadataStore()
def open_other(url, **_): return object()
def open_refused(url, **_): raise StoreUrlError("in its own words")
def open_broken(url, **_): raise ValueError(f"cannot read {url}")
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(scheme="module:callable"): as if a package of that name were installed."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(*, package: str = "some-store", **entries: str) -> None:
        (tmp_path / "some_store.py").write_text(OPENER)
        (tmp_path / "broken_store.py").write_text("import no_such_module_of_theirs")
        information = tmp_path / f"{package.replace('-', '_')}-1.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1")
        lines = "\n".join(f"{scheme} = {value}" for scheme, value in entries.items())
        (information / "entry_points.txt").write_text(f"[lookup_buffer.stores]\n{lines}\n")

    yield install
    for name in ("some_store", "broken_store"):
        sys.modules.pop(name, None)


def refusal(url: str) -> str:
    with pytest.raises(StoreUrlError) as caught:
        open_async_store(url, password=SECRET)
    return str(caught.value)


def test_the_package_gets_the_url_and_all_options(install: Install) -> None:
    install(some="some_store:open_store")
    open_async_store(
        "Some://a/b?c",
        call_timeout_seconds=1.0,
        connect_timeout_seconds=2.0,
        password="p",
        sentinel_password="s",
        name="node",
    )
    import some_store  # type: ignore[import-not-found]

    options: dict[str, Any] = {
        "call_timeout_seconds": 1.0, "connect_timeout_seconds": 2.0, "password": "p",
        "sentinel_password": "s", "name": "node",
    }  # fmt: skip
    assert some_store.opened == [("Some://a/b?c", options)]
    access = StoreAccess("some://x", password=SECRET)
    access.check_passwords()
    access.check_files()
    access.open_async(access.actual_url(), 3.0, name="command")
    assert some_store.opened[1][1]["password"] == SECRET


def test_schemes_of_redis_are_built_in(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(redis="some_store:open_refused")
    monkeypatch.setattr(importlib.metadata, "entry_points", None)  # it is not called
    assert check_store_url("redis://host") == "redis://host"
    BufferConfig(store_url="valkeys-cluster://host")
    assert open_async_store("redis://host").has_mirror


def test_an_unknown_scheme_names_those_that_there_are(install: Install) -> None:
    assert "installed package (entry points of 'lookup_buffer.stores'): none" in refusal("http://h")
    install(some="some_store:open_store", other="some_store:open_store")
    said = refusal(f"http://{SECRET}")
    assert "redis-cluster://" in said
    assert "other://, some://" in said
    assert SECRET not in said
    with pytest.raises(ConfigError, match=r"'store_url'.*redis://.*some://"):
        BufferConfig.of({"store_url": "http://h"})
    with pytest.raises(ConfigError, match=r"'store_url'.*redis://.*some://"):
        StoreAccess.from_environment(store_url="http://h")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("broken_store:open_store", "ModuleNotFoundError: No module named 'no_such_module"),
        ("some_store:no_such_name", "AttributeError: .*no_such_name"),
        ("some_store:opened", "TypeError: 'list' object is not callable"),
        ("some_store:open_with_fewer", "TypeError: .*unexpected keyword argument"),
        ("some_store:open_incomplete", "TypeError: .*abstract.*publish_many"),
        ("some_store:open_other", "it returned object, no MetadataStore"),
        ("some_store:open_broken", "ValueError$"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(install: Install, value: str, words: str) -> None:
    install(some=value)
    with pytest.raises(StoreUrlError, match=words) as caught:
        open_async_store(f"some://{SECRET}")
    assert "'some://***'" in str(caught.value)
    assert "'some-store'" in str(caught.value)
    assert value in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value.__cause__}"


def test_a_package_refuses_a_url_in_its_own_words(install: Install) -> None:
    install(some="some_store:open_refused")
    assert refusal("some://x") == "in its own words"


def test_two_packages_with_one_scheme_are_refused(install: Install) -> None:
    install(some="some_store:open_store")
    install(package="another-store", some="some_store:open_other")
    assert "another-store, some-store; keep one" in refusal("some://x")


def test_nothing_of_the_url_is_shown(install: Install) -> None:
    install(**{"some-store": "some_store:open_store"})
    url = f"some-store://{SECRET}/{SECRET}?x={SECRET}"
    assert redact(url) == "some-store://***"
    assert redact(f"what {SECRET}://x") == "***://***"
    config = BufferConfig(store_url=url)
    assert SECRET not in f"{config!r} {config} {config.expectations()}"
    with pytest.raises(ConfigError) as caught:
        BufferConfig.of({"store_url": f"none://{SECRET}"})
    assert SECRET not in str(caught.value)


def test_clients_and_nodes_compare_the_places_of_their_stores(install: Install) -> None:
    install(some="some_store:open_store")

    def expected(url: str) -> object:
        return BufferConfig(store_url=url).expectations()["store_url"]

    assert expected("some://host/a") == expected("some://me:secret@host/a?secret=x")
    assert expected("some://host/a") != expected("some://host/b")


def test_a_url_with_a_user_is_kept_out_of_what_others_read(install: Install) -> None:
    install(some="some_store:open_store")
    assert parse_settings({"store_url": "some://host/a"}).store_url == "some://host/a"
    with pytest.raises(ConfigError, match=r"some://\*\*\*.*'store_password_file'"):
        parse_settings({"store_url": f"some://me:{SECRET}@host"})
    refuse_password("--store-url", "some://host/a")
    with pytest.raises(CommandError, match="--store-password-file"):
        refuse_password("--store-url", f"some://me:{SECRET}@host")
