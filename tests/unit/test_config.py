"""Settings: each wrong one is refused by name, with its value and what is allowed."""

import os
import secrets
from pathlib import Path

import pytest
from pydantic import ValidationError

from lookup_buffer.access import StoreAccess
from lookup_buffer.config import TLS_FILES, BufferConfig, memory_bytes
from lookup_buffer.dashboard.main import Start
from lookup_buffer.environment import parse_bytes
from lookup_buffer.errors import ConfigError
from lookup_buffer.node.links import Credentials

SECRET = "hunter2-hunter2-hunter2"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("512MB", 512_000_000),
        ("1.5g", 3 << 29),
        (" 64 mib ", 64 << 20),
        ("4096", 4096),
        ("100B", 100),
        (12345, 12345),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


WRONG = [
    ({"capacity_byte": 1 << 20}, ["capacity_byte", "did you mean 'capacity_bytes'"]),
    ({"zzz": 1}, ["zzz", "store_url"]),
    ({"capacity_bytes": -5}, ["capacity_bytes", "-5", "1048576"]),
    ({"capacity_bytes": "-5GiB"}, ["capacity_bytes", "-5GiB"]),
    ({"capacity_bytes": "lots"}, ["capacity_bytes", "lots", "a size as '8GiB'"]),
    ({"capacity_bytes": "900TiB"}, ["capacity_bytes", "900TiB", str(memory_bytes())]),
    ({"capacity_bytes": None}, ["capacity_bytes", "None"]),
    ({"store_url": "no url"}, ["store_url", "no url", "redis://"]),
    ({"store_url": "http://host"}, ["store_url", "redis://"]),
    ({"store_url": "redis://"}, ["store_url", "redis://"]),
    ({"store_url": "redis://host:99999"}, ["store_url", "host:99999"]),
    ({"store_url": "unix://relative/path"}, ["store_url", "unix://"]),
    ({"store_timeout_seconds": 0}, ["store_timeout_seconds", "0"]),
    ({"store_timeout_seconds": float("nan")}, ["store_timeout_seconds", "nan"]),
    ({"listen": "0.0.0.0:7"}, ["listen", "tcp://host:port"]),
    ({"listen": "tcp://host"}, ["listen", "tcp://host:port"]),
    ({"advertise": "tcp://host:7?\r\nflush_all\r\n"}, ["advertise", "tcp://host:port"]),
    ({"advertise": "tcp://host:7?query"}, ["advertise", "tcp://host:port"]),
    ({"advertise": "tcp://ho\tst:7"}, ["advertise", "tcp://host:port"]),
    ({"advertise": "tcp://user@host:7"}, ["advertise", "tcp://host:port"]),
    ({"advertise": "tcp://h\u00f6st:7"}, ["advertise", "tcp://host:port"]),
    ({"listen": "tcp://host:70000"}, ["listen", "tcp://host:70000"]),
    ({"listen": "tcp://0.0.0.0:0"}, ["'token_file'", "listen"]),
    ({"listen": "tcp://0.0.0.0:0", "token": SECRET}, ["advertise", "listen"]),
    ({"listen": "tcp://[::]:0"}, ["token", "listen"]),
    ({"advertise": "udp://host:1"}, ["advertise", "tcp://host:port"]),
    (
        {"advertise": "tcp://0.0.0.0:7"},
        ["'advertise' is 'tcp://0.0.0.0:7'", "no peer can", ":7730"],
    ),
    ({"advertise": "tcp://[::]:7"}, ["'advertise' is 'tcp://[::]:7'", "no peer can connect"]),
    ({"advertise": "tcp://10.0.0.7:0"}, ["'advertise' is 'tcp://10.0.0.7:0'", "no peer can"]),
    (
        {"listen": "tcp://127.0.0.1:99999"},
        ["'listen' is 'tcp://127.0.0.1:99999'; allowed: an address", "a port up to 65535"],
    ),
    ({"listen": "tcp://127.0.0.1:x"}, ["'tcp://127.0.0.1:x'; allowed: an address of the form"]),
    ({"listen": "tcp://[::1"}, ["'tcp://[::1'; allowed: an address of the form tcp://host:port"]),
    ({"http_listen": "http://127.0.0.1:99999"}, ["form http://host:port, with a port up to 65535"]),
    ({"directory": ""}, ["setting 'directory' is ''", "must not be empty"]),
    ({"token_file": ""}, ["setting 'token_file' is ''", "must not be empty"]),
    ({"node_socket": "~nobody-has-this-name/s"}, ["'node_socket'", "~nobody-has", "no home"]),
    ({"store_url": "rediss://h?ssl_ca_certs=ca.pem"}, ["ssl_ca_certs", "an absolute path"]),
    ({"node_id": "a b"}, ["node_id", "a b"]),
    ({"node_id": "n" * 49}, ["node_id"]),
    ({"record_ttl_seconds": 1}, ["record_ttl_seconds", "1"]),
    ({"idle_exit_seconds": -1}, ["idle_exit_seconds", "-1"]),
]


@pytest.mark.parametrize(("settings", "said"), WRONG)
def test_a_wrong_setting_is_named_with_its_value_in_one_line(
    settings: dict[str, object], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        BufferConfig.of(settings)
    message = str(caught.value)
    assert "\n" not in message
    for text in said:
        assert text in message


@pytest.mark.parametrize(
    "settings",
    [
        {"listen": "tcp://127.0.0.1:0"},
        {"listen": "tcp://[::1]:0"},
        {"listen": "tcp://localhost:0"},
        {"listen": "tcp://0.0.0.0:0", "advertise": "tcp://me:7", "token": SECRET},
        {"store_url": "unix:///run/valkey.sock"},
        {"store_url": "rediss://u:p@host:6380/2"},
        {"store_url": "REDIS-CLUSTER://u:p@host:6380,other"},
        {"store_url": "valkeys-sentinel://host,other:1/service/2"},
        {"capacity_bytes": "1MiB"},
    ],
)
def test_the_control_of_the_refusals(settings: dict[str, object]) -> None:
    BufferConfig.of(settings)


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@host/",
        f"redis://user:{SECRET}@",
        f"http://user:pa/{SECRET}@host",
        f"http://user:pa@{SECRET}@host",
        f"redis:user:{SECRET}@host",
        f"ftp://host/?password={SECRET}",
        f"redis://host/?password={SECRET}",
        f"redis://:{SECRET}",
        f"redis-sentinel://:{SECRET}@host,other",
        f"redis-sentinel://host/service/x?sentinel_password=a@{SECRET}",
        f"redis-cluster://:{SECRET}@host/1",
    ],
)
def test_a_password_in_a_url_is_never_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BufferConfig.of({"store_url": url})
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None or SECRET not in str(caught.value.__context__)


PATHS = ("directory", "node_socket", "store_password_file", "token_file", "tls_key_file")


def test_paths_mean_the_same_in_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It runs in /, and is sent them. `~` is the user's home, as in a shell."""
    (tmp_path / "run").write_text("pa55")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"listen": "tls://127.0.0.1:0", "node_id": "n"} | dict.fromkeys(TLS_FILES, "/f")
    for name in PATHS:
        for path in ("run", "./run", "~/run", Path("run"), tmp_path / "run"):
            config = BufferConfig.of({**given, name: path})
            assert getattr(config, name) == tmp_path / "run", (name, path)


def test_secrets_are_never_shown() -> None:
    config = BufferConfig(token=SECRET, store_password=SECRET)
    shown = f"{config!r} {config} {config.model_dump()} {config.expectations()}"
    assert SECRET not in shown
    with pytest.raises(ConfigError) as caught:
        BufferConfig.of({"token": [SECRET]})
    assert SECRET not in str(caught.value)
    config = BufferConfig(store_url=f"redis://:{SECRET}@host/0")
    assert SECRET not in f"{config!r} {config} {config.expectations()}"
    assert "redis://***@host/0" in repr(config)


def test_what_is_made_of_secrets_does_not_show_them() -> None:
    access = StoreAccess(f"redis://:{SECRET}@host/0", SECRET, SECRET)
    start = Start("node", 1, "/socket", 3, {"http_token": SECRET})
    for one in (Credentials(SECRET), access, start):
        assert SECRET not in f"{one!r} {one}"


@pytest.mark.parametrize("name", ["listen", "advertise"])
def test_a_scheme_in_capitals_is_not_taken_for_one_without_tls(name: str) -> None:
    given = {"listen": "tcp://0.0.0.0:7731", "advertise": "tcp://host:7731", "token": SECRET}
    BufferConfig.of(given)
    with pytest.raises(ConfigError, match=name):
        BufferConfig.of({**given, name: given[name].replace("tcp", "TLS")})


def test_it_does_not_change() -> None:
    with pytest.raises(ValidationError):
        BufferConfig().capacity_bytes = 1  # type: ignore[misc]


# -- the environment


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in BufferConfig.model_fields:
        monkeypatch.delenv(f"LOOKUP_BUFFER_{name.upper()}", raising=False)
    return monkeypatch


def test_settings_from_the_environment(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(f"{SECRET}\n")
    clean_environment.setenv("LOOKUP_BUFFER_CAPACITY_BYTES", "2MiB")
    clean_environment.setenv("LOOKUP_BUFFER_NODE_ID", "from-environment")
    clean_environment.setenv("LOOKUP_BUFFER_TOKEN_FILE", str(tmp_path / "token"))
    config = BufferConfig.from_environment(node_id="from-caller", listen=None)
    assert config.capacity_bytes == 2 << 20
    assert config.node_id == "from-caller"
    assert config.token is None
    assert config.token_file == tmp_path / "token", "only the node reads it"
    assert config.read_token() == SECRET
    assert BufferConfig.from_environment(token=SECRET[::-1]).read_token() == SECRET[::-1]


def test_a_wrong_environment_is_a_config_error(clean_environment: pytest.MonkeyPatch) -> None:
    clean_environment.setenv("LOOKUP_BUFFER_CAPACITY_BYTES", "-1")
    with pytest.raises(ConfigError, match="capacity_bytes"):
        BufferConfig.from_environment()
    clean_environment.delenv("LOOKUP_BUFFER_CAPACITY_BYTES")
    clean_environment.setenv("LOOKUP_BUFFER_TOKEN_FILE", "/does/not/exist")
    with pytest.raises(ConfigError, match="'token_file', /does/not/exist, cannot be read"):
        BufferConfig.from_environment().read_token()


def test_a_token_is_given_in_one_way() -> None:
    for name in ("token", "http_token"):
        with pytest.raises(ConfigError, match=f"set only one of '{name}' and '{name}_file'"):
            BufferConfig.of({name: SECRET, f"{name}_file": "/run/secrets/token"})


def test_an_empty_variable_counts_as_unset(clean_environment: pytest.MonkeyPatch) -> None:
    """For a node and for a command, so that both use the same settings."""
    usual, asking = BufferConfig.from_environment(), StoreAccess.from_environment()
    for name in ("DIRECTORY", "STORE_URL", "STORE_TIMEOUT_SECONDS", "STORE_PASSWORD", "TOKEN_FILE"):
        clean_environment.setenv(f"LOOKUP_BUFFER_{name}", "")
    assert BufferConfig.from_environment() == usual
    assert StoreAccess.from_environment() == asking


@pytest.mark.parametrize("path", ["run", "~/run"])
def test_a_directory_of_the_environment(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    """For a node and for a command, as above."""
    clean_environment.chdir(tmp_path)
    clean_environment.setenv("HOME", str(tmp_path))
    clean_environment.setenv("LOOKUP_BUFFER_DIRECTORY", path)
    for access in (BufferConfig.from_environment().store_access(), StoreAccess.from_environment()):
        assert access.directory == tmp_path / "run"
        assert access.actual_url() == f"unix://{tmp_path}/run/valkey/server.sock"
    clean_environment.setenv("LOOKUP_BUFFER_DIRECTORY", "~nobody-has-this-name")
    for read in (BufferConfig.from_environment, StoreAccess.from_environment):
        with pytest.raises(ConfigError, match=r"'directory' is '~nobody-has.*; allowed: a path"):
            read()


# -- the runtime directory


def test_the_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert BufferConfig(directory=path).runtime_directory() == path
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match="0700"):
        BufferConfig(directory=path).runtime_directory()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change the owner of a directory")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="12345"):
        BufferConfig(directory=path).runtime_directory()


def test_clients_and_nodes_compare_shared_settings() -> None:
    base = BufferConfig(capacity_bytes=1 << 20)
    assert base.expectations() == BufferConfig(capacity_bytes=1 << 20).expectations()
    for other in (
        BufferConfig(capacity_bytes=2 << 20),
        BufferConfig(capacity_bytes=1 << 20, store_url="redis://other"),
    ):
        assert base.expectations() != other.expectations()
    with_token = BufferConfig(capacity_bytes=1 << 20, token=secrets.token_hex(16))
    assert with_token.expectations() == base.expectations(), "a digest lets a token be guessed"


def test_a_client_needs_no_user_of_its_nodes_store() -> None:
    """It never calls the store; where that is has to be the same."""

    def place(url: str) -> object:
        return BufferConfig(store_url=url).expectations()["store_url"]

    assert place("redis://me:secret@host/0") == place("redis://host:6379")
    assert place("redis://me:secret@host/0") == place("rediss://host?ssl_ca_certs=/ca.pem")
    assert place("unix:///run/s?db=1") != place("unix:///run/s")
    others = ["redis://host", "redis://host/1", "redis://host:1", "redis-sentinel://host/name",
              "redis-sentinel://host/other", "redis-cluster://host"]  # fmt: skip
    assert len({place(url) for url in others}) == len(others)
    assert "secret" not in str(place("redis://me:secret@host/0"))
