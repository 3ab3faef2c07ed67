"""docs/operations.md: its drills run on the compose file, and its runbook is complete."""

import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from deployment import Service, Stack, client_config, running_stack, why_not_contained
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import LookupTimeout, MissingTensor
from lookup_buffer.inspection.access import ExitCode
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from nodes import MIB, ROOT, key, tensor_of, wait_until
from patience import scaled

pytestmark = pytest.mark.processes

DOCUMENT = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
RULES = ROOT / "deploy/prometheus/rules.yml"
PATIENCE_SECONDS = scaled(120.0)

Pair = tuple[LookupBuffer, LookupBuffer]
"""A client on each host."""


@pytest.fixture
def stack() -> Iterator[Stack]:
    yield from running_stack("valkey", "node-a", "node-b")


def _client(stack: Stack, name: str) -> LookupBuffer:
    return LookupBuffer(client_config(stack, Service(name)), Namespace.named("drills"))


def _said(stack: Stack, name: str, *words: str) -> tuple[int, str]:
    """What a command prints there, on one line."""
    done = stack.execute(name, ["lookup-buffer", *words])
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def _quoted(sentence: str) -> str:
    """A pattern of a sentence that the document quotes, with any figures."""
    assert sentence in " ".join(DOCUMENT.split()), sentence
    return sentence


def _health(stack: Stack, name: str) -> tuple[int, str]:
    url = stack.translated(Service(name), "http://127.0.0.1:7731/healthz")
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.read().decode().strip()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode().strip()


def _wait_health(stack: Stack, name: str, status: int) -> None:
    wait_until(lambda: _health(stack, name)[0] == status, PATIENCE_SECONDS, f"{name}: {status}")


def _missed(buffer: LookupBuffer, name: TensorKey) -> str:
    with pytest.raises((MissingTensor, LookupTimeout)) as miss:
        buffer.select(name, timeout=0.5)
    return str(miss.value)


def _start(stack: Stack, name: str) -> None:
    stack.start(name, contained=why_not_contained() is None)
    stack.wait_healthy(name)


def _attached(buffer: LookupBuffer) -> None:
    wait_until(lambda: buffer.attached, PATIENCE_SECONDS, "the client attaches again")


def _known(buffer: LookupBuffer, *names: TensorKey) -> None:
    wait_until(lambda: all(buffer.has_caches(list(names))), PATIENCE_SECONDS, "it is found")


# -- the runbook


def test_every_alert_has_its_section_and_names_it() -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    _, _, runbook = DOCUMENT.partition("\n## Alerts\n")
    sections = re.findall(r"^### (\w+)$", runbook, flags=re.MULTILINE)
    assert sorted(sections) == sorted(rules)
    for name, rule in rules.items():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"


# -- the drills; each leaves all well, but for the last one


def _a_node_dies(stack: Stack, pair: Pair) -> None:
    here, there = pair
    name = TensorKey("on-a")
    here.insert(name, tensor_of("on-a", MIB))
    _known(there, name)
    stack.kill("node-a")
    assert _quoted("peer_failed") in _missed(there, name)
    wait_until(lambda: "owner_dead" in _missed(there, name), PATIENCE_SECONDS)
    _quoted("owner_dead")
    assert re.search(r"node-a no ", _said(stack, "node-b", "nodes")[1])
    history = _said(stack, "node-b", "why", "on-a")[1]
    assert _quoted("it is on node-a, which has sent no heartbeat for ") in history
    tail = "dead, frozen or cut off from the store, so no node fetches from it"
    assert _quoted(tail) in history
    _start(stack, "node-a")
    _attached(here)
    assert not here.has_caches([name])[0]
    here.insert(name, tensor_of("on-a", MIB))
    _known(there, name)


def _redis_stops(stack: Stack, pair: Pair) -> None:
    here, there = pair
    before, meanwhile = key(), key()
    here.insert(before, tensor_of("before", MIB))
    assert stack.stop("valkey") == 0
    there.insert(meanwhile, tensor_of("meanwhile", MIB))
    assert here.select(before) is not None
    assert _quoted("store_down") in _missed(here, meanwhile)
    _wait_health(stack, "node-a", 503)
    sentence = _quoted("the store is not reached: only what this host holds is found")
    assert _health(stack, "node-a")[1] == sentence
    code, text = _said(stack, "node-a", "doctor")
    assert code == ExitCode.FOUND
    assert _quoted("the node does not reach its store") in text
    assert _said(stack, "node-a", "nodes")[0] == ExitCode.UNREACHABLE
    stack.start("valkey", contained=why_not_contained() is None)
    _wait_health(stack, "node-a", 200)
    _known(here, meanwhile)
    _known(there, before)


def _valkey(stack: Stack, command: str) -> str:
    words = (
        f"REDISCLI_AUTH=$(cat /run/secrets/store_admin_password) valkey-cli -h 127.0.0.1 {command}"
    )
    translated = stack.translated(Service("valkey"), words)
    return stack.execute("valkey", ["/bin/sh", "-c", translated]).stdout.strip()


def _redis_loses_everything(stack: Stack, pair: Pair) -> None:
    here, there = pair
    names = [TensorKey(f"kept-{number}") for number in range(5)]
    for name in names:
        here.insert(name, tensor_of(str(name), MIB))
    _known(there, *names)
    assert _valkey(stack, "flushall") == "OK"
    wait_until(
        lambda: (
            set(re.findall(r"kept-\d", _said(stack, "node-b", "ls")[1]))
            == {f"kept-{number}" for number in range(5)}
        ),
        PATIENCE_SECONDS,
        "all of it is written again",
    )


@contextmanager
def _hanging(stack: Stack, name: str) -> Iterator[None]:
    os.kill(stack.pid(name), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(stack.pid(name), signal.SIGCONT)


def _redis_hangs(stack: Stack, pair: Pair) -> None:
    here, _ = pair
    name = key()
    here.insert(name, tensor_of("held", MIB))
    with _hanging(stack, "valkey"):
        assert here.select(name) is not None
        assert "store_down" in _missed(here, key())
        _wait_health(stack, "node-a", 503)
        assert here.select(name) is not None
    _wait_health(stack, "node-a", 200)


def _the_arena_is_full(stack: Stack, pair: Pair) -> None:
    here, _ = pair
    first, tensor = TensorKey("first"), tensor_of("large", 64 * MIB)
    here.insert(first, tensor)
    for _ in range(17):  # more than a gibibyte
        here.insert(key(), tensor)
    sentence = _quoted("it was evicted on node-a, whose arena was full")
    wait_until(lambda: sentence in _said(stack, "node-a", "why", "first")[1], PATIENCE_SECONDS)
    code, text = _said(stack, "node-a", "nodes")
    assert code == 0
    assert "of 1.0 GiB" in text or "1.0 GiB" in text


def _rewrite(stack: Stack, secret: str, text: str) -> None:
    path = stack.base / "deploy/secrets" / secret
    path.chmod(0o644)
    path.write_text(text)


ANOTHER_TOKEN = "that of another fleet"


def _a_wrong_token(stack: Stack, pair: Pair) -> None:
    """Node b has it from then on."""
    here, there = pair
    name = TensorKey("guarded")
    here.insert(name, tensor_of("guarded", MIB))
    _known(there, name)
    there.close()
    assert stack.stop("node-b") == 0
    _rewrite(stack, "token", ANOTHER_TOKEN)
    _start(stack, "node-b")
    with _client(stack, "node-b") as there:
        _known(there, name)
        assert "peer_failed" in _missed(there, name)
        told = _quoted("node-b could not fetch it from node-a")  # in the next turn of its writer
        wait_until(lambda: told in _said(stack, "node-b", "why", "guarded")[1], 10.0)
        assert re.search(r"node-a yes .*node-b yes ", _said(stack, "node-b", "nodes")[1])
        code, text = _said(stack, "node-b", "doctor")
        assert code == 1
        assert _quoted("refused by node-a at tcp://") in text


DRILLS = {
    "A node dies": _a_node_dies,
    "Redis stops": _redis_stops,
    "Redis loses everything": _redis_loses_everything,
    "Redis hangs": _redis_hangs,
    "The arena is full": _the_arena_is_full,
    "A wrong token": _a_wrong_token,
}


def test_every_drill_goes_as_documented(stack: Stack) -> None:
    """In one test, for services that a test has started end with it."""
    section = DOCUMENT.partition("\n## Failure drills\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.+)$", section, flags=re.MULTILINE) == list(DRILLS)
    with _client(stack, "node-a") as here, _client(stack, "node-b") as there:
        for drill in DRILLS.values():
            drill(stack, (here, there))


def test_the_password_of_the_store_is_rotated(stack: Stack) -> None:
    """As documented: no node is restarted, and all connections are cut at the end."""
    with _client(stack, "node-a") as here, _client(stack, "node-b") as there:
        before = TensorKey("before")
        here.insert(before, tensor_of("before", MIB))
        _known(there, before)
        assert "`ACL SETUSER lookup-buffer >new-password`" in DOCUMENT
        assert _valkey(stack, "acl setuser lookup-buffer '>new-password'") == "OK"
        old = stack.secret("store_password")
        _rewrite(stack, "store_password", "new-password")
        assert _said(stack, "node-a", "doctor")[0] == 0
        assert "`ACL SETUSER lookup-buffer <old-password`" in DOCUMENT
        assert _valkey(stack, f"acl setuser lookup-buffer '<{old}'") == "OK"
        assert "`CLIENT KILL USER lookup-buffer`" in DOCUMENT
        assert int(_valkey(stack, "client kill user lookup-buffer")) > 0
        after = TensorKey("after")
        here.insert(after, tensor_of("after", MIB))
        _known(there, before, after)
        assert there.select(after, timeout=PATIENCE_SECONDS) is not None
    assert _said(stack, "node-b", "doctor")[0] == 0
