"""The store's password changes while nodes run: nothing is restarted."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters import Sentinels
from command_line import assert_refused, run
from credential_providers import VARIABLE
from lookup_buffer import BufferConfig, LookupBuffer, Namespace
from lookup_buffer.errors import ConfigError
from lookup_buffer.runtime import to_json
from nodes import NodeProcess, StartNode, key, node_pids, tensor_of, wait_until, with_store
from rotation import NEW, OLD, RIGHTS, USER, rotate, rotating_user
from store import EmbeddedServer

FOUND_SECONDS = 10.0
SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture
def server(valkey_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    with rotating_user(valkey_server) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(OLD)
    return path


def exchanged(first: NodeProcess, second: NodeProcess) -> None:
    """What one node stores from now on the other one finds, by its mirror, and fetches."""
    fresh = key()
    with first.client() as here, second.client() as there:
        assert there.has_caches([fresh], timeout=FOUND_SECONDS) == [False]
        here.insert(fresh, tensor_of(str(fresh), 4096))
        wait_until(lambda: there.has_caches([fresh]) == [True], FOUND_SECONDS, "it is found")
        assert there.select(fresh, timeout=FOUND_SECONDS) is not None


def test_nodes_with_a_password_file(
    server: EmbeddedServer, file: Path, start_node: StartNode
) -> None:
    url = server.url.replace("unix://", f"unix://{USER}@")
    nodes = [start_node(store_url=url, store_password_file=file) for _ in range(2)]
    with_store(*nodes)
    exchanged(*nodes)
    rotate(server, lambda: file.write_text(NEW))
    exchanged(*nodes)
    for node in nodes:
        assert node.alive()
        assert OLD not in node.log_text()
        assert NEW not in node.log_text()


def test_nodes_with_a_credential_provider(
    server: EmbeddedServer, start_node: StartNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = tmp_path / "login"
    login.write_text(json.dumps([USER, OLD]))
    monkeypatch.setenv(VARIABLE, str(login))
    provider = "credential_providers:Asynchronous"
    nodes = [start_node(store_url=server.url, store_credential_provider=provider) for _ in range(2)]
    with_store(*nodes)
    exchanged(*nodes)
    rotate(server, lambda: login.write_text(json.dumps([USER, NEW])))
    exchanged(*nodes)


def test_nodes_behind_sentinels(
    own_sentinels: Sentinels, start_node: StartNode, file: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text(OLD)

    def on_all(*words: str) -> None:
        for one in (*own_sentinels.servers, *own_sentinels.sentinels):
            own_sentinels.ask(one, *words)

    on_all("ACL", "SETUSER", USER, f">{OLD}", *RIGHTS)
    hosts = own_sentinels.url.partition("@")[2].partition("?")[0]
    nodes = [
        start_node(
            store_url=f"redis-sentinel://{USER}@{hosts}?sentinel_username={USER}",
            store_password_file=file,
            store_sentinel_password_file=theirs,
        )
        for _ in range(2)
    ]
    with_store(*nodes)
    exchanged(*nodes)
    on_all("ACL", "SETUSER", USER, f">{NEW}")
    file.write_text(NEW)
    theirs.write_text(NEW)
    on_all("ACL", "SETUSER", USER, f"<{OLD}")
    on_all("CLIENT", "KILL", "USER", USER)
    exchanged(*nodes)
    own_sentinels.fail_over()
    wait_until(lambda: all(node.stats()["store_up"] for node in nodes), 20.0)
    exchanged(*nodes)


@pytest.mark.processes
def test_a_node_that_a_client_starts_gets_the_files_path(
    server: EmbeddedServer, file: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="lbc-") as directory:
        config = BufferConfig(
            store_url=server.url.replace("unix://", f"unix://{USER}@"),
            store_password_file=file,
            directory=Path(directory),
            capacity_bytes="8MiB",
            idle_exit_seconds=0.5,
        )
        assert OLD not in to_json(config)
        with LookupBuffer(config, Namespace.named("tests")) as buffer:
            wait_until(lambda: buffer.stats()["store_up"], FOUND_SECONDS)
            (pid,) = node_pids(Path(directory))
            for name in ("cmdline", "environ"):
                assert OLD.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
            rotate(server, lambda: file.write_text(NEW))
            buffer.insert(key(), tensor_of("a", 4096))
            wait_until(lambda: buffer.stats()["store_up"], FOUND_SECONDS)
        wait_until(lambda: not node_pids(Path(directory)), 20.0, "it ends when idle")


def test_one_way_to_give_a_password(file: Path) -> None:
    url = f"redis://{USER}@127.0.0.1:1"
    for given in (
        {"store_password_file": file},
        {"store_credential_provider": "credential_providers:Asynchronous"},
    ):
        config = BufferConfig(store_url=url, **given)
        assert config.store_password is None
    with pytest.raises(ConfigError, match="only one of 'store_password' and 'store_password_file'"):
        BufferConfig.of({"store_url": url, "store_password": OLD, "store_password_file": file})
    with pytest.raises(ConfigError, match="'store_password_file', /not/there, cannot be read"):
        BufferConfig.of({"store_url": url, "store_password_file": "/not/there"})
    with pytest.raises(ConfigError, match=r"_provider' is 'x\.y'; allowed: an import"):
        BufferConfig.of({"store_url": url, "store_credential_provider": "x.y"})


@pytest.mark.processes
def test_commands(server: EmbeddedServer, file: Path, tmp_path: Path) -> None:
    url = server.url.replace("unix://", f"unix://{USER}@")
    as_variables = {"LOOKUP_BUFFER_STORE_URL": url, "LOOKUP_BUFFER_STORE_PASSWORD_FILE": str(file)}
    assert run("ls", **as_variables).returncode == 0
    wrong = {**as_variables, "LOOKUP_BUFFER_STORE_PASSWORD": "wrong"}
    assert_refused(run("ls", **wrong), 2, "'store_password' and 'store_password_file'")
    done = run("ls", "--store-password-file", str(file), **wrong)
    assert done.returncode == 0, "an option replaces what the environment says"
    login = tmp_path / "login"
    login.write_text(json.dumps([OLD]))
    provided = {
        "LOOKUP_BUFFER_STORE_URL": url,
        "LOOKUP_BUFFER_STORE_CREDENTIAL_PROVIDER": "credential_providers:Blocking",
        "PYTHONPATH": str(SUPPORT),
        VARIABLE: str(login),
    }
    assert run("ls", **provided).returncode == 0
    provided["LOOKUP_BUFFER_STORE_CREDENTIAL_PROVIDER"] = "credential_providers:Missing"
    for command_ in ("ls", "serve"):
        words = ("'store_credential_provider'", "credential_providers:Missing", "AttributeError")
        assert_refused(run(command_, **provided), 2, *words)
