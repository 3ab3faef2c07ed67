"""`serve` and `nodes`: real nodes in the foreground, and how they show."""

import json
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_line import PROGRAM, assert_refused, environment, run, run_json
from lookup_buffer.config import SECRETS, BufferConfig
from lookup_buffer.errors import NodeUnavailable
from lookup_buffer.node.main import DESCRIPTORS
from lookup_buffer.runtime import node_socket
from lookup_buffer.times import SILENT_SECONDS
from nodes import StartNode, wait_until
from patience import scaled
from servers import alive
from store import EmbeddedServer, open_store

END_SECONDS = scaled(20.0)
Serve = Callable[..., "Served"]


class Served:
    """A `lookup-buffer serve`, from its ready line on."""

    def __init__(self, *arguments: str, **settings: str) -> None:
        self.process = subprocess.Popen(
            [PROGRAM, "serve", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(settings),
        )  # fmt: skip
        assert self.process.stdout is not None
        killer = threading.Timer(END_SECONDS, self.process.kill)
        killer.start()
        self.ready = self.process.stdout.readline()
        killer.cancel()
        killer.join()

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        """Exit code, and the output after the ready line."""
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=END_SECONDS)
        return self.process.returncode, output, errors


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lbc-") as path:  # short: sockets lie in it
        yield Path(path)


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[Served] = []

    def start(*arguments: str, **settings: str) -> Served:
        running.append(Served("--capacity-bytes", "8MiB", *arguments, **settings))
        return running[-1]

    yield start
    for served in running:
        if served.process.poll() is None:
            served.process.terminate()
        served.process.communicate(timeout=END_SECONDS)


def test_a_node_allows_itself_the_descriptors_that_its_connections_need(
    serve: Serve, directory: Path, valkey_server: EmbeddedServer
) -> None:
    """Also where a login shell or systemd allows 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        served = serve("--directory", str(directory), "--store-url", valkey_server.url)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    allowed, most = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
    assert allowed == min(DESCRIPTORS, most)


def test_a_start_that_hangs_is_given_up(directory: Path, valkey_server: EmbeddedServer) -> None:
    """The node reads files that a client does not, and one of a network's may not answer."""
    os.mkfifo(directory / "token", 0o600)
    config = BufferConfig(
        directory=directory,
        store_url=valkey_server.url,
        capacity_bytes=8 << 20,
        listen="tcp://127.0.0.1:0",
        token_file=directory / "token",
    )
    began = time.monotonic()
    with pytest.raises(NodeUnavailable, match="did not start"):
        node_socket(config, timeout=1.0)
    assert time.monotonic() - began < END_SECONDS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_prints_that_it_is_ready_and_ends_cleanly(
    serve: Serve, directory: Path, valkey_server: EmbeddedServer, number: signal.Signals
) -> None:
    arguments = ("--store-url", valkey_server.url, "--directory", str(directory))
    served = serve(*arguments, "--node-id", "host-a")
    assert served.ready.startswith(f"node host-a is ready: socket {directory}/node.sock, endpoint ")
    assert "endpoint tcp://127.0.0.1:" in served.ready
    assert served.ready.endswith(f"store {valkey_server.url}\n")
    assert (directory / "node.sock").is_socket()
    assert served.end(number) == (0, "", "")
    assert not (directory / "node.sock").exists()


def test_the_embedded_server_runs_with_the_node_and_can_be_inspected(
    serve: Serve, directory: Path
) -> None:
    served = serve("--directory", str(directory))
    document = _wait_for_node(directory)
    assert document["nodes"][0]["alive"] is True
    assert document["nodes"][0]["capacity_bytes"] == 8 << 20
    assert run_json("ls", "--directory", str(directory)) == {"records": [], "truncated": False}
    lines = (directory / "valkey").iterdir()
    assert any(path.is_socket() for path in lines)
    assert served.end(signal.SIGTERM)[0] == 0
    assert_refused(run("nodes", "--directory", str(directory)), 3, "no embedded server")


def _wait_for_node(directory: Path) -> dict[str, list[dict[str, object]]]:
    """The store is opened behind the node's back, so it comes a little after the ready line."""
    deadline = time.monotonic() + scaled(20.0)
    while time.monotonic() < deadline:
        done = run("nodes", "--directory", str(directory), "--json")
        if done.returncode == 0 and (document := json.loads(done.stdout))["nodes"]:
            assert isinstance(document, dict)
            return document
    raise AssertionError(done.stderr)


def test_a_second_node_in_a_directory_is_refused(
    serve: Serve, directory: Path, valkey_server: EmbeddedServer
) -> None:
    arguments = ("--store-url", valkey_server.url, "--directory", str(directory))
    served = serve(*arguments)
    assert_refused(run("serve", *arguments), 2, "a node already runs", str(directory))
    assert served.process.poll() is None


def test_options_win_over_the_file_and_the_file_over_the_environment(
    serve: Serve, directory: Path, valkey_server: EmbeddedServer
) -> None:
    file = directory / "settings.json"
    file.write_text(json.dumps({"node_id": "of-file", "store_url": valkey_server.url}))
    served = serve(
        "--config", str(file), "--directory", str(directory),
        LOOKUP_BUFFER_NODE_ID="of-environment", LOOKUP_BUFFER_NODE_SOCKET=f"{directory}/e.sock",
    )  # fmt: skip
    assert served.ready.startswith(f"node of-file is ready: socket {directory}/e.sock")
    served.end(signal.SIGTERM)
    served = serve("--config", str(file), "--directory", str(directory), "--node-id", "of-option")
    assert served.ready.startswith("node of-option is ready")


def test_every_setting_can_be_given() -> None:
    text = run("serve", "--help").stdout
    secrets = set(SECRETS)
    for name in BufferConfig.model_fields:
        option = f"--{name.replace('_', '-')}" + ("-file" if name in secrets else "")
        assert f"{option} " in text, option
    assert "--token " not in text
    assert "--store-password " not in text


def test_secrets_come_from_files_and_are_never_shown(
    serve: Serve, directory: Path, valkey_server: EmbeddedServer
) -> None:
    token = directory / "token"
    token.write_text("streng-vertraulich\n")
    served = serve(
        "--store-url", valkey_server.url, "--directory", str(directory),
        "--token-file", str(token), "--listen", "tcp://0.0.0.0:0",
        "--advertise", "tcp://127.0.0.1:1",
    )  # fmt: skip
    assert "is ready" in served.ready  # without a token it does not listen beyond loopback
    said = Path(f"/proc/{served.process.pid}/cmdline").read_text() + served.ready
    code, output, errors = served.end(signal.SIGTERM)
    assert code == 0
    assert "vertraulich" not in said + output + errors


def test_the_ready_line_has_the_address_of_the_metrics(
    serve: Serve, directory: Path, valkey_server: EmbeddedServer
) -> None:
    token = directory / "http-token"
    token.write_text("nur-fuer-die-zahlen\n")
    served = serve(
        "--store-url", valkey_server.url, "--directory", str(directory),
        "--http-listen", "http://127.0.0.1:0", "--http-token-file", str(token),
    )  # fmt: skip
    _, found, rest = served.ready.partition(", metrics http://127.0.0.1:")
    assert found, served.ready
    url = f"http://127.0.0.1:{rest.split('/')[0]}/metrics"
    request = urllib.request.Request(url, headers={"Authorization": "Bearer nur-fuer-die-zahlen"})
    with urllib.request.urlopen(request, timeout=10.0) as page:
        assert b"lookup_buffer_hits_total" in page.read()
    said = Path(f"/proc/{served.process.pid}/cmdline").read_text() + served.ready
    code, output, errors = served.end(signal.SIGTERM)
    assert code == 0
    assert "zahlen" not in said + output + errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--capacity-bytes", "-1"), ("capacity_bytes", "-1", "allowed")),
        (("--capacity-bytes", "1000TiB"), ("capacity_bytes", "memory of this machine")),
        (("--listen", "host"), ("listen", "tcp://host:port")),
        (("--listen", "tcp://192.0.2.1:80"), ("token",)),
        (("--http-listen", "http://0.0.0.0:7731"), ("http_token", "loopback")),
        (("--http-token-file", "/nonexistent"), ("--http-token-file", "No such file")),
        (("--token-file", "/nonexistent"), ("--token-file", "No such file")),
        (("--config", "/nonexistent"), ("--config", "No such file")),
        (("--store-url", "http://host"), ("store_url", "redis://")),
        (("--store-url", "redis://:geheim@host"), ("LOOKUP_BUFFER_STORE_URL",)),
    ],
)
def test_a_wrong_setting_is_2_and_named(
    directory: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = run("serve", "--directory", str(directory), *arguments)
    assert_refused(done, 2, *words)
    assert "geheim" not in done.stderr


@pytest.mark.parametrize(
    ("text", "word"), [("{", "not JSON"), ("[1]", "one JSON object"), ('{"sise": 1}', "sise")]
)
def test_a_wrong_file_is_2(directory: Path, text: str, word: str) -> None:
    file = directory / "settings.json"
    file.write_text(text)
    assert_refused(run("serve", "--config", str(file)), 2, word)


def test_a_directory_without_sockets_is_2(directory: Path) -> None:
    socket = directory / "no" / "such" / "folder.sock"
    done = run("serve", "--directory", str(directory), "--node-socket", str(socket),
               "--capacity-bytes", "8MiB")  # fmt: skip
    assert_refused(done, 2, "cannot run")


def test_a_node_without_clients_ends_if_so_configured(
    serve: Serve, directory: Path, valkey_server: EmbeddedServer
) -> None:
    served = serve(
        "--store-url",
        valkey_server.url,
        "--directory",
        str(directory),
        "--idle-exit-seconds",
        "0.5",
    )
    assert served.process.wait(END_SECONDS) == 0


def test_nodes_shows_which_are_alive_and_dead(
    start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    """Once they have been silent for as long as the command promises."""
    living, killed, stopped = start_node(), start_node(), start_node()
    silent = [killed.node_id, stopped.node_id]
    with open_store(valkey_server.url) as store:
        everybody = {living.node_id, *silent}
        wait_until(lambda: everybody <= store.beats().keys(), 10.0, "the nodes join")
        killed.kill()
        with stopped.frozen():
            wait_until(
                lambda: all(age > SILENT_SECONDS for age in store.node_ages(silent).values()),
                10.0,
                "both are silent",
            )
            found = run_json("nodes", "--store-url", valkey_server.url)["nodes"]
    state = {facts["node"]: facts["alive"] for facts in found}
    assert state[living.node_id] is True
    assert state[killed.node_id] is False
    assert state[stopped.node_id] is False
    (facts,) = [facts for facts in found if facts["node"] == living.node_id]
    assert sorted(facts) == [
        "alive", "boot", "capacity_bytes", "claims", "endpoint", "host", "items", "node",
        "pools", "used_bytes", "version",
    ]  # fmt: skip
    assert facts["pools"] == []
    assert facts["capacity_bytes"] == living.settings.capacity_bytes
    text = run("nodes", "--store-url", valkey_server.url).stdout
    assert f"{living.node_id}  yes" in text
    assert f"{killed.node_id}  no" in text
    assert "64.0 MiB" in text


def test_the_demo_explains_itself_and_passes_options_on() -> None:
    done = run("demo", "--help")
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout
    assert run("demo", "--no-such-option").returncode == 2


def test_an_ended_node_leaves_no_server_behind(serve: Serve, directory: Path) -> None:
    """The embedded server dies with a node that is killed, too."""
    served = serve("--directory", str(directory))
    _wait_for_node(directory)
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children")
    pids = [int(pid) for pid in children.read_text().split()]
    pids += _children_of_threads(served.process.pid)
    assert pids
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait(END_SECONDS)
    for _ in range(500):
        if not any(alive(pid) for pid in pids):
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"still there: {pids}")


def _children_of_threads(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
