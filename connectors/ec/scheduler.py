"""The scheduler side: what vLLM is promised in a pass, and what the workers are told at its end.

Runs in vLLM's scheduler thread. Knows the buffer's client and the attributes of vLLM's requests;
imports neither vLLM nor torch.

The rule that everything here serves: vLLM is told that an item can be loaded only while its bytes
are pinned on this host. A promise that does not load kills the engine.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connectors.counters import Counters, IdleTime, PassTime, PassTimes, logger
from connectors.ec.answers import Answers
from connectors.ec.claims import EcClaims
from connectors.ec.deliveries import EcDeliveries
from connectors.ec.engine_cache import EngineCache
from connectors.ec.fetching import EcFetching
from connectors.ec.gate import EcGate
from connectors.ec.located import Located
from connectors.ec.locating import EcLocating
from connectors.ec.meanings import Meanings
from connectors.ec.metadata import ItemLoad, StepMetadata, WorkerCounts
from connectors.ec.pins import Pin, PinTable
from connectors.ec.republishing import EcRepublishing
from connectors.ec.shape import EngineShape
from connectors.ec.watch import embeds_of
from connectors.identifiers import Adapters, Carried, NotShareable, carried_by, shared_key
from connectors.settings import ConnectorSettings
from lookup_buffer.key import TensorKey

if TYPE_CHECKING:
    from connectors.ec.supply import ItemSupply
    from lookup_buffer.client.buffer import LookupBuffer

RECORDS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """What became of one item that vLLM made room for."""

    request_id: str
    identifier: str
    source: str
    """`encoded`, or from where the bytes came: `local` or the id of a node."""
    nbytes: int


class EcScheduler:
    """See the module. Every method is called by vLLM's scheduler thread only; none raises for a
    fault of the node, of Redis or of a peer."""

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
        self.records: deque[ItemRecord] = deque(maxlen=RECORDS_KEPT)
        """The last items, newest at the end: for demos, tests and debugging."""
        self.pins = PinTable(
            buffer,
            settings.pin_budget_bytes,
            shape.steps_in_flight,
            shape.embed_bytes,
            shape.outputs,
        )
        self.located = Located()
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
        self.meanings = Meanings()
        """What the requests that vLLM has now mean by the names of items; kept by the gate."""
        self._answers = Answers(self.meanings)
        self._loads: dict[str, tuple[ItemLoad, Pin | None]] = {}
        self._allocated: dict[str, str] = {}
        """Items that vLLM made room for in this pass, and for which request it last did."""
        self._lost: set[str] = set()
        """Items that vLLM asked for in this pass though its own cache had them."""
        self._saves: dict[str, str] = {}
        self._from_media: set[str] = set()
        self._encodes: list[tuple[str, str, int]] = []
        """Of this pass: identifier, request, and position in it."""
        self._encoded_rows = 0
        """Of these."""
        times = PassTimes(
            PassTime(settings.first_sight_seconds, clock),
            IdleTime(settings.idle_wait_seconds, clock),
        )
        self._supply = self._make_supply(settings, times, clock)
        self._republishing = EcRepublishing(buffer, self._engine_cache, clock=clock)
        self.gate = self._make_gate(settings, times, clock)

    def _make_gate(
        self, settings: ConnectorSettings, times: PassTimes, clock: Callable[[], float]
    ) -> EcGate:
        deliveries = EcDeliveries(
            self._buffer,
            self.pins,
            self.claims,
            wait_seconds=settings.metadata_wait_seconds,
            clock=clock,
        )
        return EcGate(
            self._supply,
            self.claims,
            deliveries,
            self._republishing if self._shape.is_producer else None,
            pins=self.pins,
            engine_cache=self._engine_cache,
            meanings=self.meanings,
            answers=self._answers,
            times=times,
            settings=settings,
            shape=self._shape,
            metadata_fields=self._metadata_fields,
            adapters=self._adapters,
            counters=self.counters,
            clock=clock,
        )

    def _make_supply(
        self, settings: ConnectorSettings, times: PassTimes, clock: Callable[[], float]
    ) -> "ItemSupply":
        wait_seconds = settings.fetch_wait_seconds
        if not self._shape.is_consumer:
            return EcLocating(self._buffer, self.located, times.first_sights, wait_seconds, clock)
        return EcFetching(
            self._buffer,
            self.pins,
            self.claims,
            self._answers,
            times=times,
            wait_seconds=wait_seconds,
            counters=self.counters,
            clock=clock,
        )

    @property
    def engine_cache(self) -> EngineCache:
        """What vLLM itself holds, as far as it has told us."""
        return self._engine_cache

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item can be loaded (on a pure producer: need not be encoded).

        The answer holds for the rest of the pass, whatever happens to the item meanwhile.
        """
        # vLLM asks only for what its own cache lacks.
        if identifier in self._engine_cache or self._engine_cache.is_empty(identifier):
            self._engine_cache.discard(identifier)
            self._lost.add(identifier)
        asked = identifier, self.meanings.of(identifier)
        answer = self._answers.get(asked)
        if answer is None:
            answer = self._supply.promise(*asked) or (
                identifier in self._lost and self._supply.look_again(*asked)
            )
            self._answers[asked] = answer
        return answer

    def item_allocated(self, request: Any, index: int, *, is_hit: bool) -> None:
        """vLLM made room for an item in its own cache, to load it or to encode it."""
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
        self.pins.saw_size(load.num_token, order.nbytes)
        source = pin.handle.source
        where = "lane" if order.lane else "local" if source == "local" else "remote"
        self.counters.add(f"load_{where}")
        self.counters.add(f"loaded_{where}_bytes", order.nbytes)
        self._record(request.request_id, feature.identifier, source, order.nbytes)

    def _encode(self, request: Any, feature: Any) -> TensorKey | None:
        """The key under which the output may be stored."""
        self._record(request.request_id, feature.identifier, "encoded", 0)
        if carried_by(feature, self._metadata_fields) is not Carried.MEDIA:
            return None
        self._from_media.add(feature.identifier)
        if not self._shape.is_producer:
            return None
        try:
            mm_hash = getattr(feature, "mm_hash", None)
            key = shared_key(feature.identifier, request, self._adapters, mm_hash)
        except NotShareable:
            return None  # counted when the request was first seen
        self._save(request.request_id, feature.identifier, key)
        return key

    def _save(self, request_id: str, identifier: str, key: TensorKey) -> None:
        """The item is encoded in the step that is being built, and stored after it."""
        self._saves[identifier] = key.text
        self.gate.found(identifier, self.claims.encodes(request_id, identifier, key))

    def _record(self, request_id: str, identifier: str, source: str, nbytes: int) -> None:
        self.records.append(ItemRecord(request_id, identifier, source, nbytes))
        logger.debug("request %s: item %s %s, %d bytes", request_id, identifier, source, nbytes)

    # -- the end of a pass ---------------------------------------------------------------------

    def build_metadata(self, scheduler_output: Any) -> StepMetadata:
        """Close the pass: what the workers have to load and may store in this step."""
        self._step += 1
        self.pins.land(self._step)
        for identifier in scheduler_output.free_encoder_mm_hashes:
            # Some hosts also name what was driven out and then came back in the same pass.
            if self._allocated.get(identifier) in scheduler_output.num_scheduled_tokens:
                continue
            self._engine_cache.discard(identifier)
            _, pin = self._loads.pop(identifier, (None, None))
            if pin is not None:
                self.pins.release(pin)
        if scheduler_output.free_encoder_mm_hashes:
            self._engine_cache.evictions += 1
        if self._lost.difference(scheduler_output.free_encoder_mm_hashes):
            self._engine_cache.was_reset(but=self._allocated)
        self._lost.clear()
        self._supply.end_pass()
        for request_id in scheduler_output.finished_req_ids:
            self.gate.forget(request_id)
        metadata = StepMetadata()
        # V1 workers skip a step without tokens before they come to us (encode-only ones do not).
        runs = scheduler_output.total_num_scheduled_tokens > 0 or not self._shape.is_consumer
        if runs:
            if not self._shape.is_consumer:
                self._encode_what_was_skipped(scheduler_output)
            self._see_what_runs(scheduler_output.scheduled_encoder_inputs)
            metadata.mm_datas = [load for load, _ in self._loads.values()]
            metadata.encodes = self._from_media
            metadata.namespace = self._buffer.namespace
            lost = self._republishing.take()
            if metadata.namespace:
                metadata.saves, metadata.lost = self._saves, lost
            self.pins.fly(self._step, [pin for _, pin in self._loads.values() if pin is not None])
            self._loads = {}
            self._saves = {}
            self._from_media = set()
        self.claims.end_pass(self._step, dispatched=runs)
        self.pins.end_pass()
        self._answers.clear()
        self._allocated.clear()
        self.gate.end_pass(is_idle=not scheduler_output.total_num_scheduled_tokens)
        return metadata

    def _encode_what_was_skipped(self, scheduler_output: Any) -> None:
        """Have encoded what an engine that only encodes had skipped, because it was stored, and the
        buffer has lost since: vLLM takes it for encoded, asks nobody, and would never encode it.
        Its cache has the room already; the step's encodes stay within vLLM's bound.

        The one place where we write into what vLLM has scheduled.
        """
        for request_id in scheduler_output.num_scheduled_tokens:
            for item in self.gate.lacked(request_id):
                rows = self._encoded_rows + item.num_embeds
                if not self._engine_cache.is_empty(item.identifier) or (
                    self._encodes and rows > self._shape.encode_rows
                ):
                    continue
                scheduled = scheduler_output.scheduled_encoder_inputs
                scheduled.setdefault(request_id, []).append(item.index)
                self._encodes.append((item.identifier, request_id, item.index))
                self._encoded_rows = rows
                self._record(request_id, item.identifier, "encoded", 0)
                self._from_media.add(item.identifier)
                self._engine_cache.add(item.identifier, item.key)
                self._save(request_id, item.identifier, item.key)

    def _see_what_runs(self, scheduled: Mapping[str, Sequence[int]]) -> None:
        for identifier, request_id, index in self._encodes:
            if index not in scheduled.get(request_id, ()):
                self.claims.not_run(identifier)
        self._encodes.clear()
        self._encoded_rows = 0

    def heard(self, report: WorkerCounts) -> None:
        """What the workers told of a step."""
        for name, count in report.counts.items():
            self.counters.add(name, count)
        self._shape.outputs.encoded |= report.encoded

    def close(self) -> None:
        """The engine ends: nothing is held any more, and the client with it. Idempotent."""
        for _, pin in self._loads.values():
            if pin is not None:
                self.pins.release(pin)
        self._loads.clear()
        self.pins.release_all()
        self._buffer.close()
