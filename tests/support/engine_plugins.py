"""What tests load into the processes of vLLM's engines: two connectors and a scheduler.

`GaugedConnector` also writes down what its scheduler side holds and has counted, as lines in a file
that the test reads by `Gauges`. It decides nothing that the connector does not.

`FaultyKVConnector` is the KV connector, whose loads fail while a file exists, after as many chunks
as it says: as if a promised chunk were gone when it is copied.

`OverlappingScheduler` has steps overlap on CPU, where vLLM switches asynchronous scheduling off.
The engine core then plans a step before it has the output of the one before, as on a GPU: with that
step's tokens unknown, its blocks in use, and what is aborted or preempted meanwhile still being
computed. The worker was started before and is unchanged: it computes one step after the other and
fills in by itself the tokens that were not known.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from connectors.ec.connector import LookupBufferECConnector
from connectors.kv.connector import LookupBufferKVConnector
from connectors.kv.metadata import ChunkLoad
from examples.demo.counting_scheduler import CountingAsyncScheduler
from examples.demo.engine_settings import EngineSettings
from lookup_buffer.errors import MissingTensor

PATH_VARIABLE = "GAUGED_CONNECTOR_PATH"
GAUGED = {"ec_connector": "GaugedConnector", "ec_connector_module_path": "engine_plugins"}
"""For `--ec-transfer-config`, in place of our own name."""


@dataclass(frozen=True, slots=True)
class Gauges:
    held: dict[str, int]
    """What is to be zero when the engine rests."""
    counted: dict[str, int]

    def to_line(self) -> str:
        return json.dumps(asdict(self), sort_keys=True) + "\n"

    @classmethod
    def of(cls, settings: EngineSettings) -> "Gauges":
        """At the end of the engine's last pass."""
        lines = _path(settings).read_text(encoding="utf-8").splitlines(keepends=True)
        return cls(**json.loads([line for line in lines if line.endswith("\n")][-1]))


def gauged(settings: EngineSettings) -> EngineSettings:
    """The same engine, which lets itself be looked at. Not to be started yet."""
    assert settings.ec_transfer_config is not None
    settings.ec_transfer_config.update(GAUGED)
    path = {PATH_VARIABLE: str(_path(settings)), "PYTHONPATH": str(Path(__file__).parent)}
    settings.environment.update(path)
    return settings


def _path(settings: EngineSettings) -> Path:
    return settings.work_directory / f"{settings.name}.gauges.jsonl"


class GaugedConnector(LookupBufferECConnector):
    """Appends one line at the end of each pass that changed something."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self._path = Path(os.environ[PATH_VARIABLE])
        self._last = ""
        self._write()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        self._write()
        return metadata

    def _write(self) -> None:
        scheduler = self.scheduler
        if scheduler is None:  # the worker's side
            return
        held = {
            "requests": len(scheduler.gate),
            "claims": len(scheduler.claims),
            "pins": len(scheduler.pins),
            "pinned_bytes": scheduler.pins.held_bytes,
        }
        line = Gauges(held, scheduler.counters.totals()).to_line()
        if line != self._last:
            self._last = line
            with self._path.open("a", encoding="utf-8") as file:  # before the step's answer leaves
                file.write(line)


NAME = "FaultyKVConnector"
if NAME not in KVConnectorFactory._registry:  # as MultiConnector wants it
    KVConnectorFactory.register_connector(NAME, "engine_plugins", NAME)


class FaultyKVConnector(LookupBufferKVConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        worker, path = self.worker, Path(os.environ["LOOKUP_BUFFER_TEST_KV_FAULT"])
        if worker is None:
            return
        copy = worker.loads._copy
        copied: list[str] = []
        told: list[str] = [""]

        def fail(chunk: ChunkLoad, after: Any, seconds: float) -> None:
            if path.exists():
                if path.read_text() != told[0]:  # another test
                    told[0] = path.read_text()
                    copied.clear()
                copied.append(chunk.name)
                if len(copied) > int(told[0]):
                    raise MissingTensor(f"{chunk.name}: evicted, for a test")
            copy(chunk, after, seconds)

        worker.loads._copy = fail


class OverlappingScheduler(CountingAsyncScheduler):
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # Read by vLLM's scheduler, and behind it by the engine core for the steps under way.
        vllm_config.scheduler_config.async_scheduling = True
        super().__init__(vllm_config, *args, **kwargs)
        transfer = vllm_config.kv_transfer_config
        assert self.defer_block_free == (transfer is not None and transfer.is_kv_consumer)
        self._planned = 0
        self._overlaps = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._planned += 1
        return super().schedule(*args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        self._planned -= 1
        if self._planned > 0 and not self._overlaps:
            self._overlaps = True
            print(OVERLAPS, flush=True)
        return super().update_from_output(*args, **kwargs)


FLAGS = ("--scheduler-cls", "engine_plugins.OverlappingScheduler")
"""For a server that has this folder in its PYTHONPATH: see `openai_servers.overlapping`."""
OVERLAPS = "a step was planned while the one before it ran"
"""In the log of an engine that does."""
