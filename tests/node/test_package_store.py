"""A node on a store of another package, which has no mirror and cannot be browsed."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from command_line import assert_refused, run
from lookup_buffer.errors import LookupTimeout, MissingTensor, MissReason
from lookup_buffer.protocol.messages import ClaimOutcome
from nodes import NodeProcess, Nodes, StartNode, handoff, key, wait_until, with_store
from observing import Stream, get
from servers import free_port

PACKAGE = Path(__file__).parents[1] / "packages" / "ram_store"
URL = "ram://nodes"
NO_MIRROR = "this store has no mirror"


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    """The package of the store, in this process and in those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PACKAGE)
        patch.setenv("PYTHONPATH", str(PACKAGE), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def module_nodes(installed: None) -> Iterator[StartNode]:
    nodes = Nodes(URL)
    try:
        yield nodes
    finally:
        nodes.end()


@pytest.fixture(scope="module")
def node(module_nodes: StartNode) -> NodeProcess:
    # Executed, not forked: a fork has the paths of its parent.
    node = module_nodes(log_level="info", prelude="pass")
    with_store(node)
    return node


def settings_of(node: NodeProcess, url: str = URL) -> dict[str, str]:
    """Of commands that inspect it."""
    return {
        "LOOKUP_BUFFER_STORE_URL": url,
        "LOOKUP_BUFFER_DIRECTORY": str(node.config.runtime_directory()),
        "LOOKUP_BUFFER_CAPACITY_BYTES": str(node.config.capacity_bytes),
    }


def test_one_client_inserts_and_another_selects(node: NodeProcess) -> None:
    name, absent = key(), key()
    tensor = torch.arange(12).reshape(3, 4)
    with node.client() as producer, node.client() as reader:
        assert reader.has_caches([name], timeout=5.0) == [False]
        producer.insert(name, tensor)
        assert reader.has_caches([name, absent], timeout=5.0) == [True, False]
        found = reader.select(name)
        assert found is not None
        assert torch.equal(found, tensor)
        with pytest.raises(MissingTensor):
            reader.select(absent)
        with pytest.raises(LookupTimeout):
            reader.select(absent, timeout=0.1)
    wait_until(lambda: node.stats()["unpublished"] == 0, 5.0, "everything is published")
    stats = node.stats()
    assert stats[f"misses_{MissReason.ABSENT}"] > 0
    assert f"misses_{MissReason.STORE_DOWN}" not in stats, "the store has answered"


def test_claims_are_decided_by_the_store(node: NodeProcess) -> None:
    name = key()
    with node.client() as first, node.client() as second:
        granted = first.claim(name, lease_seconds=60.0)
        assert granted.outcome is ClaimOutcome.GRANTED
        assert granted.remaining_seconds > 0, "the store has answered"
        assert second.claim(name, lease_seconds=60.0).outcome is ClaimOutcome.HELD
        first.insert(name, torch.ones(2))
        stored = second.claim(name, lease_seconds=60.0, timeout=5.0)
        assert stored.outcome is ClaimOutcome.STORED


def test_a_hand_off_is_published_and_taken(node: NodeProcess) -> None:
    name = handoff()
    with node.client() as producer, node.client() as taker:
        producer.insert(name, torch.ones(3))
        found = taker.drop_select(name, timeout=5.0)
        assert found is not None
        assert torch.equal(found, torch.ones(3))
        with pytest.raises(MissingTensor):
            taker.drop_select(name)


def test_the_log_says_once_that_there_is_no_mirror(node: NodeProcess) -> None:
    assert node.config.mirrored
    assert node.log_text().count(NO_MIRROR) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",), ("ls", "--json"), ("show", "key"), ("show", "key", "--json"), ("why", "key"),
        ("why", "key", "--json"), ("stats",), ("top",), ("top", "--json"), ("invalidate", "a" * 64),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_that_browses_is_refused(node: NodeProcess, arguments: tuple[str, ...]) -> None:
    done = run(*arguments, **settings_of(node))
    assert_refused(done, 2, "RamStore cannot be browsed", "docs/stores.md")


def test_commands_that_need_the_core_only(node: NodeProcess) -> None:
    """Each process has a store of its own, so there are no nodes in theirs."""
    done = run("nodes", **settings_of(node))
    assert (done.returncode, done.stderr) == (0, "")
    assert "no nodes" in done.stdout
    done = run("doctor", "--json", **settings_of(node))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert checks["store"]["found"] == "ram://*** answers"
    assert checks["store version"]["verdict"] == "warn"
    assert "RamStore cannot be browsed" in checks["store version"]["found"]
    assert checks["fleet"]["found"] == "nodes alive: 0"
    assert checks["node's settings"]["verdict"] == "ok", "client and node name the same store"
    assert "store client" not in checks, "that is of Redis"


def test_the_dashboard_says_why_it_is_empty() -> None:
    nodes = Nodes(URL)
    try:
        node = nodes(http_listen=f"http://127.0.0.1:{free_port()}", prelude="pass")
        with Stream(node) as stream:
            assert "RamStore cannot be browsed" in stream.event("trouble")
        status, _, text = get(node, "/dashboard/why?key=a")
        assert status == 200
        assert "RamStore cannot be browsed" in json.loads(text)["problem"]
    finally:
        nodes.end()  # its observer too


def test_a_client_of_another_store_is_refused(node: NodeProcess) -> None:
    done = run("doctor", "--json", **settings_of(node, "ram://another"))
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert "store_url" in checks["node's settings"]["found"]


def test_a_package_that_cannot_be_used_ends_the_node_at_once(tmp_path: Path) -> None:
    for name in ("METADATA", "entry_points.txt"):
        text = (PACKAGE / "ram_store-1.dist-info" / name).read_text()
        text = text.replace("ram-store", "other-store").replace("ram = ram_", "other = missing_")
        folder = tmp_path / "other_store-1.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    done = run(
        "serve",
        LOOKUP_BUFFER_STORE_URL="other://x",
        LOOKUP_BUFFER_CAPACITY_BYTES="8MiB",
        LOOKUP_BUFFER_DIRECTORY=str(tmp_path / "d"),
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]),
    )
    assert_refused(done, 2, "'other-store'", "missing_store:open_store", "ModuleNotFoundError")
