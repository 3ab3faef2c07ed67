"""`ec_connector_extra_config`: what is refused, in which words, and what is never shown."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.kv.engine import KvSettings, parse_kv_settings
from connectors.settings import ConnectorSettings, parse_settings
from lookup_buffer.config import SECRETS, memory_bytes
from lookup_buffer.errors import ConfigError


def test_nothing_set_is_fine() -> None:
    settings = parse_settings({})
    assert settings.store_url == "embedded"
    assert settings.pin_budget_bytes == settings.capacity_bytes // 4


def test_sizes_as_people_write_them() -> None:
    settings = parse_settings({"capacity_bytes": "512MiB", "prefetch_bytes": "1 MB"})
    assert settings.capacity_bytes == 512 << 20
    assert settings.pin_budget_bytes == 1_000_000
    assert settings.buffer_config().capacity_bytes == 512 << 20


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"capcity_bytes": 1}, ["'capcity_bytes'", "did you mean 'capacity_bytes'"]),
        ({"fetch_wait": 1}, ["'fetch_wait'", "did you mean 'fetch_wait_seconds'"]),
        ({"capacity_bytes": -5}, ["'capacity_bytes'", "-5", "allowed", "greater"]),
        ({"capacity_bytes": "many"}, ["'capacity_bytes'", "'many'", "allowed"]),
        ({"store_url": "not a url"}, ["'store_url'", "'not a url'", "redis://"]),
        ({"store_url": "http://h"}, ["'store_url'", "'http://***'", "redis://"]),
        ({"store_url": "redis:/h"}, ["'store_url'", "'redis:/h'", "redis://"]),
        ({"store_url": "redis://h:port"}, ["'store_url'", "'redis://***'", "port cannot be read"]),
        ({"fetch_wait_seconds": -1}, ["'fetch_wait_seconds'", "-1", "allowed"]),
        ({"metadata_wait_seconds": 601}, ["'metadata_wait_seconds'", "601", "600"]),
        ({"metadata_wait_seconds": "long"}, ["'metadata_wait_seconds'", "'long'", "allowed"]),
        ({"claim_wait_seconds": -1}, ["'claim_wait_seconds'", "-1", "allowed"]),
        ({"claim_lease_seconds": 0}, ["'claim_lease_seconds'", "0", "allowed"]),
        ({"ttl_seconds": 0}, ["'ttl_seconds'", "0", "allowed"]),
        # More than an insert may carry: each would be refused, long after the start.
        ({"ttl_seconds": 7 * 86_400}, ["'ttl_seconds'", "604800", "86400"]),
        ({"ttl_seconds": "inf"}, ["'ttl_seconds'", "inf", "86400"]),
        ({"record_ttl_seconds": "inf"}, ["'record_ttl_seconds'", "inf", "allowed"]),
        ({"idle_exit_seconds": 1e308}, ["'idle_exit_seconds'", "1e+308", "allowed"]),
        ({"capacity_bytes": "9" * 400}, ["'capacity_bytes'", "999", "allowed"]),
        (
            {"store_password_file": "x" * 5000},
            ["'store_password_file'", "xxx", "cannot be read: File name too long"],
        ),
        ({"required": "perhaps"}, ["'required'", "'perhaps'", "allowed"]),
        (
            {"store_password_file": "/no/such"},
            ["'store_password_file'", "/no/such", "cannot be read: No such file"],
        ),
        ({"read_only": True}, ["'read_only'", "'embedded'", "'store_url'"]),
        (
            {"read_only": True, "store_url": "redis://h", "device_lane": "gloo"},
            ["'read_only'", "'device_lane' is 'gloo'", "allowed with it: 'off'"],
        ),
        ({"token": "s"}, ["'token'", "vLLM prints", "'token_file'"]),
        ({"store_password": "s"}, ["'store_password'", "vLLM prints", "'store_password_file'"]),
        ({"store_url": "redis://u:s@h"}, ["'store_url'", "vLLM prints", "'store_password_file'"]),
    ],
)
def test_wrong_setting_is_named_in_one_line(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(raw)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_capacity_above_the_machines_memory() -> None:
    with pytest.raises(ConfigError, match=r"'capacity_bytes'.*memory of this machine"):
        parse_settings({"capacity_bytes": memory_bytes() + 1})


@pytest.mark.parametrize("parse", [parse_settings, parse_kv_settings])
def test_what_is_refused_here_is_not_proposed(parse: Callable[[dict[str, Any]], object]) -> None:
    """Secrets are refused in what vLLM prints."""
    for name in ("tokn", "htp_token", "store_pasword", "sentinel_password"):
        with pytest.raises(ConfigError, match="unknown setting") as caught:
            parse({name: 1})
        assert not any(f"'{secret}'" in str(caught.value) for secret in SECRETS), name
    with pytest.raises(ConfigError, match="allowed") as caught:
        parse({"zzz": 1})
    allowed = set(re.findall(r"'(\w+)'", str(caught.value))) - {"zzz"}
    kind = ConnectorSettings if parse is parse_settings else KvSettings
    assert allowed == kind.model_fields.keys() - set(SECRETS)


@pytest.mark.parametrize(
    "raw",
    [
        {"token": "s3cr3t", "capacity_bytes": -1},
        {"token": ["s3cr3t"]},
        {"store_password": {"x": "s3cr3t"}},
        {"tokn": "s3cr3t"},
        {"token": "s3cr3t"},
        {"store_url": "redis://user:s3cr3t@host"},
        {"store_url": "http://user:s3cr3t@host"},
        {"store_url": "redis://:s3cr3t"},
        {"store_url": "redis-cluster://:s3cr3t@a,b"},
        {"store_url": "redis-sentinel://a/service?sentinel_password=s3cr3t"},
    ],
)
def test_secret_is_never_shown(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(raw)
    assert "s3cr3t" not in str(caught.value)
    assert "s3cr3t" not in repr(caught.value)
    assert caught.value.__cause__ is None or "s3cr3t" not in str(caught.value.__cause__)


def test_secrets_from_files(tmp_path: Path) -> None:
    token, password = tmp_path / "token", tmp_path / "password"
    token.write_text("s3cr3t-s3cr3t-s3cr3t\n")
    password.write_text("pa55\n")
    settings = parse_settings({"token_file": str(token), "store_password_file": str(password)})
    config = settings.buffer_config()
    assert config.token is None
    assert config.token_file == token, "the node reads it, at its start"
    assert config.read_token() == "s3cr3t-s3cr3t-s3cr3t"
    assert config.store_password is None
    assert config.store_password_file == password, "the node reads it, at each connect"
    for text in (repr(settings), repr(config), str(config)):
        assert "s3cr3t" not in text
        assert "pa55" not in text


def test_empty_secret_file_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "secret"
    empty.touch()
    with pytest.raises(ConfigError, match=r"'store_password_file', .*secret, is empty"):
        parse_settings({"store_password_file": str(empty)})
    with pytest.raises(ConfigError, match=r"'token_file', .*secret, is empty"):
        parse_settings({"token_file": str(empty)}).read_token()


def test_settings_do_not_change() -> None:
    settings = ConnectorSettings()
    with pytest.raises(ValueError, match="frozen"):
        settings.required = True  # type: ignore[misc]
