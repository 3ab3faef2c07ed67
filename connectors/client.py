"""How the scheduler side and the workers of an engine open their client of the buffer.

`open_client` runs at start, in the process of the scheduler or of a worker. The scheduler's client
is a `SchedulerClient`; only the scheduler's thread uses it. It shares once its namespace is known,
and as long as the weights are those of the start. While it does not share, each item is missing
with a reason, pins count as lost, no claim is taken and nothing is stored.

Serves both connectors; knows neither how items are named nor what their bytes are.
"""

import re
import threading
import time
from typing import TYPE_CHECKING, Any, cast

from connectors.counters import logger
from connectors.namespace import Identity, NamespaceTask
from connectors.weights import WeightsFlag
from lookup_buffer.client.buffer import EngineRank, LookupBuffer
from lookup_buffer.client.handles import ClaimHandle, LoadOrder, PrefetchHandle, PrefetchState
from lookup_buffer.errors import LookupBufferError, MaybeMissed, MissReason, NodeUnavailable
from lookup_buffer.protocol.messages import ClaimOutcome
from store import redact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from connectors.settings import SharedSettings
    from lookup_buffer.key import TensorKey


_REASONS = frozenset(
    {MissReason.NAMESPACE_PENDING, MissReason.NAMESPACE_UNKNOWN, MissReason.WEIGHTS_CHANGED}
)


class SchedulerClient:
    """The methods of `LookupBuffer` that the scheduler side uses, with the same contract.

    Args:
        buffer: without a namespace; it enters the namespace of `naming` when that is known.
        naming: `close` closes it too.
        flag: the flag of the worker; None where this host has none.
    """

    def __init__(
        self, buffer: "LookupBuffer", naming: "NamespaceTask", flag: "WeightsFlag | None" = None
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
        """Why nothing is shared now; empty while the engine shares. Weights change only between two
        scheduling passes."""
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
        """The fingerprint of what is stored and loaded; empty while nothing is shared."""
        return "" if self.unshared else self._namespace

    def prefetch(
        self, keys: "Sequence[TensorKey]", *, timeout: float = 0.0, wait_seconds: float = 0.0
    ) -> list[PrefetchHandle]:
        reason = self.unshared
        if not reason:
            return self._buffer.prefetch(keys, timeout=timeout, wait_seconds=wait_seconds)
        return self._in_vain(keys, reason)

    def _in_vain(self, keys: "Sequence[TensorKey]", reason: MissReason) -> list[PrefetchHandle]:
        return [PrefetchHandle(key, self._settled, PrefetchState.FAILED, reason) for key in keys]

    def prefetch_and_claim(
        self, keys: "Sequence[TensorKey]", *, wait_seconds: float, timeout: float = 0.0
    ) -> tuple[list[PrefetchHandle], ClaimHandle]:
        reason = self.unshared
        if not reason:
            return self._buffer.prefetch_and_claim(keys, wait_seconds=wait_seconds, timeout=timeout)
        return self._in_vain(keys, reason), self._unclaimed(keys)

    def _unclaimed(self, keys: "Sequence[TensorKey]") -> ClaimHandle:
        return ClaimHandle(keys, self._settled, ClaimOutcome.FAILED)

    def has_caches(self, keys: "Sequence[TensorKey]", *, timeout: float = 0.05) -> list[bool]:
        if self.unshared:
            return [False] * len(keys)
        return self._buffer.has_caches(keys, timeout=timeout)

    def claim_all(
        self, keys: "Sequence[TensorKey]", *, wait_seconds: float, timeout: float = 0.0
    ) -> ClaimHandle:
        if self.unshared:
            return self._unclaimed(keys)
        return self._buffer.claim_all(keys, wait_seconds=wait_seconds, timeout=timeout)

    def encoding(self, keys: "Sequence[TensorKey]", *, lease_seconds: float) -> None:
        if not self.unshared:
            self._buffer.encoding(keys, lease_seconds=lease_seconds)

    def unclaim(self, keys: "Sequence[TensorKey]", waiter: ClaimHandle | None = None) -> None:
        if self._namespace:  # else no claim was ever taken
            self._buffer.unclaim(keys, waiter)

    def release(self, held: PrefetchHandle | LoadOrder) -> None:
        if isinstance(held, LoadOrder) or held.reason not in _REASONS:
            self._buffer.release(held)

    @property
    def boot(self) -> str:
        return "" if self.unshared else self._buffer.boot

    def close(self) -> None:
        self._naming.close()
        self._buffer.close()


STORE_SECONDS = 5.0
DEVICE_NAME_MAX = 12
_MAKER = re.compile(r"^(?:NVIDIA |AMD |Intel |Instinct |GeForce |Tesla )+")


def open_client(
    settings: "SharedSettings", seat: EngineRank, identity: Identity, connector: str
) -> LookupBuffer:
    """Open the client of the scheduler (the seat's rank is None) or of one worker. A worker's
    client starts without a namespace: it enters the one that its scheduler sends with each step.

    Raises:
        LookupBufferError: the configuration is refused, or node or store are required and absent.
    """
    try:
        buffer = LookupBuffer(settings.buffer_config(), engine=seat, required=settings.required)
        if seat.rank is None:
            _check_reachable(buffer, settings)
            return _current(buffer, seat.engine_id, identity)
    except LookupBufferError as error:
        if seat.rank in (None, 0):  # the first error ends the start: log it once
            logger.error("%s: %s", connector, error)
        raise
    return buffer


def engine_id(common: object, parallel: Any) -> str:
    """The engine's id, with the data-parallel index where it is not 0.

    vLLM gives data-parallel engines distinct ids for KV connectors only. With one id, engines
    would share their claims, and one would take the other's workers for its own.
    """
    index = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    suffix = f"_dp{index}"
    return f"{common}{suffix}" if index and not str(common).endswith(suffix) else str(common)


def device_name() -> str:
    """The worker's device, as records name it: cpu, or the accelerator without its maker's name."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if kind == "cpu":
        return kind
    try:
        name = _MAKER.sub("", str(current_platform.get_device_name()))
    except Exception:  # noqa: BLE001 -- not every platform has a device name
        name = kind
    printable = "".join(letter for letter in name if " " <= letter <= "~")
    return printable[:DEVICE_NAME_MAX].strip()


def _current(buffer: LookupBuffer, engine: str, identity: Identity) -> LookupBuffer:
    """Wrap the client so that it shares only while the engine has the weights of its namespace."""
    try:
        flag = WeightsFlag.adopt(engine)
    except OSError:
        logger.warning("lookup buffer: weights that change in this engine would not be noticed")
        return cast("LookupBuffer", SchedulerClient(buffer, NamespaceTask(identity)))
    return cast(
        "LookupBuffer", SchedulerClient(buffer, NamespaceTask(identity, mark=flag.mark), flag)
    )


def _check_reachable(buffer: LookupBuffer, settings: "SharedSettings") -> None:
    """Report at start what would otherwise only show as misses: no node, or no store.

    Raises:
        NodeUnavailable: the store cannot be reached, and setting `required` is on.
    """
    if not buffer.attached:
        logger.warning("lookup buffer: no node yet; until there is one, nothing is shared")
    elif not _store_comes_up(buffer):
        what = f"the store at {redact(settings.store_url)} cannot be reached"
        if settings.required:
            buffer.close()
            raise NodeUnavailable(f"{what}, and setting 'required' is on")
        logger.warning("lookup buffer: %s; until it can, hosts share nothing", what)


def _store_comes_up(buffer: LookupBuffer) -> bool:
    """Whether the node reaches its store. A node that just started gets `STORE_SECONDS` to
    connect."""
    deadline = time.monotonic() + STORE_SECONDS
    while time.monotonic() < deadline:
        try:
            if buffer.stats()["store_up"]:
                return True
        except NodeUnavailable:
            return False
        time.sleep(0.05)
    return False
