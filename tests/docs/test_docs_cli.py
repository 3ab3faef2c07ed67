"""docs/cli.md: its examples are what the commands print, and it names every command and option."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from command_line import beating, boot_of, publish, run_at_terminal
from lookup_buffer.cli.commands import app
from lookup_buffer.inspection.access import ExitCode
from store import BlockingStore, NodeInfo

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
SPACE, OTHER_SPACE = "3b1e" * 16, "90c7" * 16
PHOTO, VIDEO, GONE = "5f0c9a61d2" * 4, "a4be117c05" * 4, "00d7e4f19b" * 4
EXAMPLES = {
    line.removeprefix("$ lookup-buffer "): text.rstrip("\n").split("\n")
    for line, text in re.findall(
        r"^```\n(\$ [^\n]+)\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE
    )
}


@pytest.fixture
def fleet(store: BlockingStore) -> Iterator[None]:
    """What the examples are about: two nodes that live and one that does not."""
    now = time.time()
    store.describe_namespace(SPACE, {"model": "siglip-so400m", "dtype": "float16"})
    store.describe_namespace(OTHER_SPACE, {"model": "siglip-so400m", "dtype": "bfloat16"})
    publish(store, SPACE, PHOTO, "host-a-4f2a", "host-b-91cc", created=now - 200)
    publish(store, SPACE, VIDEO, "host-c-07d1", shape=(4096, 1152), created=now - 7300)
    publish(store, SPACE, GONE, "host-a-4f2a")
    store.withdraw(SPACE, GONE, "host-a-4f2a", reason="evicted")
    publish(store, OTHER_SPACE, GONE, "host-b-91cc", created=now - 130)
    store.add_hits(SPACE, {PHOTO: 12, VIDEO: 1})
    store.beat("host-c-07d1", boot_of("host-c-07d1"), 7)
    for number, node in enumerate(("host-a-4f2a", "host-b-91cc")):
        store.describe_node(
            NodeInfo(
                node,
                boot_of(node),
                f"tcp://10.0.0.{number + 1}:7730",
                node[:6],
                "0.1",
                16 << 30,
                (3 + number) << 30,
                1830 + number,
            )
        )
        with beating(store, node):
            store.add_stats(
                node,
                {
                    "hits_local": 700, "hits_remote": 41 * number, "misses_absent": 120,
                    "misses_owner_dead": number, "bytes_inserted": 3 << 30,
                    "bytes_fetched": number << 28, "bytes_served": (1 - number) << 28,
                    "inserts_stored": 1830, "encodes": 120, "encode_milliseconds": 57_600,
                    "encodes_saved": 700 + 41 * number,
                },
            )  # fmt: skip
    with beating(store, "host-a-4f2a", "host-b-91cc"):
        yield


@pytest.mark.parametrize(
    "example", [one for one in EXAMPLES if one.split()[0] not in ("doctor", "top", "bench")]
)
def test_an_example_equals_the_output(fleet: None, url: str, example: str) -> None:
    printed = run_at_terminal(*example.split(), LOOKUP_BUFFER_STORE_URL=url)
    assert undated(printed) == undated(EXAMPLES[example])


def undated(lines: list[str]) -> list[str]:
    """What does not change with the day, or with how long the test took."""
    text = "\n".join(line.rstrip() for line in lines if line.strip())
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "(when)", text)
    return re.sub(r"\(\d s ago\)", "(now)", text).split("\n")


@pytest.mark.parametrize("name", ["doctor", "bench"])
def test_an_example_has_the_rows_that_are_printed(name: str, tmp_path: Path, url: str) -> None:
    """Where the numbers are the machine's."""
    (example,) = (one for one in EXAMPLES if one.startswith(name))
    arguments = [*example.split(), *(["--seconds", "0.2"] if name == "bench" else [])]
    printed = run_at_terminal(
        *arguments, LOOKUP_BUFFER_STORE_URL=url, LOOKUP_BUFFER_DIRECTORY=str(tmp_path / "d")
    )
    column = slice(0, 10) if name == "bench" else slice(6, 20)

    def rows(lines: list[str]) -> list[str]:
        found = [line[column].strip() for line in lines if line[:1].strip()]
        return [row for row in found if row]

    assert rows(EXAMPLES[example])[:3] == rows(printed)[:3]


def test_every_command_and_option_is_named() -> None:
    context = click.Context(app)
    commands = {name: app.get_command(context, name) for name in app.list_commands(context)}
    for name, one in commands.items():
        assert one is not None
        assert f"\n## {name}" in DOCUMENT
        section = DOCUMENT.split(f"\n## {name}")[1].split("\n## ")[0]
        if name in ("serve", "demo"):  # documented by their --help and docs/vllm.md
            continue
        for parameter in one.params:
            shared = parameter.name in ("store_url", "store_password_file", "directory", "json")
            text = DOCUMENT if shared else section
            if isinstance(parameter, click.Option):
                assert f"`{parameter.opts[0]}" in text, f"{name} {parameter.opts[0]}"
    known = {option for one in commands.values() if one for p in one.params for option in p.opts}
    known |= {option for parameter in app.params for option in parameter.opts} | {"--help"}
    assert set(re.findall(r"`(--[a-z-]+)", DOCUMENT)) <= known


def test_every_exit_code_is_documented() -> None:
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", DOCUMENT, re.MULTILINE)}
    assert told == set(ExitCode)
