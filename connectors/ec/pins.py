"""Pins of the scheduler side: which bytes are held, for whom, and until when.

Owned by the scheduler's thread; no other may touch it. Pure bookkeeping beside one-way `release`
calls. A pin is in exactly one of these places:

    waiting     wanted by requests that were not scheduled yet
    promised    vLLM was told in this pass that the item can be loaded; kept whatever happens until
                the pass ends, because the promise cannot be taken back
    flying      handed to the workers with a step, kept until that step has surely run
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
    """What counts against the budget: an estimate, as the true size is only known on arrival."""
    wanted_by: set[str] = field(default_factory=set)
    modalities: set[str] = field(default_factory=set)
    """What the requests that asked for it say that it is."""
    order: "LoadOrder | None" = None
    """Where the bytes lie, as it was when vLLM was promised them."""

    @property
    def rows(self) -> int:
        """Of the output that came, -1 where it has none."""
        shape = self.handle.order.header.shape if self.handle.order is not None else ()
        return shape[0] if shape else -1

    def wait(self, timeout: float) -> bool:
        """Whether it is settled, at the latest after `timeout` seconds."""
        if self.handle.state is PrefetchState.PENDING and timeout > 0:
            self.handle.wait(timeout)
        return self.handle.state is not PrefetchState.PENDING


class PinTable:
    """All pins of one engine.

    Args:
        buffer: to which pins are given back.
        budget_bytes: bound on the bytes of all pins together.
        steps_in_flight: how many steps vLLM may have scheduled and not finished. A step has surely
            run when that many more were built.
        row_bytes: of one row of an item, a first guess.
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
        self._flying: deque[tuple[int, list[Pin]]] = deque()
        self.held_bytes = 0

    def __len__(self) -> int:
        """Pins held, in any place."""
        flying = sum(len(pins) for _, pins in self._flying)
        promised = sum(self._waiting.get(key) is not pin for key, pin in self._promised.items())
        return len(self._waiting) + promised + flying

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    def has_room(self, nbytes: int) -> bool:
        return self.held_bytes + nbytes <= self._budget_bytes

    def estimated_bytes(self, rows: int) -> int:
        """What an item of so many rows will take, by what the last ones took."""
        return rows * self._row_bytes

    def saw_size(self, rows: int, nbytes: int) -> None:
        """An item has come that takes so much."""
        self._row_bytes = max(1, nbytes // max(1, rows))

    def get(self, identifier: str) -> Pin | None:
        """The pin that waits for this item's request to be scheduled."""
        return self._waiting.get(identifier)

    def is_here(self, pin: Pin) -> bool:
        """Whether the bytes are here, in the arena that is mapped now.

        The arena of a lost node stays mapped for a while, so what was dispatched still loads; what
        waits may wait longer than that.
        """
        handle = pin.handle
        order = handle.order
        if handle.state is not PrefetchState.RESIDENT or order is None:
            return False
        return self._is_mapped(order)

    def why_unfit(
        self, pin: Pin, num_embeds: int | None, *, any_float: bool = False
    ) -> MaybeMissed:
        """The reason (a counter's name) why a settled item is not what a request expects, an output
        of this model's encoder with so many rows; "" if it is.

        Args:
            num_embeds: None where the host does not say for which request it asks.
            any_float: see `EncoderOutputs.misfit`.
        """
        handle = pin.handle
        if handle.state is not PrefetchState.RESIDENT or handle.order is None:
            return handle.reason or MissReason.ABSENT
        if not self._is_mapped(handle.order):
            return MissReason.NODE_DOWN
        if num_embeds not in (None, pin.rows):
            return MissReason.SHAPE
        return self._outputs.misfit(handle.order.header, pin.modalities, any_float=any_float)

    def promise_all(self, rows: Mapping[str, int]) -> bool:
        """Promise these items, which cannot be encoded here, if the bytes of all of them wait here
        and fit; else none."""
        pins = [(self._waiting.get(identifier), count) for identifier, count in rows.items()]
        held = [
            pin
            for pin, count in pins
            if pin is not None and not self.why_unfit(pin, count, any_float=True)
        ]
        if len(held) < len(pins):
            return False
        for pin in held:
            self.promise(pin)
        return True

    def _is_mapped(self, order: "LoadOrder") -> bool:
        return bool(order.boot == getattr(self._buffer, "boot", order.boot))

    def hopeful(self, identifier: str) -> bool:
        """Whether the bytes of this item wait here, or may be on their way: no need to ask."""
        pin = self._waiting.get(identifier)
        return pin is not None and (pin.handle.state is PrefetchState.PENDING or self.is_here(pin))

    def add(self, pin: Pin) -> None:
        """In place of one that was asked for in vain: who waits for that waits for this now."""
        vain = self._waiting.get(pin.identifier)
        if vain is not None:
            pin.wanted_by |= vain.wanted_by
            self.discard(pin.identifier)
        self._waiting[pin.identifier] = pin
        self.held_bytes += pin.nbytes

    def drop(self, identifier: str, request_id: str) -> None:
        """This request wants the item no more; the last one to go gives it back."""
        pin = self._waiting.get(identifier)
        if pin is None:
            return
        pin.wanted_by.discard(request_id)
        if not pin.wanted_by:
            self.discard(identifier)

    def discard(self, identifier: str) -> None:
        """Nobody needs this item loaded any more."""
        pin = self._waiting.pop(identifier, None)
        if pin is not None and self._promised.get(identifier) is not pin:
            self.release(pin)

    def discard_other(self, identifier: str, key: TensorKey) -> None:
        """The identifier now stands for `key`; bytes of another adapter of that name are not it."""
        pin = self._waiting.get(identifier)
        if pin is not None and pin.handle.key != key:
            self.discard(identifier)

    def promise(self, pin: Pin) -> None:
        """vLLM was told that it can have this item in the current pass."""
        pin.order = pin.handle.order
        former = self._promised.get(pin.identifier)
        if former is not None and former is not pin:  # of a node that was lost in this pass
            self.release(former)
        self._promised[pin.identifier] = pin

    def promise_at_once(self, pin: Pin) -> None:
        """As `promise`, of a pin that waits for no request: it goes with the pass."""
        self.held_bytes += pin.nbytes
        self.promise(pin)

    def take(self, identifier: str) -> Pin | None:
        """The promised pin of an item that vLLM made room for; the caller now owns it."""
        pin = self._promised.pop(identifier, None)
        if pin is not None and self._waiting.get(identifier) is pin:
            del self._waiting[identifier]
        return pin

    def end_pass(self) -> None:
        """Promises that vLLM did not use end; those that nobody wants any more are given back."""
        for identifier, pin in self._promised.items():
            if self._waiting.get(identifier) is not pin:
                self.release(pin)
        self._promised.clear()

    def fly(self, step: int, pins: list[Pin]) -> None:
        """The workers were told of these pins with this step."""
        if pins:
            self._flying.append((step, pins))

    def land(self, step: int) -> None:
        """A new step is being built: pins of steps that have surely run are given back.

        The workers have normally said so themselves; giving a pin back twice is harmless.
        """
        while self._flying and self._flying[0][0] + self._steps_in_flight <= step:
            for pin in self._flying.popleft()[1]:
                self.release(pin)

    def release(self, pin: Pin) -> None:
        """Give back a pin that is in no place any more."""
        self.held_bytes -= pin.nbytes
        self._buffer.release(pin.handle)

    def release_all(self) -> None:
        """The engine ends."""
        self._promised.clear()
        for pin in list(self._waiting.values()):
            self.release(pin)
        self._waiting.clear()
        while self._flying:
            for pin in self._flying.popleft()[1]:
                self.release(pin)
