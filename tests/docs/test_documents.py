"""The documents against the code: names, commands, targets and links must exist."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lookup_buffer.inspection.findings import Code
from lookup_buffer.protocol import messages
from lookup_buffer.protocol.auth import PROTOCOL_VERSION
from patience import scaled
from store import MetadataStore, layout

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "docs/cli.md",
    "docs/compatibility.md",
    "docs/dashboard.md",
    "docs/decisions.md",
    "docs/gpu.md",
    "docs/library.md",
    "docs/metrics.md",
    "docs/network.md",
    "docs/operations.md",
    "docs/pipes.md",
    "docs/redis-keys.md",
    "docs/scale.md",
    "docs/security.md",
    "docs/stores.md",
    "docs/torture.md",
    "docs/tour.md",
    "docs/vllm.md",
    "docs/why.md",
)
LIBRARY = "".join(
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/library.md")
)
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs/cli.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", LIBRARY, flags=re.DOTALL | re.MULTILINE)


def test_the_library_examples_import_existing_names() -> None:
    for example in _blocks("python"):
        nodes = ast.walk(ast.parse(example))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        assert imports
        for node in imports:
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def test_the_example_of_a_pipe_runs() -> None:
    (example,) = [block for block in _blocks("python") if "open_pipe" in block]
    exec(compile(example, "docs/library.md", "exec"), {"torch": torch})


@pytest.mark.processes
def test_the_commands_that_are_listed_exist() -> None:
    named = set(re.findall(r"^lookup-buffer ([a-z]+) ", COMMANDS, flags=re.MULTILINE))
    assert len(named) >= 7
    run = subprocess.run(
        [Path(sys.executable).with_name("lookup-buffer"), "--help"],
        capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    missing = {name for name in named if not re.search(rf"\b{name}\b", run.stdout)}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^ *|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_linked_file_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not ((ROOT / document).parent / link).exists()]
    assert not missing


def _product() -> dict[str, str]:
    """The text of each file of the product, by its path."""
    paths = [
        path
        for folder in ("connectors", "examples", "lookup_buffer", "store")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".lua")
    ]
    return {f"/{path.relative_to(ROOT)}": path.read_text(encoding="utf-8") for path in paths}


def test_every_file_that_the_architecture_names_exists() -> None:
    named = set(re.findall(r"[\w/]+\.(?:py|lua)\b", ARCHITECTURE))
    assert len(named) > 50
    paths = _product()
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in paths)]
    assert not missing, "ARCHITECTURE.md names files that do not exist"


def test_every_folder_that_the_architecture_names_exists() -> None:
    named = set(re.findall(r"`([\w/]+/)`", ARCHITECTURE))
    assert len(named) > 10
    roots = [ROOT, ROOT / "connectors", ROOT / "lookup_buffer"]
    missing = [name for name in named if not any((root / name).is_dir() for root in roots)]
    assert not missing, "ARCHITECTURE.md names folders that do not exist"


def test_every_name_and_thread_that_the_architecture_gives_exists() -> None:
    text = "\n".join(_product().values())
    names = set(re.findall(r"`(_?[A-Za-z]\w+)`", ARCHITECTURE))
    threads = set(re.findall(r"\blb-[a-z]+", ARCHITECTURE))
    assert len(names) > 30
    assert len(threads) >= 6
    missing = {name for name in names if not re.search(rf"\b{name}\b", text)}
    missing |= {thread for thread in threads if f'"{thread}"' not in text}
    assert not missing, "ARCHITECTURE.md gives names that the product does not have"


def test_every_class_that_the_architecture_names_is_defined() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w*)`", ARCHITECTURE))
    assert len(named) > 8
    text = "\n".join(_product().values())
    missing = {name for name in named if not re.search(rf"^(?:class )?{name}\b", text, re.M)}
    assert not missing, "ARCHITECTURE.md names classes that the product does not have"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_todo_is_left(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    open_places = [line for line in text.splitlines() if "TODO" in line]
    assert not open_places


def test_the_numbers_that_an_upgrade_may_change_are_those_of_the_code() -> None:
    section = (ROOT / "docs/operations.md").read_text(encoding="utf-8").partition("## Upgrade")[2]
    numbers = re.findall(r"^\| [^|]+ \| [^|]+, now (\d+) \|", section, re.MULTILINE)
    assert numbers == [str(PROTOCOL_VERSION), str(messages.VERSION), layout.VERSION]


def test_every_code_of_why_is_explained() -> None:
    text = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `([a-z_]+)` \|", text.partition("## What it can say")[2], re.M)
    assert sorted(explained) == sorted(code.value for code in Code)


def test_the_methods_that_a_store_must_have_are_listed() -> None:
    text = (ROOT / "docs" / "stores.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", text.partition("## The core")[2], re.M)
    listed = {name for row in rows[:4] for name in re.findall(r"`(\w+)`", row)}
    assert listed == MetadataStore.__abstractmethods__
