"""What the scheduler side of an engine's connector holds and has counted, as lines in a file.

`gauged_connector.py` writes them in the engine's process, the test reads them.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.demo.engine_settings import EngineSettings

PATH_VARIABLE = "GAUGED_CONNECTOR_PATH"
GAUGED = {"ec_connector": "GaugedConnector", "ec_connector_module_path": "gauged_connector"}
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
