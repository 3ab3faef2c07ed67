"""The worker side: vLLM's blocks from the arena, and into it.

The model's thread puts loads and saves into queues. It copies by itself only what lies in a block
that is about to get other content.
"""

from typing import TYPE_CHECKING, Any

from connectors.counters import Counters, RateLimitedLog
from connectors.kv.chunks import key_of
from connectors.kv.loads import LoadQueue, LoadResults
from connectors.kv.metadata import ChunkLoad, KvStepMetadata, KvWorkerReport
from connectors.kv.pages import CudaPages, HostPages, Pages
from connectors.kv.saves import BlocksInUse, PagedChunk
from connectors.save_queue import SaveQueue
from lookup_buffer import codec
from lookup_buffer.errors import CodecError
from lookup_buffer.inserted import InsertOutcome
from lookup_buffer.key import TensorKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from connectors.kv.settings import KvSettings
    from connectors.live_weights import WeightsWatch
    from lookup_buffer.client.buffer import LookupBuffer

INSERT_SECONDS = 10.0
TAKE_SECONDS = 2.0
IDLE_SECONDS = 2e-3
CLOSE_SECONDS = 5.0


class KvWorker:
    """One rank. All methods but those of the queues' threads belong to the model's."""

    def __init__(
        self,
        open_buffer: "Callable[[], LookupBuffer]",
        settings: "KvSettings",
        *,
        rank: int,
        num_blocks: int,
        weights: "WeightsWatch | None" = None,
        counters: Counters | None = None,
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._weights = weights
        self._num_blocks = num_blocks
        self.counters = counters or Counters()
        self._log = RateLimitedLog()
        if weights is not None:
            if rank == 0:  # one flag for the engine; what each rank stores is its own matter
                weights.start()
            weights.find()
            weights.begin()
        self._buffer = open_buffer()
        self._pages: Pages | None = None
        self._in_use = BlocksInUse()
        self._failed: set[str] = set()
        self.loads = LoadQueue(self._copy_in, self.counters, self._log)
        self.saves = SaveQueue(
            self._insert,
            self._dropped,
            bytes_max=settings.save_queue_bytes,
            items_max=settings.save_queue_items,
            counters=self.counters,
            log=self._log,
            what="a chunk of KV",
        )

    def register(self, layers: "Mapping[str, torch.Tensor]") -> None:
        """vLLM's cache, once it is allocated."""
        kind = CudaPages if next(iter(layers.values())).is_cuda else HostPages
        self._pages = kind(layers, self._num_blocks)

    def give_way(self, metadata: KvStepMetadata) -> None:
        """Before a step writes into blocks: what is still to be stored of them is copied."""
        forced = self._in_use.give_way(metadata.written)
        if forced:
            self.counters.add("copied_early", forced)

    def load(self, metadata: KvStepMetadata) -> None:
        if not metadata.loads:
            return
        self._weights_changed()  # what was promised is loaded all the same
        self._enter(metadata.namespace)
        assert self._pages is not None
        after = self._pages.mark()
        for load in metadata.loads:
            self.loads.put(load, after)

    def save(self, metadata: KvStepMetadata) -> None:
        """The step's model has run, or was told to: what it completed is stored."""
        if not metadata.saves:
            return
        if self._weights_changed():
            self.counters.add("save_skipped:weights_changed", len(metadata.saves))
            return
        self._enter(metadata.namespace)
        assert self._pages is not None
        after = self._pages.mark()
        for order in metadata.saves:
            key = key_of(order.name, self._rank, order.transfer)
            chunk = PagedChunk(self._pages, order.blocks, after)
            if self.saves.offer(key.text, chunk):
                self._in_use.add(chunk)

    def _enter(self, namespace: str) -> None:
        """An engine has one namespace; it is known only after the workers started."""
        if namespace and self._buffer.namespace != namespace:
            self._buffer.enter(namespace)

    def _weights_changed(self) -> bool:
        return self._weights is not None and self._weights.changed()

    def results(self, *, is_idle: bool = False) -> LoadResults:
        """Loads that have ended. A step that runs no model has the time to wait for one."""
        results = self.loads.take(IDLE_SECONDS if is_idle else 0.0)
        self._failed |= results.failed
        return results

    def report(self) -> KvWorkerReport | None:
        counts = self.counters.take()
        failed, self._failed = self._failed, set()
        return KvWorkerReport(counts, failed) if counts or failed else None

    # -- the queues' threads

    def _copy_in(self, chunk: ChunkLoad, after: Any) -> None:
        assert self._pages is not None
        if chunk.transfer:
            self._take(chunk, after)
            return
        order = chunk.orders[self._rank]
        # Keeps the arena mapped as long as it lives; its bytes are pinned until the load has ended.
        window = self._buffer.arena(order.boot)[order.offset : order.offset + order.nbytes]
        self._place(chunk, codec.tensor_over(window, order.header), after)

    def _take(self, chunk: ChunkLoad, after: Any) -> None:
        """What was handed over; for whose last blocks there is no use it is taken all the same."""
        key = key_of(chunk.name, self._rank, chunk.transfer)
        source = self._buffer.drop_select(key, timeout=TAKE_SECONDS)
        if source is not None and chunk.blocks:
            self._place(chunk, source, after)

    def _place(self, chunk: ChunkLoad, source: "torch.Tensor", after: Any) -> None:
        assert self._pages is not None
        layer, blocks = self._pages.layers[0], chunk.first + len(chunk.blocks)
        fits = source.dtype == layer.dtype and source.shape[:1] == (len(self._pages.layers),)
        if not fits or source.shape[2:] != layer.shape[1:] or source.shape[1] < blocks:
            raise CodecError(f"{source.dtype} {tuple(source.shape)} is not this engine's KV")
        self._pages.scatter(chunk.blocks, source, chunk.first, after)

    def _insert(self, text: str, chunk: PagedChunk) -> bool:
        key = TensorKey.parse(text)
        try:
            if key.is_shared and self._buffer.has_caches([key], timeout=0.0) == [True]:
                return False
            outcome = self._buffer.insert(
                key,
                chunk.copy_out(),
                ttl_seconds=self._settings.ttl_seconds if key.is_shared else None,
                timeout=INSERT_SECONDS,
            )
        finally:
            chunk.let_go()
        return outcome is InsertOutcome.STORED

    def _dropped(self, _: str) -> None:
        """Nobody waits for what is not stored."""

    def close(self) -> None:
        """Store what waits, within `drain_seconds`, and disconnect. Idempotent."""
        self.saves.close(self._settings.drain_seconds)
        self.loads.close(CLOSE_SECONDS)
        self._buffer.close()
        if self._weights is not None:
            self._weights.close()
