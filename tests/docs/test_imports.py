"""The arrow examples -> connectors -> lookup_buffer -> store, and what may be loaded when.

The contracts live in pyproject.toml. Here they are run, and shown to be able to fail: each planted
import must be caught and named.
"""

import ast
import itertools
import json
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from patience import scaled

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("connectors", "examples", "lookup_buffer", "store")
HEAVY = ("torch", "numpy", "vllm", "redis", "pydantic")
FOLDERS_WITH_LAYERS = ("store", "lookup_buffer", "connectors")
PLANTED = [
    ("store/record.py", "lookup_buffer.errors"),
    ("store/record.py", "vllm"),
    ("store/record.py", "store.answers"),
    ("store/client.py", "store.mirror"),
    ("lookup_buffer/errors.py", "connectors"),
    ("lookup_buffer/errors.py", "examples.demo.model"),
    ("lookup_buffer/errors.py", "vllm.config"),
    ("lookup_buffer/errors.py", "torch"),
    ("lookup_buffer/errors.py", "numpy"),
    ("lookup_buffer/errors.py", "redis"),
    ("lookup_buffer/config.py", "lookup_buffer.runtime"),
    ("lookup_buffer/config.py", "store.testing"),
    ("lookup_buffer/config.py", "pytest"),
    ("lookup_buffer/key.py", "lookup_buffer.environment"),
    ("lookup_buffer/runtime.py", "lookup_buffer.node.main"),
    ("lookup_buffer/node/read.py", "lookup_buffer.codec"),
    ("lookup_buffer/node/read.py", "lookup_buffer.cli.why"),
    ("lookup_buffer/device/pool.py", "lookup_buffer.node.devices"),
    ("lookup_buffer/pipes/pipe.py", "lookup_buffer.node.read"),
    ("lookup_buffer/client/load.py", "lookup_buffer.node.read"),
    ("lookup_buffer/inspection/access.py", "lookup_buffer.node.membership"),
    ("lookup_buffer/cli/commands.py", "lookup_buffer.node.membership"),
    ("connectors/paged.py", "redis.client"),
    ("connectors/paged.py", "pickle"),
    ("connectors/paged.py", "examples.demo.engine"),
    ("connectors/paged.py", "connectors.kv.metadata"),
    ("connectors/ec/shape.py", "connectors.kv.metadata"),
    ("connectors/kv/metadata.py", "connectors.ec.shape"),
    ("examples/__init__.py", "pickle"),
]
"""Files, and modules that they may not import."""


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"],
        cwd=folder, capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip


def _loaded_by(module: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after importing the module."""
    code = (
        f"import json, sys, {module}\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout))


def _modules(root: Path) -> dict[str, Path]:
    """The modules of our packages below `root`, by name."""
    modules = {}
    for path in sorted(file for name in PACKAGES for file in (root / name).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _circle(root: Path) -> list[str]:
    """The modules of one import circle, in order; empty without one.

    Counts imports inside functions and those for type checkers alone. That a module's package is
    imported with it does not count.
    """
    modules = _modules(root)
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    names.add(name if name in modules else node.module)
        graph[module] = names & modules.keys() - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", root)
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            root / package,
            ignore=shutil.ignore_patterns("*.jpg", "__pycache__"),
        )
    return root


@pytest.fixture(scope="module")
def reported(copy: Path) -> list[str]:
    """What import-linter prints of a copy with all that is planted.

    One run for all: a forbidden import that is a chain by itself is on a line of its own.
    """
    for module, imported in PLANTED:
        # Inside a function, where a check of the top of the file would miss it.
        with (copy / module).open("a") as file:
            file.write(f"\n\ndef planted() -> None:\n    import {imported}\n")
    for folder in FOLDERS_WITH_LAYERS:
        (copy / folder / "planted.py").touch()
    run = _lint_imports(copy)
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stdout.splitlines()


def test_the_contracts_hold() -> None:
    run = _lint_imports(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(("module", "imported"), PLANTED)
def test_a_planted_import_is_caught(reported: list[str], module: str, imported: str) -> None:
    importer = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    # Of packages that are not ours, import-linter names the top alone.
    shown = imported if imported.split(".")[0] in PACKAGES else imported.split(".")[0]
    alone = re.compile(rf"- +{re.escape(importer)} -> {re.escape(shown)} \(l\.[0-9]+\)")
    # A chain goes on in lines that are indented.
    assert any(
        alone.fullmatch(line) and not after.startswith(" ")
        for line, after in itertools.pairwise(reported)
    ), "\n".join(reported)


@pytest.mark.parametrize("folder", FOLDERS_WITH_LAYERS)
def test_a_new_module_needs_a_place_among_the_layers(reported: list[str], folder: str) -> None:
    assert f"- {folder}.planted" in reported


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not _circle(ROOT)


@pytest.mark.parametrize(
    "back",
    [
        "from store import first\n",
        "import store.first\n",
        "from store.first import Name\n",
        "def late() -> None:\n    from store.first import Name\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from store.first import Name\n",
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, back: str) -> None:
    package = tmp_path / "store"
    package.mkdir()
    (package / "__init__.py").write_text("from store.first import Name\n")
    (package / "first.py").write_text("from store.second import helper\nclass Name: ...\n")
    (package / "second.py").write_text("import store.third\n")
    (package / "third.py").write_text("import os\n")
    assert not _circle(tmp_path)
    (package / "third.py").write_text(back)
    assert set(_circle(tmp_path)) == {"store.first", "store.second", "store.third"}


def test_the_command_line_loads_nothing_heavy() -> None:
    assert _loaded_by("lookup_buffer.cli.commands") <= {"pydantic"}


def test_the_library_loads_neither_torch_nor_redis_nor_vllm() -> None:
    assert not _loaded_by("lookup_buffer") & {"torch", "numpy", "redis", "vllm"}


@pytest.mark.parametrize("file", ["store/__init__.py", "store.py"])
def test_a_store_that_hides_ours_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    installed = f"import sys; sys.path.append({str(ROOT)!r}); import lookup_buffer"
    run = subprocess.run(
        [sys.executable, "-c", installed],
        cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ImportError: another package named 'store' shadows"), run.stderr
    assert str(tmp_path / "store") in last


def test_an_installation_of_links_is_ours(tmp_path: Path) -> None:
    """As some installers make it: the folders are there, and each file is a link."""
    for name in ("lookup_buffer", "store"):
        (tmp_path / name).mkdir()
        for path in (ROOT / name).iterdir():
            (tmp_path / name / path.name).symlink_to(path)
    subprocess.run(
        [sys.executable, "-c", "import lookup_buffer"], cwd=tmp_path, timeout=scaled(60), check=True
    )


def test_the_store_loads_nothing_heavy() -> None:
    assert not _loaded_by("store") & {"torch", "numpy", "redis", "vllm"}


def test_the_plugin_entry_point_loads_nothing_heavy() -> None:
    """vLLM runs it in every process, also without our connector in the configuration."""
    assert not _loaded_by("connectors.plugin")


def test_every_folder_with_modules_is_a_package() -> None:
    """Without __init__.py a folder still imports, but import-linter does not see what is in it."""
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
