"""`python -m examples.demo`, also run by `lookup-buffer demo`: the demonstration on one machine.

Starts store, nodes and engines, runs the requests, prints and writes the result. Main thread.

Exit codes: 0 every promise is kept, except perhaps those about times; 1 another promise is broken
(the output names both kinds); 2 something did not start or answer; 130 interrupted. In every case
it ends all processes that it started.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from examples.demo.engine import DemoEngine, EngineFailure
from examples.demo.engine_settings import EngineSettings
from examples.demo.fleet import Fleet, NodeFailure
from examples.demo.model import ensure_model
from examples.demo.model_size import HEAVY, SIZES, ModelSize
from examples.demo.outcome import Result, exit_code, judge
from examples.demo.report import describe, summary, verdict
from examples.demo.story import Story, reference_tokens, warm_up_text
from store import StoreError

_ENGINES = ("host-a", "host-b")
_CORES_PER_ENGINE_MAX = 8
_HITS_WAIT_SECONDS = 30.0
_FILE_COLUMNS = 120


def main() -> int:
    arguments = _parser().parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_COLUMNS)
    if importlib.util.find_spec("vllm") is None:
        console.print(
            "The demo runs two vLLM engines, but vLLM is not installed: run `make demo` in a "
            "checkout, which installs its CPU build.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return 2
    # SIGTERM, from a supervisor, cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _demo(SIZES[arguments.model], arguments.directory, arguments.json, console)
    except (EngineFailure, NodeFailure, StoreError) as error:
        console.print(f"[red]The demo failed:[/red] {error}", highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("Interrupted; everything that was started is stopped.")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lookup-buffer demo", description=__doc__)
    parser.add_argument(
        "--model",
        choices=sorted(SIZES),
        default=HEAVY.name,
        help="heavy encodes like a SigLIP-so400m; tiny is a functional check only (default: heavy)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("build"),
        help="holds the generated model and the logs (default: build)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/demo.json"),
        help="where the figures go (default: build/demo.json)",
    )
    return parser


def _demo(size: ModelSize, directory: Path, json_path: Path, console: Console) -> int:
    began = time.monotonic()
    model = _model(size, directory / "models", console)
    work = directory / "demo"
    work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        console.print("Starting a Valkey and two nodes …")
        fleet = stack.enter_context(Fleet(_ENGINES, work))
        console.print("Starting three vLLM engines, one without a connector (about a minute) …")
        baseline = stack.enter_context(_engine("baseline", size, model, work))
        engines = {
            name: stack.enter_context(_engine(name, size, model, work, fleet=fleet))
            for name in _ENGINES
        }
        baseline.wait_ready()
        console.print("Reading the expected tokens from the engine without a connector …")
        expected = reference_tokens(baseline)
        baseline.close()
        for engine in engines.values():
            engine.wait_ready()
        story = Story(
            engines, fleet.store, expected, lambda outcome: console.print(describe(outcome))
        )
        console.print("Warming up: text only, then one photograph that does not count …")
        for engine in engines.values():
            warm_up_text(engine, size)
        story.warm_up()
        console.print("The requests that count …")
        story.run()
        _wait_for_hits(story)
        result = Result(
            model=size.name,
            nbytes_per_image=size.nbytes_per_image,
            outcomes=tuple(story.outcomes),
            encoder_runs=story.encoder_runs,
            encoder_runs_of_warm_up=story.encoder_runs_of_warm_up,
            records=story.records(),
            seconds=time.monotonic() - began,
        )
        console.print("Stopping everything …")
    return _report(result, size, json_path, console)


def _model(size: ModelSize, directory: Path, console: Console) -> Path:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Making the model's random weights", total=None)
        return ensure_model(
            size,
            directory,
            progress=lambda made, total: progress.update(task, completed=made, total=total),
        ).resolve()


def _engine(
    name: str, size: ModelSize, model: Path, work: Path, *, fleet: Fleet | None = None
) -> DemoEngine:
    """The engine on the node of the same name, or one without a connector."""
    settings = EngineSettings(
        name=f"engine-{name}",
        size=size,
        model_directory=model,
        work_directory=work,
        ec_transfer_config=None if fleet is None else fleet.nodes[name].ec_transfer_config(),
        cores=_cores(_ENGINES.index(name) if name in _ENGINES else 0),
    )
    return DemoEngine(settings)


def _cores(index: int) -> tuple[int, ...]:
    """The cores of the machine for engine number `index`; all engines get equally many."""
    cores = sorted(os.sched_getaffinity(0))
    each = min(max(len(cores) // len(_ENGINES), 1), _CORES_PER_ENGINE_MAX)
    first = index * each % len(cores)
    return tuple(cores[first : first + each])


def _wait_for_hits(story: Story) -> None:
    """Wait, for _HITS_WAIT_SECONDS at most, until all hits are in Redis: nodes write in batches."""
    expected = sum(bool(outcome.source) for outcome in story.outcomes)
    deadline = time.monotonic() + _HITS_WAIT_SECONDS
    while sum(record.hits for record in story.records()) < expected:
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _report(result: Result, size: ModelSize, json_path: Path, console: Console) -> int:
    promises = judge(result, times_count=size is HEAVY)
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(result.to_json(promises), indent=2) + "\n", encoding="utf-8")
    console.print()
    console.print(*summary(result, promises), sep="\n")
    console.print(f"All figures are in {json_path}.", highlight=False)
    for line in verdict(promises):
        console.print(line)
    return exit_code(promises)


if __name__ == "__main__":
    sys.exit(main())
