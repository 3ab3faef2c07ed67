"""`why` as it is shown: at terminals, in pipes, as JSON; its errors on bad input."""

import subprocess
from unittest.mock import ANY

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
from patience import scaled
from servers import StartServer, command, patient
from store import BlockingStore, layout

SPACE, OTHER_SPACE = "a" * 64, "b" * 64
LONG_KEY = "0123456789abcdef" * 4


def test_json(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "photo", "alive-node")
    store.describe_namespace(SPACE, {"model": "siglip", "dtype": "bfloat16"})
    store.describe_namespace(OTHER_SPACE, {"model": "siglip", "dtype": "float16"})
    with beating(store, "alive-node"):
        document = run_json("why", "photo", "--store-url", url)
        other = run_json("why", "photo", "--namespace", "bb", "--store-url", url, code=1)
    common = {"key": "photo", "sentence": ANY, "hint": ANY}
    stored = {
        "code": "stored", "namespace": SPACE, "node": "alive-node", "seconds": ANY,
        "other_namespace": None, "differs": {}, **common,
    }  # fmt: skip
    elsewhere = {
        "code": "other_namespace", "namespace": OTHER_SPACE, "node": None, "seconds": None,
        "other_namespace": SPACE, "differs": {"dtype": ["float16", "bfloat16"]}, **common,
    }  # fmt: skip
    assert document == {"key": "photo", "found": True, "findings": [stored, elsewhere]}
    assert other == {"key": "photo", "found": False, "findings": [elsewhere]}


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal(store: BlockingStore, url: str, columns: int) -> None:
    node = "a-node-with-a-name-of-48-characters-4f2a-4f2a4f2"
    publish(store, SPACE, LONG_KEY, node, "alive-node")
    store.beat(node, boot_of(node), 1)
    store.describe_namespace(SPACE, {"model": "m" * 200})
    store.describe_namespace(OTHER_SPACE, {"model": "n" * 200})
    with beating(store, "alive-node"):
        lines = run_at_terminal("why", LONG_KEY[:8], "--store-url", url, columns=columns)
        piped = run("why", LONG_KEY[:8], "--store-url", url)
    assert [line for line in lines if len(line) > columns] == []
    flat = "".join("".join(lines).split())
    for text in (LONG_KEY, node, SPACE, "+storedonalive-node", "theydifferinmodel("):
        assert text in flat
    assert piped.returncode == 0
    assert f"key  {LONG_KEY}" in piped.stdout
    assert "\x1b" not in piped.stdout
    assert any(len(line) > 80 for line in piped.stdout.splitlines()), "a pipe's lines are whole"


def test_a_pipe_that_closes_early(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "photo", "n1")
    for reader in ("head -c 1", "true"):
        line = f'"$0" why photo --store-url "$1" | {reader}'
        done = subprocess.run(
            ["/bin/sh", "-c", line, PROGRAM, url],
            capture_output=True, text=True, timeout=scaled(60), check=False, env=environment({}),
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), "of the reader, and nothing said"


def test_a_part_of_a_key_is_enough(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, f"{LONG_KEY}#lora-1", "n1")  # in a namespace without a description
    publish(store, OTHER_SPACE, f"{LONG_KEY}#lora-1", "n1")
    document = run_json("why", LONG_KEY[8:20], "--store-url", url, code=1)
    assert document["key"] == f"{LONG_KEY}#lora-1"
    assert {one["namespace"] for one in document["findings"]} == {SPACE, OTHER_SPACE}
    publish(store, SPACE, f"{LONG_KEY}#lora-2", "n1")
    done = run("why", LONG_KEY, "--store-url", url)
    assert_refused(done, 2, "2 keys contain", "lora-1", "lora-2")
    other = run_json("why", LONG_KEY, "--store-url", url, "--namespace", "bbb", code=1)
    assert other["key"] == f"{LONG_KEY}#lora-1", "the only one there"
    publish(store, SPACE, LONG_KEY, "n1")
    assert run_json("why", LONG_KEY, "--store-url", url, code=1)["key"] == LONG_KEY


def test_a_key_cannot_drive_the_terminal(store: BlockingStore, url: str) -> None:
    publish(store, SPACE, "evil\x1b[31m[bold]\nkey", "n1")
    store.withdraw(SPACE, "evil\x1b[31m[bold]\nkey", "n1", reason="\x1b[31mred")
    store.describe_namespace(SPACE, {"model": "\x1b[31m"})
    output = run("why", "evil\x1b[31m[bold]\nkey", "--store-url", url).stdout
    assert "\x1b" not in output
    assert r"evil\x1b[31m[bold]\nkey" in output
    assert r"\x1b[31mred" in output


# -- bad input


@pytest.mark.parametrize(
    ("key", "said"),
    [("", "not a key"), ("%zz", "not a key"), ("\udcff", "not a key"), ("k" * 5000, "at most")],
)
def test_an_invalid_key_is_2(url: str, key: str, said: str) -> None:
    assert_refused(run("why", key, "--store-url", url), 2, said)


def test_an_empty_store_is_1(url: str) -> None:
    done = run("why", "photo", "--store-url", url)
    assert (done.returncode, done.stderr) == (1, "")
    assert "no trace of it" in done.stdout
    done = run("why", "photo", "--namespace", "abc", "--store-url", url)
    assert (done.returncode, done.stderr) == (1, "")
    assert "no namespace that begins with 'abc'" in done.stdout
    assert run("why", "photo", "--namespace", "*", "--store-url", url).returncode == 1


def test_every_output_has_a_sentence(store: BlockingStore, url: str) -> None:
    """The value means nothing: a claim that no node wrote."""
    store.describe_namespace(SPACE, {"model": "siglip"})
    command(url, "SET", layout.claim(SPACE, "photo"), "by hand", "EX", "60")
    publish(store, SPACE, "photo", "n1")
    command(url, "DEL", layout.record(SPACE, "photo"))
    for asked in ((), ("--namespace", SPACE)):
        (finding,) = run_json("why", "photo", "--store-url", url, *asked, code=1)["findings"]
        assert finding["code"] == "absent"


def test_foreign_values_are_a_sentence(store: BlockingStore, url: str) -> None:
    store.describe_namespace(SPACE, {"model": "siglip"})
    command(url, "SET", layout.record(SPACE, "photo"), "foreign")
    command(url, "HSET", layout.record(SPACE, "newer"), "v", "2")
    command(url, "RPUSH", "lb:rec:x:{photo}", "1")
    command(url, "HSET", "lb:rec:not a name:{photo}", "v", "1")
    assert "is a string" in run("why", "photo", "--store-url", url).stdout
    assert "of version 2" in run("why", "newer", "--store-url", url).stdout
    for reason in ("evi{ct}ed{0.__class__}", "{node}\n+    stored on n1, which lives"):
        command(url, "SET", layout.gone(SPACE, "braces"), f"{reason}:n1", "EX", "60")
        done = run("why", "braces", "--store-url", url)
        assert (done.returncode, done.stderr) == (1, "")
        assert len(done.stdout.splitlines()) == 4, "a text from the store is one line"
        assert f"it is gone from n1: {reason[:6]}" in done.stdout
    command(url, "SET", layout.NODES, "foreign")
    done = run("why", "photo", "--store-url", url)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_user_without_rights_is_3(start_server: StartServer) -> None:
    server = start_server()
    rights = ("reset", "on", "nopass", "~other:*", "+@read", "+@connection", "+select")
    assert command(server.url, "ACL", "SETUSER", "default", *rights) == b"+OK"
    done = run("why", "photo", "--store-url", server.url)
    assert_refused(done, 3, "NOPERM", "docs/redis-keys.md")


def test_a_read_only_user_is_enough(start_server: StartServer) -> None:
    server = start_server()
    with patient(server.url) as store:
        publish(store, SPACE, "photo", "n1")
    rights = ("reset", "on", "nopass", "~lb:*", "+@read", "+@connection", "-@dangerous")
    assert command(server.url, "ACL", "SETUSER", "default", *rights) == b"+OK"
    assert run_json("why", "pho", "--store-url", server.url, code=1)["key"] == "photo"
