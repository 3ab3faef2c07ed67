"""The scheduler side: what vLLM is promised in a pass, and what goes to the workers at its end.

Runs on vLLM's scheduler thread; `LookupBufferECConnector` calls it. It uses the buffer's client and
attributes of vLLM's requests, and imports neither vLLM nor torch.

One rule: vLLM gets a yes for an item only while its bytes are pinned on this host. A promise that
does not load ends the engine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from connectors.counters import Counters, logger
from connectors.ec.claims import EcClaims
from connectors.ec.deliveries import MetadataWaits
from connectors.ec.fetching import FetchingSource
from connectors.ec.gate import EcGate
from connectors.ec.items import EngineCache, ItemVariants, PassCache, Pin, PinTable, StoredItems
from connectors.ec.locating import LocatingSource
from connectors.ec.metadata import ItemLoad, StepMetadata, WorkerCounts
from connectors.ec.republishing import EcRepublishing
from connectors.ec.shape import EngineShape
from connectors.ec.watch import embeds_of
from connectors.identifiers import Adapters, ItemPayload, NotShareable, payload_of, shared_key
from connectors.pass_time import IdleTime, PassTime, PassTimes
from connectors.settings import ConnectorSettings
from lookup_buffer.key import TensorKey

if TYPE_CHECKING:
    from connectors.ec.supply import ItemSource
    from lookup_buffer.client.buffer import LookupBuffer


class EcScheduler:
    """See the module. Every method runs on vLLM's scheduler thread. None raises for a fault of the
    node, of Redis or of a peer."""

    def __init__(
        self,
        buffer: "LookupBuffer",
        settings: ConnectorSettings,
        shape: EngineShape,
        *,
        metadata_fields: Callable[[str], set[str]],
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._shape = shape
        self._metadata_fields = metadata_fields
        self.counters = counters or Counters()
        self.pins = PinTable(
            buffer,
            settings.pin_budget_bytes,
            shape.steps_in_flight,
            shape.embed_bytes,
            shape.outputs,
        )
        self.stored_items = StoredItems()
        self._engine_cache = EngineCache()
        self._adapters = Adapters(encode=shape.adapters_encode)
        self.claims = EcClaims(
            buffer,
            settings,
            shape,
            engine_cache=self._engine_cache,
            counters=self.counters,
            clock=clock,
        )
        self._step = 0
        self.variants = ItemVariants()
        """What vLLM's current requests mean by the identifiers of items; the gate updates it."""
        self._pass_cache = PassCache(self.variants)
        self._loads: dict[str, tuple[ItemLoad, Pin | None]] = {}
        self._allocated: dict[str, str] = {}
        """Items that vLLM allocated in this pass, and the request of the last allocation."""
        self._lost: set[str] = set()
        """Items that vLLM asked for in this pass although its own cache should hold them."""
        self._saves: dict[str, str] = {}
        self._from_media: set[str] = set()
        self._encodes: list[tuple[str, str, int]] = []
        """Encodes of this pass: identifier, request, and index in the request."""
        self._encoded_rows = 0
        """Rows of these encodes."""
        times = PassTimes(
            PassTime(settings.first_sight_seconds, clock),
            IdleTime(settings.idle_wait_seconds, clock),
        )
        self._item_source = self._make_item_source(settings, times, clock)
        self._republishing = EcRepublishing(buffer, self._engine_cache, clock=clock)
        self.gate = self._make_gate(settings, times, clock)

    def _make_gate(
        self, settings: ConnectorSettings, times: PassTimes, clock: Callable[[], float]
    ) -> EcGate:
        metadata_waits = MetadataWaits(
            self._buffer,
            self.pins,
            self.claims,
            wait_seconds=settings.metadata_wait_seconds,
            clock=clock,
        )
        return EcGate(
            self._item_source,
            self.claims,
            metadata_waits,
            self._republishing if self._shape.is_producer else None,
            pins=self.pins,
            engine_cache=self._engine_cache,
            variants=self.variants,
            pass_cache=self._pass_cache,
            times=times,
            settings=settings,
            shape=self._shape,
            metadata_fields=self._metadata_fields,
            adapters=self._adapters,
            counters=self.counters,
            clock=clock,
        )

    def _make_item_source(
        self, settings: ConnectorSettings, times: PassTimes, clock: Callable[[], float]
    ) -> "ItemSource":
        wait_seconds = settings.fetch_wait_seconds
        if not self._shape.is_consumer:
            return LocatingSource(
                self._buffer, self.stored_items, times.first_sights, wait_seconds, clock
            )
        return FetchingSource(
            self._buffer,
            self.pins,
            self.claims,
            self._pass_cache,
            times=times,
            wait_seconds=wait_seconds,
            counters=self.counters,
            clock=clock,
        )

    @property
    def engine_cache(self) -> EngineCache:
        """What vLLM's own cache holds, as far as its calls show."""
        return self._engine_cache

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item can be loaded (on a pure producer: need not be encoded).

        The answer holds for the rest of the pass, even if the item is lost meanwhile.
        """
        # vLLM asks only for items that its own cache lacks.
        if identifier in self._engine_cache or self._engine_cache.is_empty(identifier):
            self._engine_cache.discard(identifier)
            self._lost.add(identifier)
        wanted = identifier, self.variants.of(identifier)
        answer = self._pass_cache.get(wanted)
        if answer is None:
            answer = self._item_source.promise(*wanted) or (
                identifier in self._lost and self._item_source.look_up_lost(*wanted)
            )
            self._pass_cache[wanted] = answer
        return answer

    def item_allocated(self, request: Any, index: int, *, is_hit: bool) -> None:
        """vLLM allocated an item in its own cache, to load it or to encode it."""
        feature = request.mm_features[index]
        identifier: str = feature.identifier
        self._allocated[identifier] = request.request_id
        position = feature.mm_position
        self.gate.allocated(request.request_id, identifier, position.offset + position.length)
        if not is_hit:
            self.pins.discard(identifier)
            self._encodes.append((identifier, request.request_id, index))
            self._encoded_rows += embeds_of(feature)
            self._engine_cache.add(identifier, self._encode(request, feature))
        elif not self._shape.is_consumer:
            self._engine_cache.add_empty(identifier)
            self.counters.add("encode_skipped")
        else:
            if identifier not in self._loads:
                self._load(request, feature)
            _, pin = self._loads[identifier]
            self._engine_cache.add(identifier, None if pin is None else pin.handle.key)

    def _load(self, request: Any, feature: Any) -> None:
        pin = self.pins.take(feature.identifier)
        order = None if pin is None else pin.order
        key = None if pin is None else pin.handle.key.text
        load = ItemLoad(feature.identifier, embeds_of(feature), order, key)
        self._loads[feature.identifier] = (load, pin)
        if pin is None or order is None:
            return
        self.pins.record_size(load.num_token, order.nbytes)
        source = pin.handle.source
        where = "lane" if order.lane else "local" if source == "local" else "remote"
        self.counters.add(f"load_{where}")
        self.counters.add(f"loaded_{where}_bytes", order.nbytes)
        _log(request.request_id, feature.identifier, source, order.nbytes)

    def _encode(self, request: Any, feature: Any) -> TensorKey | None:
        """Record the encode, and return the key under which the output may be stored."""
        _log(request.request_id, feature.identifier, "encoded", 0)
        if payload_of(feature, self._metadata_fields) is not ItemPayload.MEDIA:
            return None
        self._from_media.add(feature.identifier)
        if not self._shape.is_producer:
            return None
        try:
            mm_hash = getattr(feature, "mm_hash", None)
            key = shared_key(feature.identifier, request, self._adapters, mm_hash)
        except NotShareable:
            return None  # counted at the request's first poll
        self._save(request.request_id, feature.identifier, key)
        return key

    def _save(self, request_id: str, identifier: str, key: TensorKey) -> None:
        """The step that is being built encodes the item; it is stored afterwards."""
        self._saves[identifier] = key.text
        self.gate.encode_begun(identifier, self.claims.encode_begins(request_id, identifier, key))

    # -- the end of a pass ---------------------------------------------------------------------

    def build_metadata(self, scheduler_output: Any) -> StepMetadata:
        """End the pass, and return what the workers load and may store in this step."""
        self._step += 1
        self.pins.release_finished(self._step)
        for identifier in scheduler_output.free_encoder_mm_hashes:
            # Some vLLM versions also name items that were evicted and came back in the same pass.
            if self._allocated.get(identifier) in scheduler_output.num_scheduled_tokens:
                continue
            self._engine_cache.discard(identifier)
            _, pin = self._loads.pop(identifier, (None, None))
            if pin is not None:
                self.pins.release(pin)
        if scheduler_output.free_encoder_mm_hashes:
            self._engine_cache.evictions += 1
        if self._lost.difference(scheduler_output.free_encoder_mm_hashes):
            self._engine_cache.clear(keep=self._allocated)
        self._lost.clear()
        self._item_source.end_pass()
        for request_id in scheduler_output.finished_req_ids:
            self.gate.forget(request_id)
        metadata = StepMetadata()
        # V1 workers skip a step without tokens before they call the connector. Encode-only workers
        # do not.
        runs = scheduler_output.total_num_scheduled_tokens > 0 or not self._shape.is_consumer
        if runs:
            if not self._shape.is_consumer:
                self._encode_lost_items(scheduler_output)
            self._cancel_unscheduled(scheduler_output.scheduled_encoder_inputs)
            metadata.mm_datas = [load for load, _ in self._loads.values()]
            metadata.encodes = self._from_media
            metadata.namespace = self._buffer.namespace
            lost = self._republishing.take()
            if metadata.namespace:
                metadata.saves, metadata.lost = self._saves, lost
            self.pins.dispatch(
                self._step, [pin for _, pin in self._loads.values() if pin is not None]
            )
            self._loads = {}
            self._saves = {}
            self._from_media = set()
        self.claims.end_pass(self._step, dispatched=runs)
        self.pins.end_pass()
        self._pass_cache.clear()
        self._allocated.clear()
        self.gate.end_pass(is_idle=not scheduler_output.total_num_scheduled_tokens)
        return metadata

    def _encode_lost_items(self, scheduler_output: Any) -> None:
        """Encode items that an encode-only engine skipped because they were stored, and that are
        lost now.

        vLLM counts such an item as encoded, calls no connector for it, and would never encode it.
        Its cache has the allocation already, and the step's encodes stay within vLLM's limit. This
        is the one place where the connector changes what vLLM has scheduled.
        """
        for request_id in scheduler_output.num_scheduled_tokens:
            for item in self.gate.missing_items(request_id):
                rows = self._encoded_rows + item.num_embeds
                if not self._engine_cache.is_empty(item.identifier) or (
                    self._encodes and rows > self._shape.encode_rows
                ):
                    continue
                scheduled = scheduler_output.scheduled_encoder_inputs
                scheduled.setdefault(request_id, []).append(item.index)
                self._encodes.append((item.identifier, request_id, item.index))
                self._encoded_rows = rows
                _log(request_id, item.identifier, "encoded", 0)
                self._from_media.add(item.identifier)
                self._engine_cache.add(item.identifier, item.key)
                self._save(request_id, item.identifier, item.key)

    def _cancel_unscheduled(self, scheduled: Mapping[str, Sequence[int]]) -> None:
        """Cancel the encodes of this pass that vLLM took back."""
        for identifier, request_id, index in self._encodes:
            if index not in scheduled.get(request_id, ()):
                self.claims.encode_cancelled(identifier)
        self._encodes.clear()
        self._encoded_rows = 0

    def add_worker_counts(self, report: WorkerCounts) -> None:
        """Add what the workers counted in a step."""
        for name, count in report.counts.items():
            self.counters.add(name, count)
        self._shape.outputs.encoded |= report.encoded

    def close(self) -> None:
        """The engine shuts down: release everything and close the client. Idempotent."""
        for _, pin in self._loads.values():
            if pin is not None:
                self.pins.release(pin)
        self._loads.clear()
        self.pins.release_all()
        self._buffer.close()


def _log(request_id: str, identifier: str, source: str, nbytes: int) -> None:
    """The outcome for an item: `encoded`, or the source of its bytes, `local` or a node's id."""
    logger.debug("request %s: item %s %s, %d bytes", request_id, identifier, source, nbytes)
