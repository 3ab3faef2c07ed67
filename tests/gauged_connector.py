"""The connector, which also writes down what its scheduler side holds and has counted.

An engine's own process loads it, by `ec_connector_module_path`; `gauges.py` reads what it wrote. It
decides nothing that the connector does not.
"""

import os
from pathlib import Path
from typing import Any

from connectors.ec.connector import LookupBufferECConnector
from gauges import PATH_VARIABLE, Gauges


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
