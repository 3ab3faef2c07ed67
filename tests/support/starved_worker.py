"""A process in which a worker of the connector loads an item while memory is short.

Arguments: the node's store, socket and capacity, the key of a tensor, its rows, and the seconds
without memory. Prints the sum of the loaded tensor, or null, and the counters. `test_ec_worker`
starts it.
"""

import json
import resource
import sys
import threading
from pathlib import Path

import torch

from connectors.ec.metadata import ItemLoad, StepMetadata
from connectors.ec.worker import EcWorker, WorkerSeat
from connectors.settings import ConnectorSettings
from lookup_buffer.client.buffer import EngineRank, LookupBuffer
from lookup_buffer.config import BufferConfig
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace

SPARE_BYTES = 16 << 20


def starve(seconds: float) -> None:
    """Limit the process to `SPARE_BYTES` more memory, for `seconds`."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    again = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_AS, (most, most)))
    again.daemon = True
    again.start()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, most))


def main(store_url: str, socket: str, capacity: str, key: str, rows: str, seconds: str) -> None:
    config = BufferConfig(
        store_url=store_url, node_socket=Path(socket), capacity_bytes=int(capacity)
    )
    namespace = Namespace.named("tests")
    seat = EngineRank("engine", 0, 1)
    worker = EcWorker(
        lambda: LookupBuffer(config, namespace, engine=seat),
        ConnectorSettings(capacity_bytes=int(capacity)),
        WorkerSeat(0, False),
    )
    worker.start()
    torch.ones(8).sum()  # torch has made its lazy allocations
    with LookupBuffer(config, namespace, engine=EngineRank("engine", None, 1)) as scheduler:
        (handle,) = scheduler.prefetch([TensorKey.parse(key)], timeout=30.0)
        starve(float(seconds))
        cache: dict[str, torch.Tensor] = {}
        worker.load(cache, StepMetadata([ItemLoad("A", int(rows), handle.order, key)]))
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        loaded = float(cache["A"].sum()) if "A" in cache else None
        print(json.dumps([loaded, worker.counters.totals()]))
    worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
