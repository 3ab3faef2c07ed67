"""The worker side: loads promised items into vLLM's encoder cache, and stores fresh outputs.

Runs on the thread of vLLM's model runner, one instance per rank; `LookupBufferECConnector` calls
it. A load copies from the mapped arena and needs no socket. A save puts one reference into a queue,
whose thread inserts it. `ec.copies` does the copying.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connectors.counters import Counters, RateLimitedLog, logger
from connectors.ec.copies import Copies, DeviceCopies, HostCopies
from connectors.ec.metadata import ItemLoad, StepMetadata, WorkerCounts
from connectors.ec.outputs import Form
from connectors.save_queue import SaveQueue
from connectors.settings import ConnectorSettings
from lookup_buffer import codec
from lookup_buffer.errors import NodeUnavailable, TensorTooLarge
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import InsertOutcome

if TYPE_CHECKING:
    import torch

    from connectors.ec.lane import WorkerDeviceLane
    from connectors.weights import WeightsWatch
    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import LoadOrder

RETRY_SECONDS = 5.0
RETRY_INTERVAL_SECONDS = 0.02
SELECT_SECONDS = 0.5
INSERT_SECONDS = 5.0
NODE_WAIT_SECONDS = 10.0
"""How long to wait, once, after the node was lost. Another node may be starting in its place, and
requests without media depend on what this engine stores. Later outputs are dropped until it is
back."""
NODE_RETRY_SECONDS = 0.05
COPY_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """The position of a worker in its engine."""

    rank: int
    """Among the ranks that load, from 0. Rank 0 stores, because all ranks hold the same outputs."""
    is_producer: bool
    device: str = "cpu"
    """The device of the model's tensors, in torch's notation."""

    @property
    def stores(self) -> bool:
        return self.is_producer and self.rank == 0


class EcWorker:
    """See the module. `load`, `save` and `save_again` never raise.

    Args:
        open_buffer: connects to the node; called once, by `start`.
        weights: detects changes of the weights; only on the rank that reports them.
        make_lane: makes this worker's device pool, where the configuration enables one; called by
            `start`.
    """

    def __init__(
        self,
        open_buffer: Callable[[], "LookupBuffer"],
        settings: ConnectorSettings,
        seat: WorkerSeat,
        *,
        weights: "WeightsWatch | None" = None,
        make_lane: "Callable[[], WorkerDeviceLane | None]" = lambda: None,
        counters: Counters | None = None,
        log: RateLimitedLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights = weights
        self._make_lane = make_lane
        self._lane: WorkerDeviceLane | None = None
        self._open_buffer = open_buffer
        self._settings = settings
        self._seat = seat
        self._buffer: LookupBuffer | None = None
        self._copies: Copies | None = None
        self.saves: SaveQueue | None = None
        self._encoding: set[str] = set()
        """Items that the previous step encoded."""
        self._encoded: set[Form] = set()
        self._reported: set[Form] = set()
        self._node_lost_at: float | None = None
        self._too_large_bytes = math.inf
        """Size of the smallest output that did not fit into the whole arena."""
        self.counters = counters or Counters()
        self._log = log or RateLimitedLog()
        self._clock = clock

    def start(self) -> None:
        """Connect and map the arena. Idempotent.

        Raises:
            LookupBufferError: the configuration is invalid, or the node is required and not
                running.
        """
        if self._buffer is not None:
            return
        if self._weights is not None:
            self._weights.create_flag()
        lane = self._make_lane()
        self._buffer = self._open_buffer()
        if lane is not None:
            self._lane = lane
            lane.join(self._buffer)
        self._copies = self._make_copies(self._buffer)
        if self._seat.stores:
            self.saves = SaveQueue(
                self._insert,
                self._release_claim,
                bytes_max=self._settings.save_queue_bytes,
                items_max=self._settings.save_queue_items,
                counters=self.counters,
                log=self._log,
            )

    def model_loaded(self) -> None:
        """From now on, a write to the model's weights counts as a change."""
        if self._weights is not None:
            self._weights.start()

    def _make_copies(self, buffer: "LookupBuffer") -> Copies:
        if not self._seat.device.startswith("cuda"):
            return HostCopies(buffer, self._seat.device)
        from connectors.ec.cuda import CudaDevice

        return DeviceCopies(buffer, CudaDevice(self._seat.device), self.counters, self._log)

    def load(self, encoder_cache: "dict[str, torch.Tensor]", metadata: StepMetadata) -> None:
        """Load every item of the step into `encoder_cache`, and release its pin."""
        self._record_encoded(encoder_cache)
        self._encoding = metadata.encodes
        if not metadata.mm_datas:
            return
        self._weights_changed()  # what was promised is loaded anyway
        self._enter_namespace(metadata.namespace)
        orders: list[LoadOrder] = []
        for item in metadata.mm_datas:
            if item.mm_hash not in encoder_cache:
                tensor = self._load(item)
                if tensor is not None:
                    encoder_cache[item.mm_hash] = tensor
            if item.order is not None:
                orders.append(item.order)
        self._done(orders)

    def _done(self, orders: "list[LoadOrder]") -> None:
        try:
            if self._copies is not None:
                self._copies.done(orders)
        except Exception as error:  # noqa: BLE001 -- the scheduler side releases them as well
            self._log.report("done", "pins are released later, by the scheduler side: %s", error)

    def _load(self, item: ItemLoad) -> "torch.Tensor | None":
        try:
            tensor = self._copy(item)
        except Exception as error:  # noqa: BLE001 -- no memory on the device, for example
            self._log.report("load", "item %s did not load at once: %s", item.mm_hash, error)
            tensor = self._retry_copy(item)
        if tensor is None or tensor.shape[0] >= item.num_token:
            return tensor
        # vLLM before 0.23 does not name the request. A client that gives content the hash of other
        # content gets a wrong result, but the engine continues: vLLM takes the rows that it needs.
        self._log.report("misfit", "item %s has too few rows and is loaded as zeros", item.mm_hash)
        self.counters.add("load_misfit")
        return tensor.new_zeros(item.num_token, *tensor.shape[1:])

    def _copy(self, item: ItemLoad) -> "torch.Tensor | None":
        if self._buffer is None or self._copies is None:
            raise NodeUnavailable("the worker is not started")
        if item.order is not None and item.order.lane:
            return self._buffer.load(item.order)  # it is on the device already
        if item.order is not None:
            return self._copies.load(item.order)
        return self._copy_by_key(item)

    def _copy_by_key(self, item: ItemLoad) -> "torch.Tensor | None":
        """The tensor under the item's key; None where it is not what was promised."""
        if self._buffer is None or self._copies is None:
            raise NodeUnavailable("the worker is not started")
        key = TensorKey(item.mm_hash) if item.key is None else TensorKey.parse(item.key)
        tensor = self._buffer.select(key, timeout=SELECT_SECONDS)
        if tensor is None or tensor.ndim != 2 or tensor.shape[0] != item.num_token:
            return None
        promised = item.order.header if item.order is not None else None
        if promised is not None and promised.shape and promised != codec.header_of(tensor):
            return None
        return self._copies.place(tensor)

    def _retry_copy(self, item: ItemLoad) -> "torch.Tensor | None":
        """Retry a load that failed at once, for at most `RETRY_SECONDS`.

        The node may have restarted, and this rank attaches later than the scheduler. Or the device
        has no memory until others release theirs (torch has already freed its cache). The wait
        costs less than the end of the engine.
        """
        self.counters.add("load_late")
        deadline = self._clock() + RETRY_SECONDS
        why: Exception | None = None
        while self._clock() < deadline:
            time.sleep(RETRY_INTERVAL_SECONDS)
            for way in (self._copy, self._copy_by_key):
                try:
                    tensor = way(item)
                except Exception as error:  # noqa: BLE001 -- the connector never raises into vLLM
                    why = error
                    continue
                if tensor is not None:
                    return tensor
        self.counters.add("load_lost")
        logger.error(
            "lookup buffer: item %s could not be loaded (%s); vLLM stops without it",
            item.mm_hash,
            why,
        )
        return None

    def save(
        self, encoder_cache: "dict[str, torch.Tensor]", identifier: str, metadata: StepMetadata
    ) -> None:
        """Queue a fresh output, if the scheduler side listed it in `metadata.saves`."""
        key = metadata.saves.get(identifier)
        if key is not None:
            self._offer(key, encoder_cache[identifier], metadata.namespace)

    def save_again(self, encoder_cache: "dict[str, torch.Tensor]", metadata: StepMetadata) -> None:
        """Queue items that vLLM's cache holds and the buffer has lost. An item that vLLM has
        dropped meanwhile is encoded again, and stored like any other."""
        for identifier, key in metadata.lost.items():
            output = encoder_cache.get(identifier)
            if output is not None and output.nbytes < self._too_large_bytes:
                self._offer(key, output, metadata.namespace)

    def _offer(self, key: str, output: "torch.Tensor", namespace: str) -> None:
        if self.saves is None or self._copies is None:
            return
        self._enter_namespace(namespace)
        if self._weights_changed():
            self.counters.add("save_skipped:weights_changed")
            self._release_claim(key)
            return
        try:  # Each call into torch costs this thread up to 40 µs when its caches are cold.
            kept = self._copies.keep(output)
        except Exception as error:  # noqa: BLE001 -- no memory for a copy, for example
            self.counters.add("save_skipped:internal")
            self._log.report("keep", "item %s is not stored: %s", key, error)
            self._release_claim(key)
            return
        self.saves.offer(key, kept)

    def _record_encoded(self, encoder_cache: "dict[str, torch.Tensor]") -> None:
        """Record dtype and width of the previous step's outputs. Not all vLLM versions pass every
        output to `save`."""
        for identifier in self._encoding & encoder_cache.keys():
            self._encoded.add(_form_of(encoder_cache[identifier]))

    def report(self) -> WorkerCounts | None:
        """What is new for the scheduler side since the last call."""
        counts, encoded = self.counters.take(), self._encoded - self._reported
        self._reported |= encoded
        return WorkerCounts(counts, encoded) if counts or encoded else None

    def _enter_namespace(self, namespace: str) -> None:
        """Enter the engine's namespace. It is known only after the workers started."""
        if self._buffer is not None and namespace and self._buffer.namespace != namespace:
            self._buffer.enter(namespace)

    def _weights_changed(self) -> bool:
        return self._weights is not None and self._weights.changed()

    def _insert(self, key: str, output: Any) -> bool:
        assert self._buffer is not None, "the queue starts after the buffer"
        assert self._copies is not None
        on_host = self._copies.to_host(output)
        if self._lane is None:
            return self._insert_from_host(key, on_host)
        on_device = self._copies.on_device(output)
        with self._lane.pool_output(self._buffer.namespace, key, on_device) as on_stored:
            return self._insert_from_host(key, on_host, on_stored=on_stored)

    def _insert_from_host(self, key: str, on_host: "torch.Tensor", **callbacks: Any) -> bool:
        while True:
            try:
                return self._insert_now(key, on_host, **callbacks)
            except TensorTooLarge:
                self._too_large_bytes = min(self._too_large_bytes, on_host.nbytes)
                raise
            except NodeUnavailable:
                now = self._clock()
                if self._node_lost_at is None:
                    self._node_lost_at = now
                if now - self._node_lost_at >= NODE_WAIT_SECONDS:
                    raise
            time.sleep(NODE_RETRY_SECONDS)

    def _insert_now(self, key: str, on_host: "torch.Tensor", **callbacks: Any) -> bool:
        assert self._buffer is not None, "the queue starts after the buffer"
        outcome = self._buffer.insert(
            TensorKey.parse(key),
            on_host,
            ttl_seconds=self._settings.ttl_seconds,
            timeout=INSERT_SECONDS,
            **callbacks,
        )
        self._node_lost_at = None
        return outcome is InsertOutcome.STORED

    def _release_claim(self, key: str) -> None:
        """Release the claim of an item that is not stored, so that no engine waits for it."""
        assert self._buffer is not None, "the queue starts after the buffer"
        self._buffer.unclaim([TensorKey.parse(key)])

    def close(self) -> None:
        """Store what waits, within `drain_seconds`, and disconnect. Idempotent."""
        if self.saves is not None:
            self.saves.close(self._settings.drain_seconds)
        if self._copies is not None:
            self._copies.close(COPY_CLOSE_SECONDS)
        if self._buffer is not None:
            self._buffer.close()
        if self._lane is not None:
            self._lane.close()
        if self._weights is not None:
            self._weights.close()


def _form_of(output: "torch.Tensor") -> Form:
    return str(output.dtype).removeprefix("torch."), int(output.shape[-1])
