"""The KV connector, whose loads fail while a file exists, after as many chunks as it says.

An engine's own process loads it, by `kv_connector_module_path`: as if what was promised were gone
when it is copied.
"""

import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from connectors.kv.connector import LookupBufferKVConnector
from connectors.kv.metadata import ChunkLoad
from lookup_buffer.errors import MissingTensor

NAME = "FaultyKVConnector"
if NAME not in KVConnectorFactory._registry:  # as MultiConnector wants it
    KVConnectorFactory.register_connector(NAME, "faulty_kv_connector", NAME)


class FaultyKVConnector(LookupBufferKVConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        worker, path = self.worker, Path(os.environ["LOOKUP_BUFFER_TEST_KV_FAULT"])
        if worker is None:
            return
        copy = worker.loads._copy
        copied: list[str] = []
        told: list[str] = [""]

        def fail(chunk: ChunkLoad, after: Any) -> None:
            if path.exists():
                if path.read_text() != told[0]:  # another test
                    told[0] = path.read_text()
                    copied.clear()
                copied.append(chunk.name)
                if len(copied) > int(told[0]):
                    raise MissingTensor(f"{chunk.name}: evicted, for a test")
            copy(chunk, after)

        worker.loads._copy = fail
