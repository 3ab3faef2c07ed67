"""docs/redis-keys.md against real servers: its recipes are run, its figures measured again."""

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from lookup_buffer.pipes import open_pipe
from lookup_buffer.pipes.redis_dial import dial
from lookup_buffer.pipes.resp import Resp3Connection
from patience import scaled
from servers import command, flush
from store import LOCATIONS_MAX, ClaimState, EmbeddedServer, NodeInfo, layout, open_store
from store.testing.samples import BOOT, a_location, a_record

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "redis-keys.md").read_text(encoding="utf-8")
RECIPES = dict(
    re.findall(r"^### ([^\n]+)\n\n```sh\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
)
BIN_BYTES = 32  # allocators round up
KEY, GONE_KEY, LONG_KEY = "image-7f3a", "image-gone", "an image with spaces: " + "x" * 200

# What each recipe has to print, as lines of a regular expression.
PRINTED = {
    "Which namespaces are there, and what are they": r"lb:ns:{ns}\nmodel\nsome/model\n",
    "Who holds this key": r"(.*\n)*at:node-1\n{boot}:1:000000000000feed\n(.*\n)*",
    "The same for a key that is long or has odd characters": r"(.*\n)*key\nan image with (.*\n)*",
    "How long will its record live if nobody renews it": r"1[78]\d{{5}}\n",
    "Is it being encoded": r"node-1:{boot}:encoding:t1\n\d{{4}}\n",
    "Why is it gone": r"evicted:node-1\n",
    "Which nodes live": r"node-1\n{boot}:3\nnode-1\n{boot}:3\n",
    "Where is a node, how full is it, what has it counted": (
        r"(.*\n)*endpoint\ntcp://10.0.0.1:7000\n(.*\n)*hits_local\n3\n"
    ),
    "Which keys are hit most": r"{key}\n5\nother\n2\n",
    "All keys of a namespace": r"(lb:rec:{ns}:\{{[^}}]+\}}\n){{2}}",
    "How much memory does a record take": r"\d{{3}}\n",
    "Drop a namespace": r"1\n1\n1\n1\n1\n1\n",
}


@pytest.fixture
def filled(valkey_server: EmbeddedServer, namespace: str) -> EmbeddedServer:
    """A server with everything that the recipes read, written by the store itself."""
    flush(valkey_server.url)
    with open_store(valkey_server.url, call_timeout_seconds=5.0) as store:
        store.beat("node-1", BOOT, 3)
        info = NodeInfo("node-1", BOOT, "tcp://10.0.0.1:7000", "host", "0.1", 1 << 33, 12, 3)
        store.describe_node(info)
        store.describe_namespace(namespace, {"model": "some/model"})
        for key in (KEY, LONG_KEY, GONE_KEY):
            store.publish(a_record(namespace, key), a_location(), ttl_seconds=1800)
        store.withdraw(namespace, GONE_KEY, "node-1", reason="evicted")
        asked = {"holder": f"node-1:{BOOT}", "state": ClaimState.ENCODING, "lease_seconds": 9.5}
        assert store.claim(namespace, "wanted", token="t1", **asked).granted  # type: ignore[arg-type]
        store.add_hits(namespace, {KEY: 5, "other": 2})
        store.add_stats("node-1", {"hits_local": 3})
    return valkey_server


@pytest.fixture
def shell(filled: EmbeddedServer, namespace: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a person whose `redis-cli` reaches the server."""
    path = shlex.quote(unquote(filled.url.removeprefix("unix://")))
    real = shutil.which("redis-cli")
    standin = f"{sys.executable} {ROOT / 'tests' / 'support' / 'resp.py'} {path}"
    wrapper = tmp_path / "redis-cli"
    wrapper.write_text(f'#!/bin/sh\nexec {f"{real} -s {path}" if real else standin} "$@"\n')
    wrapper.chmod(0o755)
    variables = {"key": KEY, "wanted_key": "wanted", "gone_key": GONE_KEY, "long_key": LONG_KEY}
    return {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ns": namespace,
        "node": "node-1", **variables,
    }  # fmt: skip


def test_each_recipe_is_known() -> None:
    assert RECIPES.keys() == PRINTED.keys()


@pytest.mark.parametrize("title", PRINTED)
def test_a_recipe(title: str, shell: dict[str, str], namespace: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-euc", RECIPES[title]],
        env=shell, capture_output=True, text=True, timeout=scaled(30), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    wanted = PRINTED[title].format(ns=namespace, boot=BOOT, key=KEY)
    assert re.fullmatch(wanted, done.stdout), done.stdout


def test_a_namespace_is_removed_in_full(
    shell: dict[str, str], filled: EmbeddedServer, namespace: str
) -> None:
    subprocess.run(["/bin/sh", "-euc", RECIPES["Drop a namespace"]], env=shell, check=True)
    with open_store(filled.url, call_timeout_seconds=5.0) as store:
        assert store.locate(namespace, [KEY, LONG_KEY]) == [None, None]
        assert store.gone(namespace, GONE_KEY) is None
        assert store.namespaces() == {}
        assert store.hits(namespace, [KEY]) == [0]
    assert command(filled.url, "DBSIZE") == b":3", "what belongs to nodes is left"


def test_the_standin_prints_what_redis_cli_prints(filled: EmbeddedServer, namespace: str) -> None:
    real = shutil.which("redis-cli")
    if real is None:
        pytest.skip("no redis-cli on the PATH (make system-packages installs one)")
    path = unquote(filled.url.removeprefix("unix://"))
    for words in (
        ["HGETALL", layout.record(namespace, KEY)],
        ["ZREVRANGE", layout.hits(namespace), "0", "9", "WITHSCORES"],
        ["GET", "missing"],
        ["DBSIZE"],
        ["--scan", "--pattern", "lb:ns:*"],
    ):
        printed = [
            subprocess.run([*program, *words], capture_output=True, text=True, check=True).stdout
            for program in (
                [real, "-s", path],
                [sys.executable, str(ROOT / "tests" / "support" / "resp.py"), path],
            )
        ]
        assert printed[0] == printed[1], words


# ---- figures and tables


def test_every_key_of_the_layout_is_documented() -> None:
    assert layout.VERSION == "1"
    assert "Its version is **1**" in TEXT
    names = (
        layout.record("<ns>", "K"), layout.claim("<ns>", "K"), layout.gone("<ns>", "K"),
        layout.NODES, layout.node("<node>"), layout.namespace("<ns>"), layout.hits("<ns>"),
        layout.INVALID, layout.stats("<node>"), layout.fail("<ns>", "K"), layout.left("<node>"),
    )  # fmt: skip
    for name in names:
        assert f"| `{name.replace('{K}', '{<key>}')}` |" in TEXT


def test_the_memory_of_a_record_in_valkey(valkey_server: EmbeddedServer, namespace: str) -> None:
    _measure(valkey_server, namespace, column=1)


def test_the_memory_of_a_record_in_redis(redis_server: EmbeddedServer, namespace: str) -> None:
    _measure(redis_server, namespace, column=3)


def _measure(server: EmbeddedServer, namespace: str, *, column: int) -> None:
    """Records of one to four copies take the documented bytes, to the width of a bin."""
    flush(server.url)
    rows = [line.split("|")[1:-1] for line in re.findall(r"^\| [1-4] \|.*$", TEXT, re.MULTILINE)]
    keys = [secrets.token_hex(32) for _ in range(200)]
    with open_store(server.url, call_timeout_seconds=5.0) as store:
        for copies, row in enumerate(rows, start=1):
            node = f"gpu-host-0{copies}-{secrets.token_hex(4)}"
            for n, key in enumerate(keys):
                place = a_location(node, generation=50_000 + n, checksum=secrets.randbits(64))
                record = a_record(namespace, key, device="H200")
                store.publish(record, place, ttl_seconds=1800)
            names = [layout.record(namespace, key) for key in keys]
            used = [int(command(server.url, "MEMORY", "USAGE", name)[1:]) for name in names]
            least, _, most = row[column].strip().partition(" to ")
            assert int(row[0]) == copies
            assert int(least) <= min(used) + BIN_BYTES
            assert max(used) <= int(most or least) + BIN_BYTES
    assert len(rows) == LOCATIONS_MAX


def test_the_keys_of_a_pipe_are_documented(valkey_server: EmbeddedServer) -> None:
    rows = re.findall(r"^\| `(lb:pipe:[^`]+)` \|", TEXT, flags=re.MULTILINE)
    parts = {"<name>": "docs", "<session>": "[0-9a-f]{32}", "<frame>": r"\d+", "<i>": r"\d+"}
    patterns = []
    for row in rows:
        pattern = re.escape(row).replace(":up", ":(up|down)")
        for part, meaning in parts.items():
            pattern = pattern.replace(re.escape(part), meaning)
        patterns.append(pattern)
    flush(valkey_server.url)
    uri = f"{valkey_server.url}?pipe=docs"
    lane, seen, ended = (
        Resp3Connection(dial(valkey_server.url, 5.0)),
        set[bytes](),
        threading.Event(),
    )

    def look() -> None:
        while not ended.is_set():
            seen.update(lane.request((b"KEYS", b"*"), time.monotonic() + 5.0))

    with ExitStack() as stack:
        looking = threading.Thread(target=look)
        stack.callback(lane.close)
        stack.callback(looking.join)
        stack.callback(ended.set)
        looking.start()
        a = stack.enter_context(open_pipe(uri, listen=True))
        b = stack.enter_context(open_pipe(uri))
        deadline = time.monotonic() + 20.0
        while not {4, 5, 6} <= {name.count(b":") for name in seen}:  # frames, what was had, chunks
            assert time.monotonic() < deadline, seen
            b.send_tensor(torch.zeros(32 << 20, dtype=torch.uint8))
            a.recv_tensor()
    for name in seen:
        assert any(re.fullmatch(pattern, name.decode()) for pattern in patterns), name
