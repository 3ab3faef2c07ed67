"""The buffer's client for a scheduler side whose engine may come to have other weights.

As long as the weights are those of the start it is the client. From the pass on in which they are
not, nothing of the fleet fits this engine any more, nor the other way round: each item is missing,
what is pinned counts as lost, and no claim is taken. Owned by the scheduler's thread.
"""

import threading
from typing import TYPE_CHECKING

from connectors.counters import logger
from lookup_buffer.claimed import ClaimSet, ClaimSetState
from lookup_buffer.prefetched import LoadOrder, Prefetched, PrefetchState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from connectors.weights_flag import WeightsFlag
    from lookup_buffer.client import LookupBuffer
    from lookup_buffer.key import TensorKey


WEIGHTS_CHANGED = "weights_changed"


class CurrentBuffer:
    """Has what the scheduler side uses of `LookupBuffer`, with its contract."""

    def __init__(self, buffer: "LookupBuffer", flag: "WeightsFlag") -> None:
        self._buffer = buffer
        self._flag = flag
        self._outdated = False
        self._settled = threading.Condition()

    @property
    def outdated(self) -> bool:
        """Whether the engine has other weights; weights change between two passes."""
        if not self._outdated and self._flag.is_up():
            self._outdated = True
            logger.warning(
                "lookup buffer: the weights of this engine have changed; it shares nothing from "
                "now on, until it is started again"
            )
        return self._outdated

    def prefetch(
        self, keys: "Sequence[TensorKey]", *, timeout: float = 0.0, wait_seconds: float = 0.0
    ) -> list[Prefetched]:
        if not self.outdated:
            return self._buffer.prefetch(keys, timeout=timeout, wait_seconds=wait_seconds)
        return self._in_vain(keys)

    def _in_vain(self, keys: "Sequence[TensorKey]") -> list[Prefetched]:
        failed = PrefetchState.FAILED
        return [Prefetched(key, self._settled, failed, WEIGHTS_CHANGED) for key in keys]

    def prefetch_and_claim(
        self, keys: "Sequence[TensorKey]", *, wait_seconds: float, timeout: float = 0.0
    ) -> tuple[list[Prefetched], ClaimSet]:
        if self.outdated:
            return self._in_vain(keys), ClaimSet(keys, self._settled, ClaimSetState.FAILED)
        return self._buffer.prefetch_and_claim(keys, wait_seconds=wait_seconds, timeout=timeout)

    def has_caches(self, keys: "Sequence[TensorKey]", *, timeout: float = 0.05) -> list[bool]:
        return (
            [False] * len(keys) if self.outdated else self._buffer.has_caches(keys, timeout=timeout)
        )

    def claim_all(
        self, keys: "Sequence[TensorKey]", *, wait_seconds: float, timeout: float = 0.0
    ) -> ClaimSet:
        if not self.outdated:
            return self._buffer.claim_all(keys, wait_seconds=wait_seconds, timeout=timeout)
        return ClaimSet(keys, self._settled, ClaimSetState.FAILED)

    def encoding(self, keys: "Sequence[TensorKey]", *, lease_seconds: float) -> None:
        if not self.outdated:
            self._buffer.encoding(keys, lease_seconds=lease_seconds)

    def unclaim(self, keys: "Sequence[TensorKey]", waiter: ClaimSet | None = None) -> None:
        self._buffer.unclaim(keys, waiter)

    def release(self, held: Prefetched | LoadOrder) -> None:
        if isinstance(held, LoadOrder) or held.reason != WEIGHTS_CHANGED:
            self._buffer.release(held)

    @property
    def boot(self) -> str:
        return "" if self.outdated else self._buffer.boot

    def close(self) -> None:
        self._buffer.close()
