"""The worker side: copies chunks of KV from the arena into vLLM's blocks, and out of them.

The model's thread only puts loads and saves into queues. `LoadQueue` has one thread for what is
pinned on this host, and a few for hand-offs, whose owner may not be reached. Each loads one request
at a time. `SaveQueue` has one thread that copies chunks out and stores them. The model's
thread copies a chunk itself only if vLLM is about to overwrite its blocks.

On the host, a copy runs on the thread that requests it. On a device, copies run on separate
streams, after all work that the model's stream had at `mark`. The thread that requests a copy waits
for it; that is a queue's thread, except for the forced copies above.

vLLM requires that a failed load is reported by the numbers of its blocks, and its request as
loaded. It then computes those blocks.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from connectors import pinned
from connectors.counters import Counters, RateLimitedLog
from connectors.kv.chunks import key_of
from connectors.kv.metadata import ChunkLoad, KvStepMetadata, KvWorkerReport, RequestLoad
from connectors.paged import gather_blocks, pages_of, scatter_blocks
from connectors.pass_time import IDLE_SECONDS
from connectors.pinned import PinnedArena
from connectors.save_queue import SaveQueue, use_every_core
from lookup_buffer import codec
from lookup_buffer.errors import BufferFull, CodecError, LookupBufferError
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import InsertOutcome

if TYPE_CHECKING:
    from connectors.kv.engine import KvSettings
    from connectors.weights import WeightsWatch
    from lookup_buffer.client.buffer import LookupBuffer

INSERT_SECONDS: Final = 10.0
"""How long the insert of a chunk may take."""
TRANSFERS_MAX: Final = 1024
"""So many transfers are remembered of which a piece was stored, or was not."""
HANDOFF_SECONDS = 2.0
"""How long a load waits for one chunk of a hand-off."""
HANDOFF_SECONDS_MIN = 0.2
"""And for the first one, if it waited for a thread so long: enough for an owner that is reached; a
silent one takes a second more. So where many are, the loads behind theirs are late by little."""
HANDOFF_THREADS: Final = 4
"""Requests that load hand-offs at the same time."""
CLOSE_SECONDS = 5.0
"""How long `KvWorker.close` waits for the threads that load."""

_cuda: Any = torch.cuda  # much of torch.cuda has no types


@dataclass(slots=True)
class LoadResults:
    """The loads that ended since the last `take`."""

    loaded: set[str] = field(default_factory=set)
    """Requests whose load ended, with or without success."""
    lost_blocks: set[int] = field(default_factory=set)
    """Blocks that were not filled."""
    failed: set[str] = field(default_factory=set)
    """Those of `loaded` with lost blocks."""


class KvWorker:
    """The connector's worker side of one rank. The model's thread calls all methods, except those
    in the section of the queues' threads.

    Args:
        weights: detects changes of the weights; `open_buffer` runs after its flag exists.
    """

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
            if rank == 0:  # one flag per engine; each rank checks its own weights before saves
                weights.create_flag()
            weights.find_models()
            weights.start()
        self._buffer = open_buffer()
        self._pages: Pages | None = None
        self._arena: PinnedArena | None = None
        self._in_use = BlocksInUse()
        self._failed: set[str] = set()
        self._outgoing: OrderedDict[str, list[TensorKey]] = OrderedDict()
        """By transfer id: the stored pieces of a hand-off. Of the thread of `saves` alone."""
        self._incomplete: OrderedDict[str, None] = OrderedDict()
        """The transfers of which a piece is not stored."""
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
        """Register vLLM's cache after its allocation. Raises as `Pages`."""
        device = next(iter(layers.values())).device
        kind = CudaPages if device.type == "cuda" else HostPages
        self._pages = kind(layers, self._num_blocks)
        if device.type == "cuda":
            self._arena = PinnedArena(
                partial(pinned.pin, device=device),
                partial(pinned.unpin, device=device),
                self._buffer.arena,
                self.counters,
                self._log,
            )
            self.loads.call(partial(self._arena.follow, self._buffer.boot))

    def copy_out_before_writes(self, metadata: KvStepMetadata) -> None:
        """Copy queued chunks out of the blocks that the next step writes."""
        forced = self._in_use.copy_out_before_writes(metadata.written)
        if forced:
            self.counters.add("copied_early", forced)

    def load(self, metadata: KvStepMetadata) -> None:
        if not metadata.loads:
            return
        self._weights_changed()  # sets the flag; loads in flight still run
        self._enter(metadata.namespace)
        assert self._pages is not None
        after = self._pages.mark()
        for load in metadata.loads:
            self.loads.put(load, after)

    def save(self, metadata: KvStepMetadata) -> None:
        """Queue the chunks that the step completes. The step's model has run, or is enqueued."""
        if not metadata.saves:
            return
        if self._weights_changed():
            self.counters.add("save_skipped:weights_changed", len(metadata.saves))
            return
        self._enter(metadata.namespace)
        assert self._pages is not None
        after = self._pages.mark()
        for order in metadata.saves:  # all pieces of a hand-off, or none
            self._incomplete.pop(order.transfer, None)
        for order in metadata.saves:
            key = key_of(order.name, self._rank, order.transfer)
            chunk = PagedChunk(self._pages, order.blocks, after)
            if self.saves.offer(key.text, chunk):
                self._in_use.add(chunk)

    def _enter(self, namespace: str) -> None:
        """Enter the engine's namespace, which may become known only after the workers started."""
        if namespace and self._buffer.namespace != namespace:
            self._buffer.enter(namespace)

    def _weights_changed(self) -> bool:
        return self._weights is not None and self._weights.changed()

    def results(self, *, is_idle: bool = False) -> LoadResults:
        """The loads that ended. A step that runs no model waits for one, at most
        `IDLE_SECONDS`."""
        results = self.loads.take(IDLE_SECONDS if is_idle else 0.0)
        self._failed |= results.failed
        return results

    def report(self) -> KvWorkerReport | None:
        counts = self.counters.take()
        failed, self._failed = self._failed, set()
        return KvWorkerReport(counts, failed) if counts or failed else None

    # -- the queues' threads

    def _copy_in(self, chunk: ChunkLoad, after: Any, seconds: float) -> None:
        assert self._pages is not None
        if chunk.transfer:
            self._take_handoff(chunk, after, seconds)
            return
        order = chunk.orders[self._rank]
        if self._arena is not None:
            self._arena.follow(order.boot)
        # The view keeps the arena mapped; the bytes are pinned until the load ends.
        window = self._buffer.arena(order.boot)[order.offset : order.offset + order.nbytes]
        self._scatter(chunk, codec.tensor_over(window, order.header), after)

    def _take_handoff(self, chunk: ChunkLoad, after: Any, seconds: float) -> None:
        """Take a chunk of a hand-off out of the buffer, even if vLLM needs none of its blocks."""
        key = key_of(chunk.name, self._rank, chunk.transfer)
        source = self._buffer.drop_select(key, timeout=seconds)
        if source is not None and chunk.blocks:
            self._scatter(chunk, source, after)

    def _scatter(self, chunk: ChunkLoad, source: "torch.Tensor", after: Any) -> None:
        assert self._pages is not None
        layer, blocks = self._pages.layers[0], chunk.first + len(chunk.blocks)
        fits = source.dtype == layer.dtype and source.shape[:1] == (len(self._pages.layers),)
        if not fits or source.shape[2:] != layer.shape[1:] or source.shape[1] < blocks:
            raise CodecError(
                f"{source.dtype} {tuple(source.shape)} does not match this engine's KV"
            )
        self._pages.scatter(chunk.blocks, source, chunk.first, after)

    def _insert(self, text: str, chunk: "PagedChunk") -> bool:
        key = TensorKey.parse(text)
        try:
            if key.request_id is not None:
                return self._hand_over(key, key.request_id, chunk)
            if self._buffer.has_caches([key], timeout=0.0) == [True]:
                return False
            ttl_seconds = self._settings.ttl_seconds
            outcome = self._buffer.insert(
                key, chunk.copy_out(), ttl_seconds=ttl_seconds, timeout=INSERT_SECONDS
            )
        finally:
            chunk.drop()
        return outcome is InsertOutcome.STORED

    def _hand_over(self, key: TensorKey, transfer: str, chunk: "PagedChunk") -> bool:
        """Insert a piece of a hand-off. While hand-offs fill their half of the arena, it waits for
        as long as the other engine does. If it is refused, nobody takes the others: those that are
        stored are taken back, and the rest is not stored."""
        stored = self._outgoing.setdefault(transfer, [])
        _bound(self._outgoing)
        outcome = None
        try:
            if transfer in self._incomplete:
                raise BufferFull("another piece of this hand-off is not stored")
            wait_seconds = self._settings.handoff_wait_seconds
            outcome = self._buffer.insert(key, chunk.copy_out(), timeout=wait_seconds)
            stored.append(key)
        finally:
            if outcome is None:
                self._take_back(stored)
        return outcome is InsertOutcome.STORED

    def _take_back(self, stored: list[TensorKey]) -> None:
        for key in stored:
            with suppress(LookupBufferError):
                self._buffer.drop_select(key)
        stored.clear()

    def _dropped(self, text: str) -> None:
        """A chunk is not stored: no request waits for it, but a hand-off needs all its pieces."""
        transfer = TensorKey.parse(text).request_id
        if transfer is not None:
            self._incomplete[transfer] = None
            _bound(self._incomplete)

    def close(self) -> None:
        """Store what is queued, within `drain_seconds`, and disconnect. Idempotent."""
        self.saves.close(self._settings.drain_seconds)
        if self._arena is not None:
            self.loads.call(self._arena.release)
        self.loads.close(CLOSE_SECONDS)
        self._buffer.close()
        if self._weights is not None:
            self._weights.close()


def _bound(transfers: "OrderedDict[str, Any]") -> None:
    if len(transfers) > TRANSFERS_MAX:
        transfers.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A load that waits for a thread."""

    load: RequestLoad
    after: Any
    since: float = field(default_factory=time.monotonic)


class LoadQueue:
    """Copies the chunks of requests into vLLM's blocks: two queues and their threads.

    Args:
        copy: copies one chunk into its blocks, after a mark, and waits for it for so many seconds;
            may raise any `LookupBufferError`.
    """

    def __init__(
        self,
        copy: Callable[[ChunkLoad, Any, float], None],
        counters: Counters,
        log: RateLimitedLog,
        handoff_threads: int = HANDOFF_THREADS,
    ) -> None:
        self._copy = copy
        self._counters = counters
        self._log = log
        self._here: _Queue = queue.SimpleQueue()
        """Of chunks that are pinned on this host."""
        self._handoffs: _Queue = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._results = LoadResults()
        self._closed = False
        self._queues = [self._here, *[self._handoffs] * handoff_threads]
        """Of each thread."""
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name="lb-kv-load", daemon=True)
            for each in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def put(self, load: RequestLoad, after: Any) -> None:
        """Enqueue a load, in the model's thread. It runs after the mark `after`; see
        `Pages.mark`."""
        with self._changed:
            self._pending += 1
        is_handoff = any(chunk.transfer for chunk in load.chunks)
        (self._handoffs if is_handoff else self._here).put(_Waiting(load, after))

    def call(self, job: Callable[[], None]) -> None:
        """Run `job` on the thread of what is pinned on this host, behind those loads so far. What
        it raises is only logged."""
        self._here.put(job)

    def take(self, timeout: float) -> LoadResults:
        """The loads that ended since the last call. Waits for one, at most `timeout` seconds, if a
        load is in flight and none has ended.

        A request and its lost blocks are in one result; vLLM relies on that. The wait is there
        because vLLM polls: its thread would keep the GIL from the thread that copies.
        """
        with self._changed:
            if self._pending and timeout > 0:
                self._changed.wait_for(lambda: bool(self._results.loaded), timeout)
            results, self._results = self._results, LoadResults()
        return results

    def close(self, timeout: float) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            for each in self._queues:
                each.put(None)
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, entries: "_Queue") -> None:
        use_every_core()
        while (entry := entries.get()) is not None:
            if callable(entry):
                self._call(entry)
                continue
            lost = set() if self._closed else self._load(entry)
            request_id = entry.load.request_id
            with self._changed:
                self._pending -= 1
                self._results.loaded.add(request_id)
                if lost:
                    self._results.failed.add(request_id)
                    self._results.lost_blocks |= lost
                self._changed.notify_all()

    def _call(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 -- top of a thread that has loads to run
            self._log.report("device", "the GPU failed: %s", error)

    def _load(self, waiting: _Waiting) -> set[int]:
        """Load the chunks. Returns the blocks that were not filled: those of the first chunk that
        failed and of all later ones, as vLLM uses nothing after a gap."""
        load, waited = waiting.load, time.monotonic() - waiting.since
        seconds = max(HANDOFF_SECONDS - waited, HANDOFF_SECONDS_MIN)
        for index, chunk in enumerate(load.chunks):
            try:
                self._copy(chunk, waiting.after, seconds)
                seconds = HANDOFF_SECONDS
            except LookupBufferError as error:
                self._report("lost", error)
            except Exception as error:  # noqa: BLE001 -- top of a thread; vLLM waits for a result
                self._report("internal", error)
            else:
                continue
            return {block for left in load.chunks[index:] for block in left.blocks}
        return set()

    def _report(self, reason: str, error: Exception) -> None:
        self._counters.add(f"load_failed:{reason}")
        self._log.report(reason, "KV failed to load and is computed: %s", error)


_Queue = queue.SimpleQueue[_Waiting | Callable[[], None] | None]


class PagedChunk:
    """A chunk that waits to be stored, in vLLM's blocks or in a copy. Thread-safe."""

    def __init__(self, pages: "Pages", blocks: Sequence[int], after: Any) -> None:
        self._pages = pages
        self._after = after
        self.blocks = blocks
        self.nbytes = pages.chunk_bytes(len(blocks))
        self._lock = threading.Lock()
        self._copy: torch.Tensor | None = None
        self._done = False

    @property
    def is_detached(self) -> bool:
        """Whether it no longer depends on its blocks."""
        return self._done or self._copy is not None

    def copy_out(self) -> "torch.Tensor":
        """Its bytes. The first call copies them. Do not call this after `drop`.

        Raises:
            BufferFull: its blocks were overwritten, because there was no memory for a copy.
        """
        with self._lock:
            if self._done:
                raise BufferFull(
                    "no memory for a copy of the chunk before vLLM overwrote its blocks"
                )
            if self._copy is None:
                self._copy = self._pages.gather(self.blocks, self._after)
            return self._copy

    def detach(self) -> None:
        """Copy it out, unless that is done, before its blocks are overwritten."""
        with self._lock:
            if not self.is_detached:
                self._copy = self._pages.gather(self.blocks, self._after)

    def drop(self) -> None:
        """Free the copy: the chunk was stored, or will not be."""
        with self._lock:
            self._done, self._copy = True, None


class BlocksInUse:
    """The queued chunks that still depend on their blocks. For the model's thread only.

    A block may belong to several chunks: prompts with a common prefix share the blocks of vLLM up
    to its end, which may be within a chunk, and each prompt may be handed over.
    """

    def __init__(self) -> None:
        self._chunks: list[PagedChunk] = []

    def add(self, chunk: PagedChunk) -> None:
        self._chunks.append(chunk)

    def copy_out_before_writes(self, written: Iterable[int]) -> int:
        """Copy chunks out of the blocks `written`, before those are overwritten. A chunk is dropped
        if there is no memory for its copy. Returns the number of copied and dropped chunks."""
        if not self._chunks:
            return 0
        self._chunks = [chunk for chunk in self._chunks if not chunk.is_detached]
        blocks = set(written)
        due = [chunk for chunk in self._chunks if not blocks.isdisjoint(chunk.blocks)]
        for chunk in due:
            try:
                chunk.detach()
            except Exception:  # noqa: BLE001 -- the model's thread: vLLM continues without this chunk
                chunk.drop()
        return len(due)


class Pages(ABC):
    """The paged KV cache of one rank, all its layers, with copies of chunks out and in.

    Args:
        layers: by name, as vLLM registers them; layers that share memory count once.
        num_blocks: of vLLM's block manager.

    Raises:
        ValueError: the layers differ in shape or dtype, so a chunk cannot be one tensor.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        distinct = {layer.data_ptr(): layer for layer in layers.values()}
        self.layers = [pages_of(layer, num_blocks) for layer in distinct.values()]
        if len({(layer.dtype, layer.shape[1:]) for layer in self.layers}) != 1:
            raise ValueError("the layers of this model differ in the shape or dtype of their KV")

    def chunk_bytes(self, blocks: int) -> int:
        page = self.layers[0][0]
        return len(self.layers) * blocks * page.numel() * page.itemsize

    @abstractmethod
    def mark(self) -> Any:
        """In the model's thread: a mark after all work enqueued for the model so far."""

    @abstractmethod
    def gather(self, blocks: Sequence[int], after: Any) -> torch.Tensor:
        """Copy the chunk in `blocks`, as it is at the mark `after`, to the host. Waits for the
        copy."""

    @abstractmethod
    def scatter(self, blocks: Sequence[int], chunk: torch.Tensor, first: int, after: Any) -> None:
        """Copy the blocks of a chunk on the host, from its block `first` on, to `blocks`, after the
        mark `after`. Waits for the copy."""


class HostPages(Pages):
    """For models on the CPU."""

    def mark(self) -> Any:
        return None

    def gather(self, blocks: Sequence[int], after: Any) -> torch.Tensor:
        return gather_blocks(self.layers, blocks)

    def scatter(self, blocks: Sequence[int], chunk: torch.Tensor, first: int, after: Any) -> None:
        scatter_blocks(self.layers, blocks, chunk, first)


class CudaPages(Pages):
    """For CUDA and ROCm."""

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        super().__init__(layers, num_blocks)
        self._device: Final = self.layers[0].device
        self._saves = _cuda.Stream(self._device)
        self._loads = _cuda.Stream(self._device)

    def mark(self) -> Any:
        return _cuda.current_stream(self._device).record_event()

    def gather(self, blocks: Sequence[int], after: Any) -> torch.Tensor:
        with _cuda.stream(self._saves):
            self._saves.wait_event(after)
            chunk = gather_blocks(self.layers, blocks)
            host = torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True)
            host.copy_(chunk, non_blocking=True)
            copied = self._saves.record_event(_cuda.Event(blocking=True))
        copied.synchronize()
        return host

    def scatter(self, blocks: Sequence[int], chunk: torch.Tensor, first: int, after: Any) -> None:
        part = chunk[:, first : first + len(blocks)]
        with _cuda.stream(self._loads):
            self._loads.wait_event(after)
            scatter_blocks(self.layers, blocks, part.to(self._device, non_blocking=True))
            copied = self._loads.record_event(_cuda.Event(blocking=True))
        copied.synchronize()
