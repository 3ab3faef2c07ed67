"""Tokens, from every source, and what listens beyond loopback without one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from connectors.settings import parse_settings
from lookup_buffer import BufferConfig
from lookup_buffer.device.lane import DeviceLane
from lookup_buffer.errors import ConfigError
from lookup_buffer.pipes import open_pipe
from store import StoreUrlError, open_store

GOOD = "0123456789abcdef"
BAD = {
    "a": "a",
    "fifteen characters": GOOD[1:],
    "as shipped for Kubernetes": "replace-me-1",
    "a long placeholder": "please-CHANGE_ME-before-use",
    "white space": " " * 32,
}
EVERYWHERE = ("--listen", "tcp://0.0.0.0:0", "--advertise", "tcp://192.0.2.1:7730")


def by_option(token: str, folder: Path) -> str:
    return refused("--token-file", written(token, folder))


def by_variable(token: str, folder: Path) -> str:
    return refused(LOOKUP_BUFFER_TOKEN=token)


def by_file(token: str, folder: Path) -> str:
    return refused(LOOKUP_BUFFER_TOKEN_FILE=written(token, folder))


def by_configuration_file(token: str, folder: Path) -> str:
    return refused("--config", written(json.dumps({"token": token}), folder))


def by_library(token: str, folder: Path) -> str:
    return error_of(lambda: BufferConfig.of({"token": token}))


def by_connector(token: str, folder: Path) -> str:
    return error_of(lambda: parse_settings({"token_file": written(token, folder)}).read_token())


def by_pipe(token: str, folder: Path) -> str:
    return error_of(lambda: open_pipe("tcp://127.0.0.1:0", listen=True, token=token))


def by_device_lane(token: str, folder: Path) -> str:
    return error_of(lambda: DeviceLane("gloo", pool_bytes=1 << 20, host="0.0.0.0", token=token))


def written(text: str, folder: Path) -> str:
    path = folder / "written"
    path.write_text(text)
    return str(path)


def refused(*arguments: str, **settings: str) -> str:
    """What `serve`, which is to listen everywhere, prints when it refuses its settings."""
    done = run("serve", *EVERYWHERE, *arguments, **settings)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def error_of(act: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


SOURCES = [
    by_option, by_variable, by_file, by_configuration_file, by_library, by_connector, by_pipe,
    by_device_lane,
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("token", BAD.values(), ids=BAD.keys())
def test_a_guessable_token_is_refused(
    source: Callable[[str, Path], str], token: str, tmp_path: Path
) -> None:
    said = source(token, tmp_path)
    assert "token" in said
    assert any(word in said for word in ("16 characters", "is empty", "not loopback")), said
    assert "replace-me-1" not in said
    assert "CHANGE_ME" not in said


@pytest.mark.parametrize("source", SOURCES)
def test_an_empty_token_is_refused(source: Callable[[str, Path], str], tmp_path: Path) -> None:
    assert "token" in source("", tmp_path)


def test_a_token_that_is_no_text_is_refused(tmp_path: Path) -> None:
    assert "can be printed" in by_variable("\udcff" * 32, tmp_path)


@pytest.mark.parametrize("name", ["token", "http_token"])
def test_the_token_for_the_metrics_has_the_same_rule(name: str) -> None:
    assert "16 characters" in error_of(lambda: BufferConfig.of({name: "replace-me-2"}))
    BufferConfig.of({name: GOOD})


def test_a_connector_listens_beyond_loopback_with_a_token_file(tmp_path: Path) -> None:
    """As documented in README."""
    settings = {
        "listen": "tcp://0.0.0.0:7730", "advertise": "tcp://192.0.2.1:7730",
        "device_lane": "gloo", "device_lane_host": "192.0.2.1",
    }  # fmt: skip
    config = parse_settings({**settings, "token_file": written(GOOD, tmp_path)}).buffer_config()
    assert config.read_token() == GOOD
    assert "'listen'" in error_of(lambda: parse_settings(settings))
    del settings["listen"], settings["advertise"]
    assert "'device_lane_host'" in error_of(lambda: parse_settings(settings))


@pytest.mark.parametrize("uri", ["tcp://0.0.0.0:0", "gloo://0.0.0.0:0", "tcp://[::]:0"])
def test_a_pipe_listens_beyond_loopback_with_a_token_only(uri: str) -> None:
    said = error_of(lambda: open_pipe(uri, listen=True))
    assert "pass token=" in said
    assert "setting" not in said
    open_pipe(uri, listen=True, token=GOOD).close()


def test_a_device_lane_listens_beyond_loopback_with_a_token_only() -> None:
    pool: dict[str, Any] = {"pool_bytes": 1 << 20, "host": "192.0.2.1"}
    said = error_of(lambda: DeviceLane("gloo", **pool))
    assert "pass token=" in said
    assert "setting" not in said
    said = error_of(lambda: DeviceLane("gloo", **pool, token=GOOD))
    assert "cannot listen at 192.0.2.1: Cannot assign" in said, "it tries to"


NAMED = "redis://alice@127.0.0.1:1/0"


def test_a_user_without_a_password_is_refused(tmp_path: Path) -> None:
    for done in (run("serve", "--store-url", NAMED), run("stats", "--store-url", NAMED)):
        assert done.returncode == 2, done.stdout + done.stderr
        assert "'store_password_file'" in done.stderr
    assert "'store_password_file'" in error_of(lambda: parse_settings({"store_url": NAMED}))
    said = error_of(lambda: open_pipe(f"{NAMED}?pipe=p", listen=True))
    assert "no password" in said
    assert "store_password" not in said, "a pipe has no such setting"
    assert "alice" not in said, "it may be a password, with its colon forgotten"
    with pytest.raises(StoreUrlError, match="'store_password'"):
        open_store(NAMED)
    sentinel = "redis-sentinel://127.0.0.1:1/service?sentinel_username=alice"
    with pytest.raises(StoreUrlError, match="'store_sentinel_password'"):
        open_store(sentinel)
    open_store(sentinel, sentinel_password="of the sentinels")
    password = {"store_password_file": written("hers", tmp_path)}
    assert parse_settings({"store_url": NAMED, **password}).buffer_config().store_url == NAMED


def test_the_user_part_of_a_url_is_not_shown() -> None:
    """It may be a password, with its colon forgotten."""
    assert "pa55word" not in run("stats", "--store-url", "redis://pa55word@127.0.0.1:1").stderr
