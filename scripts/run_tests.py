"""Runs the tests in stages: `make quick`, `make test`, `make test-all`.

    python scripts/run_tests.py quick          what needs only this process, with all static checks
    python scripts/run_tests.py test           all of that, real servers and engines, and one part
    python scripts/run_tests.py all            all of that, and every part
    python scripts/run_tests.py part NAME ...  these parts alone

A part is what takes long and seldom fails: each commit runs one, which its hash chooses. Every
stage runs even if an earlier one failed: one run shows all failures. Each stage has a time limit of
its own. A slower or busy machine gets more time, within the limit of the whole run. How long each
test took: build/test-times.json.

    TEST_MINUTES=180    limit of the whole run (default 85: CI has 90 with the environment)
    TESTS_SLOWNESS=2    how many times slower than an idle machine; measured by default

A stage's seconds are what an idle machine of two cores may take.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
TIMES = Path("build/test-times.json")
SLOWNESS = "TESTS_SLOWNESS"
HYPOTHESIS = "HYPOTHESIS_PROFILE"
TEST_MINUTES = 85.0
KILL_SECONDS = 60.0
NO_TEST_COLLECTED = 5
REDIS_PY_OLDEST = "6.4.0"
"""As pyproject.toml allows."""
PART_SECONDS = 360.0
"""A part is to take three minutes on an idle machine."""
TORTURE_ROUNDS = {
    "processes": ("processes", "full arenas", "limits", "soak"),
    "hosts": ("failover", "partitions", "clocks"),
    "frames": ("fuzz unix", "fuzz node", "fuzz tls", "fuzz pipe", "fuzz http"),
}
"""Kinds of rounds of `make torture`, in parts of at most three minutes."""
USUAL = "not alone and not gpu and not part"
ONLY_PROCESSES = [
    "tests/network", "tests/node", "tests/security", "tests/soak", "tests/store", "tests/vllm",
]  # fmt: skip
"""Folders in which each test starts processes."""
IMPORT_VLLM = [
    "tests/connectors",
    "tests/vllm",
    "tests/docs/test_docs_vllm.py",
    "tests/support/test_host_calls.py",
]
"""Each worker imports all test files of its stage, and vLLM takes 5 s: with these in a stage of
their own, eight workers need not."""


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    seconds: float
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def pytest(*options: str, workers: int = 0) -> list[str]:
    """A hang prints the stacks of all threads. Test files are run whole, in one process each, so
    that a module's fixtures start once. A worker that ends early, after a hang, is not replaced:
    pytest-xdist would run the same test again."""
    command = [sys.executable, "-m", "pytest", "-o", f"faulthandler_timeout={_hang_seconds()}"]
    if workers:
        command += [f"--numprocesses={workers}", "--dist=loadfile", "--max-worker-restart=0"]
        command += ["--no-loadscope-reorder"]  # else files of few tests, often long ones, are last
    return [*command, *options]


def _hang_seconds() -> int:
    return int(300 * float(os.environ.get(SLOWNESS, "1")))


def stages_of(command: str, commit: str, names: Sequence[str] = ()) -> list[Stage]:
    """Raises ValueError for a command or a part that does not exist."""
    apart = [f"--ignore={path}" for path in IMPORT_VLLM]
    in_process = ["-m", f"not processes and {USUAL}"]
    in_process += [f"--ignore={path}" for path in ONLY_PROCESSES]
    quick = [
        Stage("static checks", 120, ["scripts/run-checks", str(BIN)]),
        Stage("this process", 120, pytest(*in_process, *apart, workers=8)),
        Stage("this process, vLLM", 90, pytest(*in_process, *IMPORT_VLLM, workers=2)),
    ]
    usual = [
        quick[0],
        # What needs only this process beside what starts others, most of which waits: for a lease,
        # a timeout, the detection of a dead node. In one stage, since each of its workers imports
        # all test files: 80 s of processor time, and 50 s with vLLM.
        Stage("without vLLM", 1020, pytest("-m", USUAL, *apart, workers=8)),
        Stage("vLLM", 1290, pytest("-m", USUAL, *IMPORT_VLLM, workers=2)),
        Stage("alone", 240, pytest("-m", "alone and not gpu and not part", *marked_alone())),
    ]
    parts = parts_by_name()
    if command == "quick":
        return quick
    if command == "test":
        return [*usual, parts[part_of_commit(commit, list(parts))]]
    if command == "all":
        return [*usual, *parts.values()]
    if command == "part" and names and set(names) <= parts.keys():
        return [parts[name] for name in names]
    raise ValueError(f"usage: run_tests.py quick | test | all | part {' | '.join(parts)}")


def marked_alone() -> list[str]:
    """The files with such tests: to import all others would take longer than most of these."""
    paths = sorted((ROOT / "tests").glob("*/test_*.py"))
    return [
        str(path.relative_to(ROOT)) for path in paths if "pytest.mark.alone" in path.read_text()
    ]


def parts_by_name() -> dict[str, Stage]:
    """What the marker `part` names, and what needs another way of starting."""
    marked = {"soaks": 4, "storms": 0, "engines": 0, "network": 2}
    parts = {
        name: Stage(
            f"part {name}", PART_SECONDS, pytest("-m", f"part(name='{name}')", workers=workers)
        )
        for name, workers in marked.items()
    }
    for name, rounds in TORTURE_ROUNDS.items():
        of_name = ["-m", "part(name='torture')", f"--torture-rounds={','.join(rounds)}"]
        parts[f"torture-{name}"] = Stage(
            f"part torture-{name}", PART_SECONDS, pytest(*of_name, "tests/soak/test_torture.py")
        )
    folders = ("unit", "contract", "connectors", "pipes", "node", "store")
    many_examples = [f"tests/{folder}" for folder in folders]
    parts["examples"] = Stage(
        "part examples", PART_SECONDS,
        pytest("-m", f"hypothesis and {USUAL}", *many_examples, workers=4),
        {HYPOTHESIS: "long"},
    )  # fmt: skip
    of_node = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/node/test_*.py"))
    of_other_pythons = {
        "store": ["tests/unit", "tests/contract", "tests/store"],
        "node-1": of_node[::2],
        "node-2": of_node[1::2],
    }
    for version in ("3.12", "3.13"):
        for name, paths in of_other_pythons.items():
            parts[f"python{version}-{name}"] = Stage(
                f"part python{version}-{name}",
                PART_SECONDS,
                ["scripts/test-python", version, *paths],
            )
    parts["redis-py-oldest"] = Stage(
        "part redis-py-oldest", PART_SECONDS,
        ["scripts/test-redis-py", REDIS_PY_OLDEST, "tests/store", "tests/contract"],
    )  # fmt: skip
    return parts


def part_of_commit(commit: str, parts: Sequence[str]) -> str:
    return parts[int(commit, 16) % len(parts)]


def head() -> str:
    """The hash of HEAD; of an unpacked archive, which has none, 0."""
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git on this machine
        return "0"
    return asked.stdout.strip() if asked.returncode == 0 else "0"


class Limits:
    """How long each stage may take: more on a slow machine, as long as the later ones have their
    usual time."""

    def __init__(self, seconds: Sequence[float], slowness: float, whole_seconds: float) -> None:
        self._left = list(seconds)
        self._slowness = slowness
        self._whole_seconds = whole_seconds

    def next(self, elapsed_seconds: float) -> float:
        """Of the next stage, in seconds, `elapsed_seconds` after the run began."""
        usual = self._left.pop(0)
        most = self._whole_seconds - elapsed_seconds - sum(self._left)
        return max(usual, min(usual * self._slowness, most))


def run(stage: Stage, limit_seconds: float) -> str:
    """Why it failed, or an empty text."""
    print(f"\n==== {stage.name} (at most {limit_seconds / 60:.0f} min)", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        stage.command, cwd=ROOT, env=os.environ | stage.environment, start_new_session=True
    )
    try:
        code = process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:  # also after Ctrl-C
        if process.poll() is None:
            _interrupt(process)
    print(f"==== {stage.name}: {time.monotonic() - began:.0f} s", flush=True)
    if code is None:
        return "over its time limit"
    return {0: "", NO_TEST_COLLECTED: "no test was collected"}.get(code, f"exit {code}")


def _interrupt(process: "subprocess.Popen[bytes]") -> None:
    """As Ctrl-C does, so that what it started ends; by force after a time."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
    finally:  # also after another Ctrl-C
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments: Sequence[str], commit: str) -> int:
    command, *names = arguments or [""]
    if SLOWNESS not in os.environ:
        os.environ[SLOWNESS] = _measured_slowness()
    try:
        stages = stages_of(command, commit, names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"This machine is slower than an idle one by a factor of {os.environ[SLOWNESS]}.")
    print("Stages:", ", ".join(stage.name for stage in stages))
    os.environ["TEST_TIMES"] = str(TIMES)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each worker would compile all tests: 8 s
    (ROOT / TIMES).unlink(missing_ok=True)
    whole_seconds = 60 * float(os.environ.get("TEST_MINUTES", TEST_MINUTES))
    limit = Limits([stage.seconds for stage in stages], float(os.environ[SLOWNESS]), whole_seconds)
    began = time.monotonic()
    failed = []
    for stage in stages:
        if why := run(stage, limit.next(time.monotonic() - began)):
            failed.append(f"FAILED: {stage.name}: {why}")
    print(f"\n{len(stages)} stages in {time.monotonic() - began:.0f} s")
    print(*failed or ["all stages passed"], sep="\n")
    return bool(failed)


def _measured_slowness() -> str:
    """In a process of its own, so that the tests' support is not imported here."""
    measured = subprocess.run(
        [sys.executable, "tests/support/patience.py"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return measured.stdout.strip()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the stage ends too
    sys.exit(main(sys.argv[1:], head()))
