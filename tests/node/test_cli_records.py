"""`ls`, `show` and `stats`: what is shown of a store, at a terminal, in a pipe and as JSON."""

import re
import time
from typing import Any

import pytest
import torch

from command_line import (
    assert_refused,
    beating,
    boot_of,
    publish,
    run,
    run_at_terminal,
    run_json,
)
from lookup_buffer.client.buffer import EngineRank
from nodes import StartNode, key, wait_until
from servers import command
from store import BlockingStore, DeviceLocation, Publishing

SPACE, OTHER_SPACE = "a" * 64, "b" * 64
LONG_KEY = "0123456789abcdef" * 4


def keys(document: Any) -> set[str]:
    return {record["key"] for record in document["records"]}


# -- ls


def test_ls_json(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "photo", "alive-node", "dead-node")
    store.add_hits(SPACE, {"photo": 7})
    store.beat("dead-node", boot_of("dead-node"), 5)
    with beating(store, "alive-node"):
        document = run_json("ls", "--store-url", url)
    (record,) = document["records"]
    assert 0 < record.pop("age_seconds") < time.time()
    locations = sorted(record.pop("locations"), key=lambda location: location["node"])
    assert document["truncated"] is False
    assert record == {
        "namespace": SPACE, "key": "photo", "kind": "tensor", "dtype": "bfloat16",
        "shape": [729, 1152], "nbytes": 2 * 729 * 1152, "created": 1_700_000_000.0, "hits": 7,
        "device": None,
    }  # fmt: skip
    common = {"generation": 1, "checksum": "0000000000000abc", "offered": False, "lane": None}
    assert locations == [
        {"node": "alive-node", "boot": boot_of("alive-node"), "alive": True, **common},
        {"node": "dead-node", "boot": boot_of("dead-node"), "alive": False, **common},
    ]


def test_the_device_that_a_tensor_was_computed_on_is_named(
    start_node: StartNode, store: BlockingStore, url: str
) -> None:
    """By the engine that stored it first, also where another node has copied it."""
    nodes = [start_node(store_url=url) for _ in range(2)]
    image = key()
    for node in nodes:
        wait_until(lambda node=node: node.stats()["store_up"], 15.0)  # type: ignore[misc]
    seat = EngineRank("engine", 0, 1, device="H200")
    with nodes[0].client(engine=seat) as producer, nodes[1].client() as consumer:
        producer.insert(image, torch.ones(3))
        wait_until(lambda: consumer.has_caches([image]) == [True], 15.0)
        consumer.select(image)

        def shown() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = run_json("ls", "--store-url", url)["records"]
            return [record for record in found if record["key"] == image.text]

        wait_until(lambda: [len(record["locations"]) for record in shown()] == [2], 15.0)
        nodes[0].kill()
        command(url, "FLUSHALL")
        wait_until(lambda: bool(shown()), 60.0)  # the copy's node publishes it again
        text = run("show", image.text, "--store-url", url).stdout
    assert re.search(r"^device +H200$", text, re.MULTILINE)


def test_a_place_on_a_device_is_named_by_its_lane(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "photo", "alive-node")
    (record,) = store.locate(SPACE, ["photo"])
    assert record is not None
    device = DeviceLocation("alive-node", 1, "nccl", "0a" * 4, 41000, "f" * 12)
    store.publish_many([Publishing(record, record.locations[0], 60.0, device=device)])
    with beating(store, "alive-node"):
        (shown,) = run_json("show", "photo", "--store-url", url)["records"]
        said = run_json("why", "photo", "--store-url", url)["findings"]
    assert [copy["lane"] for copy in shown["locations"]] == ["nccl"]
    assert "and on a device there, by nccl" in said[0]["sentence"]


def test_a_restarted_node_does_not_hold_what_it_held_before(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "photo", "node.1")
    assert boot_of("node.1") == boot_of("node1")
    with beating(store, "node.1"):
        store.publish(
            *_moved(store, "photo", "node.1", "anotherboot"),
            ttl_seconds=60,
        )
        (record,) = run_json("ls", "--store-url", url)["records"]
    assert [location["alive"] for location in record["locations"]] == [False]


def _moved(store: BlockingStore, key: str, node: str, boot: str) -> tuple[Any, Any]:
    (record,) = store.locate(SPACE, [key])
    assert record is not None
    return record, record.locations[0]._replace(node=node, boot=boot)


def test_ls_filters(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "one", "n1")
    publish(store, SPACE, "two", "n1", "n2")
    publish(store, OTHER_SPACE, "three", "n2")
    assert keys(run_json("ls", "--store-url", url)) == {"one", "two", "three"}
    assert keys(run_json("ls", "--store-url", url, "--node", "n1")) == {"one", "two"}
    assert keys(run_json("ls", "--store-url", url, "--namespace", SPACE)) == {"one", "two"}
    assert keys(run_json("ls", "--store-url", url, "--namespace", "bbbb")) == {"three"}
    both = ("--namespace", "a", "--node", "n2")
    assert keys(run_json("ls", "--store-url", url, *both)) == {"two"}
    assert keys(run_json("ls", "--store-url", url, "--node", "nobody")) == set()
    assert keys(run_json("ls", "--store-url", url, "--namespace", "*" * 64)) == set()


def test_ls_pages_through_2000_records(store: BlockingStore, url: str) -> None:
    for number in range(2000):
        publish(store, SPACE if number % 2 else OTHER_SPACE, f"key{number}", "n1")
    everything = run_json("ls", "--store-url", url, "--limit", "0")
    assert keys(everything) == {f"key{number}" for number in range(2000)}
    assert len(everything["records"]) == 2000
    assert everything["truncated"] is False
    some = run_json("ls", "--store-url", url)
    assert len(keys(some)) == len(some["records"]) == 1000
    assert some["truncated"] is True
    exactly = run_json("ls", "--store-url", url, "--namespace", SPACE, "--limit", "1000")
    assert (len(exactly["records"]), exactly["truncated"]) == (1000, False)
    piped = run("ls", "--store-url", url, "--limit", "0").stdout.splitlines()
    assert len(piped) == 2001


def test_a_pipe_gets_everything_without_colours(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, LONG_KEY, "a-node-with-quite-a-long-name-4f2a", "other")
    output = run("ls", "--store-url", url, TERM="xterm-256color").stdout
    header, row = output.splitlines()
    assert header.split() == ["KEY", "TENSOR", "SIZE", "NODES", "HITS", "AGE"]
    assert row.split()[:3] == [LONG_KEY, "bfloat16", "729x1152"]
    assert "-a-node-with-quite-a-long-name-4f2a -other" in row
    assert "\x1b" not in output
    assert row == row.rstrip()


@pytest.mark.parametrize("arguments", [("ls",), ("nodes",), ("stats",), ("show", LONG_KEY)])
def test_a_terminal_of_80_columns_is_enough(
    store: BlockingStore, url: str, arguments: tuple[str, ...]
) -> None:
    node = "a-node-with-a-name-of-48-characters-4f2a-4f2a4f2"
    publish(store, SPACE, LONG_KEY, node, "other", shape=(12345, 67890))
    publish(store, OTHER_SPACE, LONG_KEY, node)
    store.add_stats(node, {"hits_local": 10**9, "misses_owner_dead": 10**9, "bytes_served": 2**50})
    store.beat(node, boot_of(node), 1)
    lines = run_at_terminal(*arguments, "--store-url", url)
    assert any(line.startswith("a-n") or LONG_KEY[:8] in line for line in lines), lines
    assert [line for line in lines if len(line) > 80] == []
    # The control: the same in a pipe is wider, so the terminal's width was really used.
    wide = run(*arguments, "--store-url", url).stdout.splitlines()
    assert arguments[0] == "nodes" or any(len(line) > 80 for line in wide)


def test_a_key_cannot_drive_the_terminal(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "evil\x1b[31m[bold]\nkey", "n1")
    for arguments in (("ls",), ("show", "evil")):
        output = run(*arguments, "--store-url", url).stdout
        assert "\x1b" not in output
        assert r"evil\x1b[31m[bold]\nkey" in output
    assert keys(run_json("ls", "--store-url", url)) == {"evil\x1b[31m[bold]\nkey"}


# -- show


def test_show_a_key(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "photo", "n1")
    publish(store, OTHER_SPACE, "photo", "n2")
    store.describe_namespace(SPACE, {"model": "siglip", "dtype": "bfloat16"})
    store.describe_namespace(OTHER_SPACE, {"model": "other"})
    document = run_json("show", "photo", "--store-url", url)
    assert document["gone"] == []
    parts = {record["namespace"]: record["namespace_parts"] for record in document["records"]}
    assert parts[SPACE] == {"model": "siglip", "dtype": "bfloat16"}
    assert set(parts) == {SPACE, OTHER_SPACE}
    (record,) = run_json("show", "photo", "--store-url", url, "--namespace", "bb")["records"]
    assert record["locations"][0]["node"] == "n2"
    text = run("show", "photo", "--store-url", url).stdout
    for word in ("siglip", "729x1152", "n1", SPACE, "1.6 MiB", "0000000000000abc"):
        assert word in text


def test_show_takes_the_beginning_of_a_key(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, LONG_KEY, "n1")  # in a namespace without a description
    publish(store, SPACE, "0199", "n1")
    assert keys(run_json("show", "0123", "--store-url", url)) == {LONG_KEY}
    assert_refused(run("show", "01", "--store-url", url), 2, "2 keys begin with", "0199")
    publish(store, SPACE, "0123", "n1")
    assert keys(run_json("show", "0123", "--store-url", url)) == {"0123"}


def test_show_prints_why_a_key_is_gone(store: BlockingStore, url: str) -> None:
    store.describe_namespace(SPACE, {"model": "siglip"})
    assert_refused(run("show", "photo", "--store-url", url), 1, "never published")
    publish(store, SPACE, "photo", "n1")
    store.withdraw(SPACE, "photo", "n1", reason="evicted")
    assert_refused(run("show", "photo", "--store-url", url), 1, "evicted")
    document = run_json("show", "photo", "--store-url", url, code=1)
    assert document == {
        "key": "photo",
        "records": [],
        "gone": [{"namespace": SPACE, "reason": "evicted"}],
    }


# -- stats


def test_stats(store: BlockingStore, url: str) -> None:
    assert run("stats", "--store-url", url).stdout.startswith("no counters")
    for node in ("n1", "n2"):
        store.beat(node, boot_of(node), 1)
    store.add_stats("n1", {"hits_local": 3, "misses_absent": 2, "bytes_fetched": 1 << 20})
    store.add_stats("n2", {"hits_remote": 4, "misses_absent": 1, "misses_stale": 5, "evicted": 6})
    document = run_json("stats", "--store-url", url)
    assert document["nodes"]["n1"] == {
        "hits_local": 3,
        "misses_absent": 2,
        "bytes_fetched": 1 << 20,
    }
    assert document["totals"] == {
        "bytes_fetched": 1 << 20, "evicted": 6, "hits_local": 3, "hits_remote": 4,
        "misses_absent": 3, "misses_stale": 5,
    }  # fmt: skip
    lines = [line.split() for line in run("stats", "--store-url", url).stdout.splitlines()]
    assert ["(all)", "3", "4", "0", "8", "0", "B", "1.0", "MiB", "0", "B"] in lines
    assert ["misses:", "stale", "5,", "absent", "3"] in lines
    assert ["others:", "evicted", "6"] in lines


def test_foreign_values_under_our_keys(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "photo", "n1")
    command(url, "SET", f"lb:hits:{SPACE}", "foreign")
    assert_refused(run("ls", "--store-url", url), 1, "lb:*")
    # A name that no namespace can have is passed over.
    command(url, "DEL", f"lb:hits:{SPACE}")
    command(url, "HSET", "lb:ns:not a name", "part", "value")
    assert keys(run_json("show", "photo", "--store-url", url)) == {"photo"}
