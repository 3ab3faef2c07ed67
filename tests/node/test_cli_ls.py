"""`ls`: its filters, and that it prints pages as it finds them, with any number of records."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from command_line import (
    PROGRAM,
    assert_refused,
    beating,
    boot_of,
    environment,
    publish,
    run,
    run_at_terminal,
    run_json,
)
from servers import command
from store import BlockingStore, NodeInfo, layout

SPACE, OTHER_SPACE = "a" * 64, "b" * 64


def describe(store: BlockingStore, node: str) -> None:
    store.beat(node, boot_of(node), 1)
    store.describe_node(NodeInfo(node, boot_of(node), "tcp://h:1", "h", "0.1", 1, 1, 1))


@contextmanager
def describing_itself(store: BlockingStore, node: str) -> Iterator[None]:
    """Again and again: a command may take seconds to start on a busy machine."""
    describe(store, node)
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.2):
            describe(store, node)

    describing = threading.Thread(target=go_on)
    describing.start()
    try:
        yield
    finally:
        over.set()
        describing.join()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), {"small-new", "large-old"}),
        (("--older-than", "1h"), {"large-old"}),
        (("--younger-than", "1h"), {"small-new"}),
        (("--older-than", "10", "--younger-than", "30 min"), {"small-new"}),
        (("--larger-than", "1MiB"), {"large-old"}),
        (("--smaller-than", "1MB"), {"small-new"}),
        (("--larger-than", "1", "--smaller-than", "2"), set()),
        (("--min-hits", "3"), {"large-old"}),
        (("--min-hits", "4"), set()),
    ],
)
def test_filters(
    store: BlockingStore, url: str, options: tuple[str, ...], wanted: set[str]
) -> None:
    publish(store, SPACE, "large-old", "n1", shape=(1024, 1024), created=time.time() - 7200)
    publish(store, SPACE, "small-new", "n1", shape=(4, 4), created=time.time() - 60)
    store.add_hits(SPACE, {"large-old": 3, "small-new": 2})
    describe(store, "n1")
    records = run_json("ls", "--store-url", url, *options)["records"]
    assert {record["key"] for record in records} == wanted


@pytest.mark.parametrize(
    ("option", "value"),
    [("--older-than", "soon"), ("--younger-than", "-1"), ("--larger-than", "big")],
)
def test_an_invalid_bound_is_2(url: str, option: str, value: str) -> None:
    done = run("ls", "--store-url", url, f"{option}={value}")
    assert_refused(done, 2, option, repr(value), "allowed")


def test_a_node_that_just_wrote_its_description_is_alive(store: BlockingStore, url: str) -> None:
    for key, nodes in (("k1", ("fresh", "dead")), ("k2", ("dead",)), ("k3", ("restarted",))):
        publish(store, SPACE, key, *nodes)
    store.beat("dead", boot_of("dead"), 7)
    store.beat("restarted", "another", 1)
    store.describe_node(NodeInfo("restarted", "another", "tcp://h:1", "h", "0.1", 1, 1, 1))
    with describing_itself(store, "fresh"):
        records = run_json("ls", "--store-url", url)["records"]
    alive = {r["key"]: {at["node"]: at["alive"] for at in r["locations"]} for r in records}
    assert alive == {
        "k1": {"fresh": True, "dead": False},
        "k2": {"dead": False},
        "k3": {"restarted": False},
    }


def test_where_no_node_may_describe_itself_beats_are_watched(
    store: BlockingStore, url: str
) -> None:
    """As on a server that is full, which takes beats and nothing else."""
    publish(store, SPACE, "k", "full")
    with beating(store, "full"):
        (record,) = run_json("ls", "--store-url", url)["records"]
    assert record["locations"][0]["alive"]


def test_many_pages(store: BlockingStore, url: str) -> None:
    """All is shown, each once, and the first page long before the last."""
    count = 30_000
    for start in range(0, count, 1000):
        names = [layout.record(SPACE, f"key{n}") for n in range(start, start + 1000)]
        fill(url, names)
    publish(store, OTHER_SPACE, "other", "n1")
    describe(store, "n1")
    with subprocess.Popen(
        [PROGRAM, "ls", "--store-url", url, "--limit", "0"],
        stdout=subprocess.PIPE, text=True, env=environment({}),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().split()[-6:] == [
            "KEY", "TENSOR", "SIZE", "NODES", "HITS", "AGE",
        ]  # fmt: skip
        first_row = process.stdout.readline()
        assert process.poll() is None, "the rest is still to come"
        lines = [first_row, *process.stdout]
    found = [line.split("key")[1].split()[0] for line in lines if "key" in line]
    assert sorted(map(int, found)) == list(range(count))
    assert sum("other" in line.split()[:2] for line in lines) == 1
    assert any(line.startswith("bbbbbbbb") for line in lines), "two namespaces are distinguished"
    document = run_json("ls", "--store-url", url, "--limit", "2000")
    assert (len(document["records"]), document["truncated"]) == (2000, True)
    whole = run_json("ls", "--store-url", url, "--limit", str(count + 1))
    assert (len(whole["records"]), whole["truncated"]) == (count + 1, False)


def fill(url: str, names: list[str]) -> None:
    fields = (
        "'v',1,'dtype','bfloat16','shape','[4]','nbytes',8,'kind','tensor','created',1,"
        f"'at:n1','{boot_of('n1')}:1:0000000000000abc'"
    )
    script = f"for _, name in ipairs(KEYS) do redis.call('HSET', name, {fields}) end"
    command(url, "EVAL", script, len(names), *names)


def test_pages_at_a_terminal_are_one_table(store: BlockingStore, url: str) -> None:
    fill(url, [layout.record(SPACE, f"key{n}") for n in range(3000)])
    describe(store, "n1")
    lines = run_at_terminal("ls", "--store-url", url, "--limit", "2500")
    heads = [line for line in lines if line.startswith("KEY")]
    assert len(heads) == 1
    assert sum(line.startswith("key") for line in lines) == 2500
    assert [line for line in lines if len(line) > 80] == []
    assert any("the first 2500 that were found" in line for line in lines)


def test_an_empty_list_as_json(url: str) -> None:
    assert run_json("ls", "--store-url", url) == {"records": [], "truncated": False}
