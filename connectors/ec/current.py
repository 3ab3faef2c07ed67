"""The buffer's client for a scheduler side that may have nothing to share.

It shares once its namespace is known, and as long as the weights are those of the start. While it
does not, each item is missing with a reason, what is pinned counts as lost, no claim is taken and
nothing is stored. Owned by the scheduler's thread.
"""

import threading
from typing import TYPE_CHECKING

from connectors.counters import logger
from lookup_buffer.claimed import ClaimSet
from lookup_buffer.client.handles import LoadOrder, Prefetched, PrefetchState
from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.inserted import ClaimOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from connectors.naming import Naming
    from connectors.weights_flag import WeightsFlag
    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.key import TensorKey


_REASONS = frozenset(
    {MissReason.NAMESPACE_PENDING, MissReason.NAMESPACE_UNKNOWN, MissReason.WEIGHTS_CHANGED}
)


class CurrentBuffer:
    """Has what the scheduler side uses of `LookupBuffer`, with its contract.

    Args:
        buffer: without a namespace; enters that of `naming` when it is known.
        naming: closed with this.
        flag: of the worker; None where there is none on this host.
    """

    def __init__(
        self, buffer: "LookupBuffer", naming: "Naming", flag: "WeightsFlag | None" = None
    ) -> None:
        self._buffer = buffer
        self._naming = naming
        self._flag = flag
        self._namespace = ""
        self._outdated = False
        self._settled = threading.Condition()
        self._enter()

    def _enter(self) -> None:
        namespace = self._naming.namespace
        if namespace is not None and not self._namespace:
            self._buffer.enter(namespace.fingerprint, namespace.parts)
            self._namespace = namespace.fingerprint

    @property
    def unshared(self) -> MaybeMissed:
        """Why nothing is shared now; empty where it is. Weights change between two passes."""
        if not self._outdated and self._flag is not None and self._flag.is_up():
            self._outdated = True
            logger.warning(
                "lookup buffer: the weights of this engine have changed; it shares nothing from "
                "now on, until it is started again"
            )
        if self._outdated:
            return MissReason.WEIGHTS_CHANGED
        self._enter()
        return "" if self._namespace else self._naming.reason

    @property
    def namespace(self) -> str:
        """The fingerprint under which is stored and loaded; empty while nothing is shared."""
        return "" if self.unshared else self._namespace

    def prefetch(
        self, keys: "Sequence[TensorKey]", *, timeout: float = 0.0, wait_seconds: float = 0.0
    ) -> list[Prefetched]:
        reason = self.unshared
        if not reason:
            return self._buffer.prefetch(keys, timeout=timeout, wait_seconds=wait_seconds)
        return self._in_vain(keys, reason)

    def _in_vain(self, keys: "Sequence[TensorKey]", reason: MissReason) -> list[Prefetched]:
        return [Prefetched(key, self._settled, PrefetchState.FAILED, reason) for key in keys]

    def prefetch_and_claim(
        self, keys: "Sequence[TensorKey]", *, wait_seconds: float, timeout: float = 0.0
    ) -> tuple[list[Prefetched], ClaimSet]:
        reason = self.unshared
        if not reason:
            return self._buffer.prefetch_and_claim(keys, wait_seconds=wait_seconds, timeout=timeout)
        return self._in_vain(keys, reason), self._unclaimed(keys)

    def _unclaimed(self, keys: "Sequence[TensorKey]") -> ClaimSet:
        return ClaimSet(keys, self._settled, ClaimOutcome.FAILED)

    def has_caches(self, keys: "Sequence[TensorKey]", *, timeout: float = 0.05) -> list[bool]:
        if self.unshared:
            return [False] * len(keys)
        return self._buffer.has_caches(keys, timeout=timeout)

    def claim_all(
        self, keys: "Sequence[TensorKey]", *, wait_seconds: float, timeout: float = 0.0
    ) -> ClaimSet:
        if self.unshared:
            return self._unclaimed(keys)
        return self._buffer.claim_all(keys, wait_seconds=wait_seconds, timeout=timeout)

    def encoding(self, keys: "Sequence[TensorKey]", *, lease_seconds: float) -> None:
        if not self.unshared:
            self._buffer.encoding(keys, lease_seconds=lease_seconds)

    def unclaim(self, keys: "Sequence[TensorKey]", waiter: ClaimSet | None = None) -> None:
        if self._namespace:  # else none was ever taken
            self._buffer.unclaim(keys, waiter)

    def release(self, held: Prefetched | LoadOrder) -> None:
        if isinstance(held, LoadOrder) or held.reason not in _REASONS:
            self._buffer.release(held)

    @property
    def boot(self) -> str:
        return "" if self.unshared else self._buffer.boot

    def close(self) -> None:
        self._naming.close()
        self._buffer.close()
