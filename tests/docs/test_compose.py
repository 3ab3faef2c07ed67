"""docker-compose.yml: its contents, and that its services work; see `deployment`."""

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema
import pytest
import torch

from deployment import (
    TLS,
    Service,
    Stack,
    client_config,
    document,
    image_environment,
    running_stack,
    why_not_contained,
)
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import NodeRefused
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.auth import Purpose, connect
from nodes import MIB, ROOT, ClientProcess, key, tensor_of, wait_until
from patience import scaled
from servers import redis_executable, user_rule

pytestmark = pytest.mark.processes

SERVICES = sorted(document()["services"])
ENGINES = ("replica-a", "replica-b", "encoder", "consumer")
SCRAPED_SECONDS = 60.0
FOR_PIPES = ("&lb:pipe:*", "+subscribe", "+pubsub|numsub")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Valkey and the two nodes."""
    yield from running_stack("valkey", "node-a", "node-b")


def _ask(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=5
        ) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def _client(stack: Stack, name: str, **changed: Any) -> LookupBuffer:
    config = client_config(stack, Service(name)).model_copy(update=changed)
    return LookupBuffer(config, Namespace.named("compose"))


def _want(stack: Stack, *programs: str) -> None:
    for program in programs:
        if not (stack.base / "bin" / program).exists():
            pytest.skip(f"no {program} on the PATH (scripts/install-system-packages installs it)")


# -- its contents


def test_it_is_valid() -> None:
    """By the schema of the compose specification (of June 2026)."""
    schema = json.loads((ROOT / "tests/docs/compose-spec.json").read_text())
    checker = jsonschema.Draft7Validator(schema)
    checker.validate(document())
    checker.validate(document(TLS))
    broken = document() | {"services": {"node-a": {"mem_limits": "1g"}}}
    assert not checker.is_valid(broken)


def test_docker_compose_accepts_it(tmp_path: Path) -> None:
    """Debian's docker-compose, where it is installed: it needs no engine to read the file."""
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose on the PATH")
    done = subprocess.run(
        [program, "--file", str(ROOT / "docker-compose.yml"), "config", "--services"],
        capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    core = {name for name in SERVICES if "profiles" not in document()["services"][name]}
    assert core <= set(done.stdout.split())


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_only_the_rights_that_it_needs(name: str) -> None:
    service = document()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    uid, _ = Service(name).user
    assert uid > 0
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    tag = re.search(r":(local|v?\d+\.\d+[\w.-]*)$", Service(name).image)
    assert tag, "a version, never `latest`"
    variable = re.match(r"\$\{(\w+):-", service["image"])
    if tag[1] != "local":  # else it is built here
        assert variable
        pinned = f"registry.example/image:1@sha256:{'a' * 64}"
        assert Service(name, {variable[1]: pinned}).image == pinned
    secret = [name for name in Service(name).environment if re.search("PASSWORD|TOKEN", name)]
    assert all(name.endswith("_FILE") for name in secret)


def test_engines_reach_neither_valkey_nor_the_ports_of_nodes() -> None:
    services = document()["services"]
    theirs = {one for name in ENGINES for one in services[name]["networks"]}
    ours = {one for name in ("valkey", "node-a", "node-b") for one in services[name]["networks"]}
    assert theirs
    assert ours
    assert not theirs & ours
    assert set(services["balancer"]["networks"]) == theirs


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_may_not_write_to_the_folder_of_its_nodes_socket(name: str) -> None:
    (volume,) = Service(name).read_only_mounts
    assert volume in ("node-a", "node-b")


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_may_write_to_the_caches_of_libraries(name: str) -> None:
    volumes = {volume.split(":")[1] for volume in Service(name).raw["volumes"]}
    given = image_environment("vllm")
    for variable in ("HOME", "HF_HOME", "VLLM_CACHE_ROOT"):  # Triton's, FlashInfer's are in HOME
        assert any(f"{given[variable]}/".startswith(f"{place}/") for place in volumes), variable


def test_no_two_services_share_a_folder_that_one_of_the_engines_may_write() -> None:
    """Who may write in an engine's home runs code as that engine: its health check was enough."""
    mounts = {name: Service(name).raw.get("volumes", []) for name in SERVICES}
    for name in ENGINES:
        written = {one.split(":")[0] for one in mounts[name] if not one.endswith(":ro")}
        for other in mounts.keys() - {name}:
            assert not written & {one.split(":")[0] for one in mounts[other]}, (name, other)


def test_every_mount_exists_and_every_secret_is_made(tmp_path: Path) -> None:
    shutil.copy(ROOT / "deploy/make-secrets", tmp_path)
    for _ in range(2):  # the second time it changes nothing
        subprocess.run([tmp_path / "make-secrets"], check=True, timeout=scaled(30))
        made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
        assert len(set(made.values())) == len(made)
    assert {Path(each["file"]).name for each in document()["secrets"].values()} == set(made)
    shutil.copy(ROOT / "deploy/make-certificates", tmp_path)
    subprocess.run([tmp_path / "make-certificates"], check=True, timeout=scaled(30))
    both = {path.name for path in (tmp_path / "secrets").iterdir()}
    assert {Path(each["file"]).name for each in document(TLS)["secrets"].values()} == both
    assert {mode := path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()} == {
        0o644
    }, mode
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    for name in SERVICES:
        assert set(document()["services"][name].get("secrets", [])) <= set(made)
        for source, _ in Service(name).mounts:
            assert (ROOT / source).exists() if "/" in source else source in document()["volumes"]


# -- what it starts


def test_two_nodes_share_a_tensor(stack: Stack) -> None:
    name, tensor = key(), tensor_of("shared", MIB)
    with _client(stack, "node-a") as here, _client(stack, "node-b") as there:
        here.insert(name, tensor)
        got = there.select(name, timeout=10.0)
        assert got is not None
        assert got.equal(tensor)


def test_the_store_requires_a_password(stack: Stack) -> None:
    """A node has that of a user who can touch nodes' keys only; people have the other one."""
    service = Service("valkey")
    host = stack.translated(service, "127.0.0.1")

    def said(*words: str, secret: str | None = None) -> str:
        password = {} if secret is None else {"REDISCLI_AUTH": stack.secret(secret)}
        return subprocess.run(
            ["valkey-cli", "-h", host, *words], capture_output=True, text=True,
            timeout=scaled(30), env=stack.environment(service) | password, check=False,
        ).stdout  # fmt: skip

    node = ("--user", "lookup-buffer")
    assert said("dbsize").startswith("NOAUTH")
    assert int(said("dbsize", secret="store_admin_password")) > 0
    assert "node-a" in said(*node, "hgetall", "lb:nodes", secret="store_password")
    for words in (("flushall",), ("config", "get", "dir"), ("acl", "list"), ("get", "another")):
        assert said(*node, *words, secret="store_password").startswith("NOPERM"), words
    wrong = said("ping", secret="store_password")
    assert "PONG" not in wrong, "the node's password is not that of `default`"
    command = Path(f"/proc/{stack.pid('valkey')}/cmdline").read_bytes()
    for name in ("store_password", "store_admin_password"):
        assert stack.secret(name).encode() not in command
        assert (name in document()["services"]["node-a"]["secrets"]) == (name == "store_password")


def test_the_user_of_the_nodes_is_the_documented_one() -> None:
    """Without what pipes alone need."""
    documented = [word for word in user_rule("PASSWORD") if word not in FOR_PIPES]
    for overlay in (None, TLS):
        (rule,) = re.findall(
            r"^user lookup-buffer (.+)$", Service("valkey", overlay=overlay).command[-1], re.M
        )
        words = rule.replace("$(cat /run/secrets/store_password)", "PASSWORD").split()
        assert words == documented


def test_an_engine_has_no_secret_of_the_fleet() -> None:
    for name in ("replica-a", "replica-b", "encoder", "consumer"):
        assert "secrets" not in document()["services"][name]
        assert not re.search("password|token", " ".join(Service(name).command), re.I)


def test_a_node_requires_its_tokens(stack: Stack) -> None:
    service = Service("node-a")
    url = stack.translated(service, "http://127.0.0.1:7731")
    assert _ask(f"{url}/healthz") == (200, "ok\n")
    assert _ask(f"{url}/metrics")[0] == 401
    bearer = {"Authorization": f"Bearer {stack.secret('http_token')}"}
    status, page = _ask(f"{url}/metrics", **bearer)
    assert status == 200
    assert 'node="node-a"' in page
    host, _, port = Service("node-a").environment["LOOKUP_BUFFER_ADVERTISE"].rpartition(":")
    address = stack.translated(service, f"{host}:{port}")
    purpose = Purpose("tensors", address, "node-a")
    with pytest.raises(NodeRefused, match="token"):
        connect(*parse_tcp(address), token=None, timeout=10.0, purpose=purpose)
    with connect(*parse_tcp(address), token=stack.secret("token"), timeout=10.0, purpose=purpose):
        pass


def test_doctor_finds_nothing_wrong(stack: Stack) -> None:
    """As `docker compose exec node-a lookup-buffer doctor` runs it."""
    done = stack.execute("node-a", ["lookup-buffer", "doctor"])
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith(("fail", "warn"))]
    assert not [line for line in found if "store latency" not in line]  # of a busy machine


def test_prometheus_scrapes_both_nodes(stack: Stack) -> None:
    _want(stack, "prometheus", "wget")
    stack.start("prometheus", contained=why_not_contained() is None)
    stack.wait_healthy("prometheus")
    url = stack.translated(Service("prometheus"), "http://127.0.0.1:9090/api/v1")

    def result(path: str) -> Any:
        return json.loads(_ask(f"{url}/{path}")[1])["data"]

    def scraped() -> bool:
        found = result("query?query=lookup_buffer_build_info")["result"]
        return {each["metric"]["node"] for each in found} == {"node-a", "node-b"}

    wait_until(scraped, SCRAPED_SECONDS, "both nodes are scraped")
    # How long an arena lasts, as docs/operations.md has it.
    document = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    (expression,) = re.findall(r"^    (lookup_buffer_.+)$", document, flags=re.MULTILINE)
    asked = result("query?" + urllib.parse.urlencode({"query": expression}))
    assert asked["resultType"] == "vector"
    (group,) = result("rules")["groups"]
    assert len(group["rules"]) >= 8
    assert stack.stop("prometheus") == 0


class _Replica(BaseHTTPRequestHandler):
    """Answers as a healthy vLLM server, with the address of the request."""

    def do_GET(self) -> None:
        body = str(self.connection.getsockname()[0]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_balancer_sends_requests_to_healthy_engines(stack: Stack) -> None:
    _want(stack, "haproxy", "wget")
    replicas = {}
    for name in ("replica-a", "replica-b"):
        server = ThreadingHTTPServer((stack.addresses[name], 8000), _Replica)
        replicas[name] = server, Thread(target=server.serve_forever, daemon=True)
        replicas[name][1].start()
    try:
        stack.start("balancer", contained=why_not_contained() is None)
        stack.wait_healthy("balancer")
        url = stack.translated(Service("balancer"), "http://127.0.0.1:8000/v1/models")

        def answering() -> set[str]:
            return {answer for _ in range(8) for status, answer in [_ask(url)] if status == 200}

        both = {stack.addresses[name] for name in replicas}
        wait_until(lambda: answering() == both, 20.0, "both replicas answer")
        _end(*replicas.pop("replica-a"))
        left = {stack.addresses["replica-b"]}
        wait_until(lambda: answering() == left, 20.0, "the other one answers")
        assert all(_ask(url)[0] == 200 for _ in range(8))
    finally:
        for server, thread in replicas.values():
            _end(server, thread)
    assert stack.stop("balancer") in (0, 143)


def _end(server: ThreadingHTTPServer, thread: Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join(10.0)


# -- with TLS


@pytest.fixture
def encrypted() -> Iterator[Stack]:
    """Valkey and a node, by both files. The server is Debian's Redis: the wheel's has no TLS."""
    program = redis_executable()
    stack = Stack(TLS)
    server = stack.base / "bin/valkey-server"
    server.unlink()
    server.symlink_to(program)
    script = shutil.copy(ROOT / "deploy/make-certificates", stack.base / "deploy")
    names = [f"IP:{stack.addresses['valkey']}"]
    subprocess.run([script, *names], check=True, timeout=scaled(30))
    (stack.base / "deploy/secrets").chmod(0o755)  # as in `deployment`
    try:
        for name in ("valkey", "node-a"):
            stack.start(name, contained=why_not_contained() is None)
            stack.wait_healthy(name)
        yield stack
    finally:
        stack.end()


def test_with_tls_no_byte_to_the_store_is_in_clear(encrypted: Stack) -> None:
    """An engine of this file, which does not know of it, is served."""
    address = (encrypted.addresses["valkey"], 6379)
    with socket.create_connection(address, timeout=10.0) as plain:
        plain.sendall(b"PING\r\n")
        with suppress(ConnectionResetError):
            assert b"PONG" not in plain.recv(100)
    done = encrypted.execute("node-a", ["lookup-buffer", "nodes"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node-a" in done.stdout
    with _client(encrypted, "node-a") as engine:
        engine.insert(key(), tensor_of("t", MIB))
        assert engine.stats()["store_up"] == 1


# -- contained


@pytest.fixture
def contained(stack: Stack) -> Stack:
    if (reason := why_not_contained()) is not None:
        pytest.skip(reason)
    return stack


def test_a_node_runs_contained(contained: Stack) -> None:
    """So all other tests here ran under a container's limits."""
    pid = contained.pid("node-a")
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert fields["CapBnd"] == fields["CapEff"] == "0" * 16
    assert fields["NoNewPrivs"] == "1"
    assert fields["NSpid"].split()[-1] == "1"
    root = next(
        line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        if line.split()[4] == "/"
    )  # fmt: skip
    assert "ro" in root[5].split(",")


_TAKE_THE_SOCKET = """
import os, socket, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.config import BufferConfig
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
path = Path(sys.argv[2])
url, capacity = sys.argv[3:]
config = BufferConfig.of({"node_socket": path, "store_url": url, "capacity_bytes": capacity})
for attack in (
    path.unlink,
    lambda: path.rename(path.with_name("other")),
    lambda: socket.socket(socket.AF_UNIX).bind(str(path.with_name("mine.sock"))),
    lambda: os.symlink("/tmp", path.with_name("link")),
    lambda: path.parent.rename(path.parent.with_name("other")),
):
    try:
        attack()
    except OSError as error:
        print(error.strerror)
    else:
        print("done")
with LookupBuffer(config, Namespace.named("compose")) as buffer:
    print(bytes(buffer.select(TensorKey("true")).tolist()).decode())
"""


def test_an_engine_cannot_take_the_place_of_its_node(contained: Stack) -> None:
    """It would answer the engines of its host with forged bytes. It is the node's user."""
    engine, node = Service("replica-a"), Service("node-a")
    config = client_config(contained, node)
    with _client(contained, "node-a") as honest:
        honest.insert(TensorKey("true"), torch.tensor(list(b"true"), dtype=torch.uint8))
    given = (str(ROOT), str(config.node_socket), str(config.store_url), str(config.capacity_bytes))
    temporary = f"TMPDIR={contained.path(engine, '/tmp')}"  # of the engine's container
    program = ["env", temporary, sys.executable, "-P", "-c", _TAKE_THE_SOCKET, *given]
    done = contained.execute(engine.name, program)
    assert done.stdout.split("\n") == [*["Read-only file system"] * 5, "true", ""], done.stderr


def test_pins_of_an_engine_in_another_container_end_with_it(contained: Stack) -> None:
    """Its number means nothing to the node: it runs in another pid namespace."""
    config = client_config(contained, Service("node-a"))
    source = """
name = TensorKey("held")
buffer.insert(name, tensor_of("held", 10 << 20))
send(buffer.prefetch([name], timeout=5.0)[0].state.value)
receive()
"""
    with _client(contained, "node-a") as other:
        before = _of_clients(contained.pid("node-a"))
        with ClientProcess(config, source) as client:
            assert client.receive() == "resident"
            assert _of_clients(contained.pid("node-a")) > before
            assert other.stats()["pinned_bytes"] == 10 * MIB
            client.kill()
            wait_until(lambda: other.stats()["pins"] == 0, 10.0, "the pins are given back")
        wait_until(
            lambda: _of_clients(contained.pid("node-a")) == before, 10.0, "and its descriptors"
        )


def test_sigterm_ends_each_service_cleanly(stack: Stack) -> None:
    """The last one, for it takes the stack down. As the first process of a pid namespace, too."""
    assert stack.stop("node-b") == 0
    url = stack.translated(Service("node-a"), "http://127.0.0.1:7731/metrics")
    bearer = {"Authorization": f"Bearer {stack.secret('http_token')}"}
    left = "\nlookup_buffer_nodes_alive 1.0\n"
    wait_until(lambda: left in _ask(url, **bearer)[1], 10.0, "it took leave")
    assert [stack.stop(name) for name in ("node-a", "valkey")] == [0, 0]


def _of_clients(pid: int) -> int:
    """Descriptors that a node has of its clients: of their areas and processes. It opens others at
    any time, for Redis and its peers."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(path.readlink()))
    return sum("lookup-buffer-staging" in link or "pidfd" in link for link in links)
