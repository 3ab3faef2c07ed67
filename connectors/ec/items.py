"""The scheduler side's state of items: pins, variants, and the answers given to vLLM.

Pure bookkeeping on vLLM's scheduler thread, apart from one-way `release` messages to the node.

`PinTable` has the prefetched items: which bytes are pinned, for which requests, and until when. A
pin has one of three states:

    waiting     needed by requests that were not scheduled yet
    promised    vLLM got a yes for the item in this pass and relies on it until the pass ends, so
                the pin is kept until then
    in flight   part of a step that went to the workers; kept until that step has certainly run

`StoredItems` is its counterpart on an engine that only encodes: nothing is pinned there.

`ItemVariants` has what current requests mean by one identifier. A client may give two contents one
name (`uuid`), and an adapter may be loaded again under its old name. vLLM asks for an item by its
identifier alone, so bytes that fit one request could be loaded for another, and vLLM's engine dies
of an output with too few rows.

`PassCache` has the answers of the current pass: vLLM asks for an item several times in a pass and
relies on one answer.

`EngineCache` has what vLLM's own encoder cache holds, from its allocations and evictions. It is a
hint: vLLM reports evictions at the end of a pass, and `reset_encoder_cache` (also through `/pause`
and `/sleep`) has no hook; it shows when vLLM asks for an item that its cache should hold.
"""

from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.key import TensorKey

if TYPE_CHECKING:
    from connectors.ec.outputs import EncoderOutputs
    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import LoadOrder, PrefetchHandle


@dataclass(slots=True, eq=False)
class Pin:
    """One prefetched item."""

    identifier: str
    handle: "PrefetchHandle"
    nbytes: int
    """Bytes that count against the budget. An estimate, because the true size is known on
    arrival."""
    wanted_by: set[str] = field(default_factory=set)
    modalities: set[str] = field(default_factory=set)
    """The modalities that requests give for the item."""
    order: "LoadOrder | None" = None
    """The location of the bytes at the time of the promise."""

    @property
    def rows(self) -> int:
        """Rows of the output that arrived; -1 where it has none."""
        shape = self.handle.order.header.shape if self.handle.order is not None else ()
        return shape[0] if shape else -1

    def wait(self, timeout: float) -> bool:
        """Whether the prefetch is settled; waits at most `timeout` seconds."""
        if self.handle.state is PrefetchState.PENDING and timeout > 0:
            self.handle.wait(timeout)
        return self.handle.state is not PrefetchState.PENDING


class PinTable:
    """All pins of one engine.

    Args:
        buffer: the client that releases pins.
        budget_bytes: limit for the bytes of all pins together.
        steps_in_flight: how many steps vLLM may have scheduled and not finished. A step has
            certainly run once that many more were built.
        row_bytes: first estimate for the size of one row, in bytes.
        outputs: what may be promised; shared with `EcScheduler`.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        budget_bytes: int,
        steps_in_flight: int,
        row_bytes: int,
        outputs: "EncoderOutputs",
    ) -> None:
        self._buffer = buffer
        self._budget_bytes = budget_bytes
        self._steps_in_flight = steps_in_flight
        self._row_bytes = row_bytes
        self._outputs = outputs
        self._waiting: dict[str, Pin] = {}
        self._promised: dict[str, Pin] = {}
        self._in_flight: deque[tuple[int, list[Pin]]] = deque()
        self.held_bytes = 0

    def __len__(self) -> int:
        """Pins in all states."""
        in_flight = sum(len(pins) for _, pins in self._in_flight)
        promised = sum(self._waiting.get(key) is not pin for key, pin in self._promised.items())
        return len(self._waiting) + promised + in_flight

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    def has_space(self, nbytes: int) -> bool:
        return self.held_bytes + nbytes <= self._budget_bytes

    def estimated_bytes(self, rows: int) -> int:
        """Estimated size of an item with so many rows, from the last items that arrived."""
        return rows * self._row_bytes

    def charge(self, pin: Pin) -> None:
        """Count a pin against the budget that is in none of the states yet. `release` ends that."""
        self.held_bytes += pin.nbytes

    def discharge(self, pin: Pin) -> None:
        """No longer count a pin that was charged. It stays with the node."""
        self.held_bytes -= pin.nbytes

    def record_size(self, rows: int, nbytes: int) -> None:
        """An item with so many rows and bytes has arrived."""
        self._row_bytes = max(1, nbytes // max(1, rows))

    def get(self, identifier: str) -> Pin | None:
        """The waiting pin of this item."""
        return self._waiting.get(identifier)

    def is_resident(self, pin: Pin) -> bool:
        """Whether the bytes are pinned in the node's arena, and may be loaded.

        After the loss of the session dispatched loads still succeed for a while. A waiting pin may
        wait longer than that, so its handle fails then.
        """
        handle = pin.handle
        is_pinned = handle.state is PrefetchState.RESIDENT and handle.order is not None
        return is_pinned and self._is_sharing

    def misfit_reason(
        self, pin: Pin, num_embeds: int | None, *, any_float: bool = False
    ) -> MaybeMissed:
        """Why a settled item is not what a request expects: a resident output of this model's
        encoder with so many rows. "" if it is. The reason is part of a counter's name.

        Args:
            num_embeds: None where vLLM does not name the request.
            any_float: see `EncoderOutputs.misfit`.
        """
        handle = pin.handle
        if handle.state is not PrefetchState.RESIDENT or handle.order is None:
            return handle.reason or MissReason.ABSENT
        if not self._is_sharing:
            return MissReason.WEIGHTS_CHANGED
        if num_embeds not in (None, pin.rows):
            return MissReason.SHAPE
        return self._outputs.misfit(handle.order.header, pin.modalities, any_float=any_float)

    def promise_all(self, rows: Mapping[str, int]) -> bool:
        """Promise these items, which cannot be encoded here, if the bytes of all of them are
        resident and fit. Otherwise promise none."""
        pins = [(self._waiting.get(identifier), count) for identifier, count in rows.items()]
        held = [
            pin
            for pin, count in pins
            if pin is not None and not self.misfit_reason(pin, count, any_float=True)
        ]
        if len(held) < len(pins):
            return False
        for pin in held:
            self.promise(pin)
        return True

    @property
    def _is_sharing(self) -> bool:
        """Whether the engine loads what it has pinned: not once its weights have changed."""
        return bool(self._buffer.namespace)

    def may_arrive(self, identifier: str) -> bool:
        """Whether the bytes are resident or in flight, so that no new prefetch is needed."""
        pin = self._waiting.get(identifier)
        return pin is not None and (
            pin.handle.state is PrefetchState.PENDING or self.is_resident(pin)
        )

    def add(self, pin: Pin) -> None:
        """Add a waiting pin. It replaces a failed one of the same item and takes over its
        requests."""
        failed = self._waiting.get(pin.identifier)
        if failed is not None:
            pin.wanted_by |= failed.wanted_by
            self.discard(pin.identifier)
        self._waiting[pin.identifier] = pin
        self.charge(pin)

    def drop(self, identifier: str, request_id: str) -> None:
        """The request no longer needs the item. After the last one the pin is released."""
        pin = self._waiting.get(identifier)
        if pin is None:
            return
        pin.wanted_by.discard(request_id)
        if not pin.wanted_by:
            self.discard(identifier)

    def discard(self, identifier: str) -> None:
        """No request needs this item loaded any more."""
        pin = self._waiting.pop(identifier, None)
        if pin is not None and self._promised.get(identifier) is not pin:
            self.release(pin)

    def discard_other(self, identifier: str, key: TensorKey) -> None:
        """Discard a pin under another key: the identifier now stands for `key`, for example after
        another adapter took the same name."""
        pin = self._waiting.get(identifier)
        if pin is not None and pin.handle.key != key:
            self.discard(identifier)

    def promise(self, pin: Pin) -> None:
        """vLLM got a yes for this item in the current pass."""
        pin.order = pin.handle.order
        former = self._promised.get(pin.identifier)
        if former is not None and former is not pin:  # from a node that was lost in this pass
            self.release(former)
        self._promised[pin.identifier] = pin

    def promise_now(self, pin: Pin) -> None:
        """As `promise`, for a pin that no request waits for. It ends with the pass."""
        self.charge(pin)
        self.promise(pin)

    def take(self, identifier: str) -> Pin | None:
        """Take out the promised pin of an item that vLLM allocated. The caller owns it from then
        on."""
        pin = self._promised.pop(identifier, None)
        if pin is not None and self._waiting.get(identifier) is pin:
            del self._waiting[identifier]
        return pin

    def end_pass(self) -> None:
        """End the promises that vLLM did not use, and release those that no request needs."""
        for identifier, pin in self._promised.items():
            if self._waiting.get(identifier) is not pin:
                self.release(pin)
        self._promised.clear()

    def dispatch(self, step: int, pins: list[Pin]) -> None:
        """The step that goes to the workers loads these pins."""
        if pins:
            self._in_flight.append((step, pins))

    def release_finished(self, step: int) -> None:
        """A new step is being built: release the pins of steps that have certainly run.

        The workers have normally released them already. A second release does no harm.
        """
        while self._in_flight and self._in_flight[0][0] + self._steps_in_flight <= step:
            for pin in self._in_flight.popleft()[1]:
                self.release(pin)

    def release(self, pin: Pin) -> None:
        """Release a pin that is in none of the states any more."""
        self.discharge(pin)
        self._buffer.release(pin.handle)

    def release_all(self) -> None:
        """The engine shuts down."""
        self._promised.clear()
        for pin in list(self._waiting.values()):
            self.release(pin)
        self._waiting.clear()
        while self._in_flight:
            for pin in self._in_flight.popleft()[1]:
                self.release(pin)


Variant = tuple[TensorKey | None, int]
"""The key under which the item is shared, None where it is not shared, and the rows of its
output."""
RequestVariants = Mapping[str, Iterable[Variant]]
"""By the identifiers of one request's items. An identifier with several variants fits no bytes."""


class ItemVariants:
    """Counts the variants of all requests. `remove` takes what `add` was given."""

    def __init__(self) -> None:
        self._variants: dict[str, Counter[Variant]] = {}
        self.current: RequestVariants | None = None
        """The variants of the request that vLLM is about to schedule. None where it is not known:
        vLLM before 0.30 does not name requests that run."""

    def __len__(self) -> int:
        return len(self._variants)

    def add(self, variants: RequestVariants) -> None:
        for identifier, values in variants.items():
            self._variants.setdefault(identifier, Counter()).update(values)

    def remove(self, variants: RequestVariants) -> None:
        for identifier, values in variants.items():
            left = self._variants[identifier]
            left.subtract(values)
            self._variants[identifier] = left = +left
            if not left:
                del self._variants[identifier]

    def of(self, identifier: str) -> tuple[Variant, ...]:
        """What vLLM may mean by the identifier now; empty where no request with it is known."""
        variants = self._variants if self.current is None else self.current
        return tuple(variants.get(identifier, ()))


class PassCache(dict[tuple[str, tuple[Variant, ...]], bool]):
    """Maps an identifier and its variants at the time of the question to the answer."""

    def __init__(self, variants: ItemVariants) -> None:
        super().__init__()
        self._variants = variants

    def set_available(self, identifier: str) -> None:
        """From now on the answer is yes, whatever it was before."""
        self[identifier, self._variants.of(identifier)] = True

    def drop_negative(self, identifier: str) -> None:
        """Drop a no: the item arrived after an earlier request of this pass missed it. A yes
        stays."""
        wanted = identifier, self._variants.of(identifier)
        if self.get(wanted) is False:
            del self[wanted]


HELD_MAX = 1 << 16
"""Far more than fits into a cache. Bounds the entries that unreported resets leave behind."""


class EngineCache:
    """The identifiers that vLLM's cache holds, and the number of its evictions."""

    def __init__(self) -> None:
        self._held: dict[str, TensorKey | None] = {}
        self._empty: dict[str, None] = {}
        self.evictions = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._held

    def add(self, identifier: str, key: TensorKey | None = None) -> None:
        """vLLM allocated the item, and a worker writes an output there. `key` is the key under
        which the output may be stored."""
        self._empty.pop(identifier, None)
        _keep(self._held, identifier, key)

    def add_empty(self, identifier: str) -> None:
        """vLLM allocated the item, and no worker writes to it. An engine that only encodes skips
        items that are stored, and vLLM then takes them for encoded."""
        _keep(self._empty, identifier, None)

    def is_empty(self, identifier: str) -> bool:
        return identifier in self._empty

    def key_of(self, identifier: str) -> TensorKey | None:
        """The key under which the cached output may be stored; None where it is not known."""
        return self._held.get(identifier)

    def discard(self, identifier: str) -> None:
        self._held.pop(identifier, None)
        self._empty.pop(identifier, None)

    def clear(self, keep: Container[str]) -> None:
        """vLLM's cache was reset and holds only what vLLM allocated since, which is `keep`."""
        self._held = {name: key for name, key in self._held.items() if name in keep}
        self._empty = {name: None for name in self._empty if name in keep}
        self.evictions += 1


def _keep(kept: dict[str, Any], identifier: str, value: Any) -> None:
    kept[identifier] = value
    if len(kept) > HELD_MAX:
        del kept[next(iter(kept))]


class StoredItems:
    """See the module."""

    def __init__(self) -> None:
        self._wanted_by: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._wanted_by)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._wanted_by

    def add(self, identifier: str, request_id: str) -> None:
        """The lookup of this request found the item stored."""
        self._wanted_by.setdefault(identifier, set()).add(request_id)

    def drop(self, identifier: str, request_id: str) -> None:
        """The request no longer needs the item. After the last one the item has to be looked up
        again."""
        wanted_by = self._wanted_by.get(identifier, set())
        wanted_by.discard(request_id)
        if not wanted_by:
            self._wanted_by.pop(identifier, None)
