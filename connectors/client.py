"""The buffer's clients of an engine: one for the scheduler side, one for each worker.

`open_client` runs at start, in the process of the scheduler or of a worker. The scheduler's client
is a `SchedulerClient`; only the scheduler's thread uses it. It shares from the moment its namespace
is known, and as long as the weights are those of the start. While it does not share, each item is
missing with a reason, pins count as lost, no claim is taken and nothing is stored.

Both connectors use this module. It depends neither on how items are named nor on their bytes.
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

STORE_SECONDS = 5.0
"""How long a node that just started may take to connect to its store."""
DEVICE_NAME_MAX = 12
_MAKER = re.compile(r"^(?:NVIDIA |AMD |Intel |Instinct |GeForce |Tesla )+")
_REASONS = frozenset(
    {MissReason.NAMESPACE_PENDING, MissReason.NAMESPACE_UNKNOWN, MissReason.WEIGHTS_CHANGED}
)


class SchedulerClient:
    """The methods of `LookupBuffer` that the scheduler side uses, with the same contract.

    Args:
        buffer: a client without a namespace. It enters the one that `task` determines.
        task: `close` closes it too.
        flag: the worker's flag; None where no worker created one on this host.
    """

    def __init__(
        self, buffer: "LookupBuffer", task: "NamespaceTask", flag: "WeightsFlag | None" = None
    ) -> None:
        self._buffer = buffer
        self._task = task
        self._flag = flag
        self._namespace = ""
        self._weights_changed = False
        self._changed = threading.Condition()
        self._enter()

    def _enter(self) -> None:
        namespace = self._task.namespace
        if namespace is not None and not self._namespace:
            self._buffer.enter(namespace.fingerprint, namespace.parts)
            self._namespace = namespace.fingerprint

    @property
    def unshared_reason(self) -> MaybeMissed:
        """Why nothing is shared now; empty while the engine shares. It does not change within a
        scheduling pass: weights change only between two passes."""
        if not self._weights_changed and self._flag is not None and self._flag.is_set():
            self._weights_changed = True
            logger.warning(
                "lookup buffer: the weights of this engine have changed; it shares nothing until "
                "it is restarted"
            )
        if self._weights_changed:
            return MissReason.WEIGHTS_CHANGED
        self._enter()
        return "" if self._namespace else self._task.reason

    @property
    def namespace(self) -> str:
        """The fingerprint of the namespace; empty while nothing is shared."""
        return "" if self.unshared_reason else self._namespace

    def prefetch(
        self, keys: "Sequence[TensorKey]", *, timeout: float = 0.0, wait_seconds: float = 0.0
    ) -> list[PrefetchHandle]:
        reason = self.unshared_reason
        if not reason:
            return self._buffer.prefetch(keys, timeout=timeout, wait_seconds=wait_seconds)
        return self._failed(keys, reason)

    def _failed(self, keys: "Sequence[TensorKey]", reason: MissReason) -> list[PrefetchHandle]:
        return [PrefetchHandle(key, self._changed, PrefetchState.FAILED, reason) for key in keys]

    def prefetch_and_claim(
        self,
        keys: "Sequence[TensorKey]",
        *,
        wait_seconds: float,
        timeout: float = 0.0,
        keeps: bool = True,
    ) -> tuple[list[PrefetchHandle], ClaimHandle]:
        reason = self.unshared_reason
        if not reason:
            return self._buffer.prefetch_and_claim(
                keys, wait_seconds=wait_seconds, timeout=timeout, keeps=keeps
            )
        return self._failed(keys, reason), self._failed_claim(keys)

    def _failed_claim(self, keys: "Sequence[TensorKey]") -> ClaimHandle:
        return ClaimHandle(keys, self._changed, ClaimOutcome.FAILED)

    def has_caches(
        self, keys: "Sequence[TensorKey]", *, timeout: float | None = None
    ) -> list[bool]:
        if self.unshared_reason:
            return [False] * len(keys)
        return self._buffer.has_caches(keys, timeout=timeout)

    def claim_all(
        self,
        keys: "Sequence[TensorKey]",
        *,
        wait_seconds: float,
        timeout: float = 0.0,
        keeps: bool = True,
    ) -> ClaimHandle:
        if self.unshared_reason:
            return self._failed_claim(keys)
        return self._buffer.claim_all(keys, wait_seconds=wait_seconds, timeout=timeout, keeps=keeps)

    def encoding(self, keys: "Sequence[TensorKey]", *, lease_seconds: float) -> None:
        if not self.unshared_reason:
            self._buffer.encoding(keys, lease_seconds=lease_seconds)

    def unclaim(self, keys: "Sequence[TensorKey]", waiter: ClaimHandle | None = None) -> None:
        if self._namespace:  # otherwise no claim was ever taken
            self._buffer.unclaim(keys, waiter)

    def release(self, *held: PrefetchHandle | LoadOrder) -> None:
        ours = [one for one in held if isinstance(one, LoadOrder) or one.reason not in _REASONS]
        self._buffer.release(*ours)

    @property
    def boot(self) -> str:
        return "" if self.unshared_reason else self._buffer.boot

    def close(self) -> None:
        self._task.close()
        self._buffer.close()


def open_client(
    settings: "SharedSettings", engine: EngineRank, identity: Identity, connector: str
) -> LookupBuffer:
    """Open the client of the scheduler (`engine.rank` is None) or of one worker.

    A worker's client starts without a namespace. It enters the one that the scheduler side sends
    with each step.

    Raises:
        LookupBufferError: the configuration is refused, or node or store are required and absent.
    """
    try:
        buffer = LookupBuffer(settings.buffer_config(), engine=engine, required=settings.required)
        if engine.rank is None:
            _check_reachable(buffer, settings)
            return _scheduler_client(buffer, engine.engine_id, identity)
    except LookupBufferError as error:
        if engine.rank in (None, 0):  # other ranks fail alike: log it once
            logger.error("%s: %s", connector, error)
        raise
    return buffer


def engine_id(common: object, parallel: Any) -> str:
    """The engine's id, with the data-parallel index where it is not 0.

    vLLM gives data-parallel engines distinct ids for KV connectors only. Two engines with one id
    would share their claims, and the node could not distinguish their workers.
    """
    index = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    suffix = f"_dp{index}"
    return f"{common}{suffix}" if index and not str(common).endswith(suffix) else str(common)


def device_name() -> str:
    """The worker's device, as in records: cpu, or the accelerator without its maker's name."""
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


def _scheduler_client(buffer: LookupBuffer, engine: str, identity: Identity) -> LookupBuffer:
    """Wrap the client so that it shares only while the engine has the weights of its namespace."""
    try:
        flag = WeightsFlag.adopt(engine)
    except OSError:
        logger.warning(
            "lookup buffer: no worker of this engine created a weights flag on this host; do not "
            "change this engine's weights in place, as the change would not be detected"
        )
        return cast("LookupBuffer", SchedulerClient(buffer, NamespaceTask(identity)))
    return cast(
        "LookupBuffer", SchedulerClient(buffer, NamespaceTask(identity, mark=flag.mark), flag)
    )


def _check_reachable(buffer: LookupBuffer, settings: "SharedSettings") -> None:
    """Report at start that node or store are unreachable; later that shows only as misses.

    Raises:
        NodeUnavailable: the store cannot be reached, and setting `required` is on.
    """
    if not buffer.attached:
        logger.warning("lookup buffer: no node is reachable yet; nothing is shared until one is")
    elif not _wait_for_store(buffer):
        what = f"the store at {redact(settings.store_url)} cannot be reached"
        if settings.required:
            buffer.close()
            raise NodeUnavailable(f"{what}, and setting 'required' is on")
        logger.warning("lookup buffer: %s; until it can, no two hosts share", what)


def _wait_for_store(buffer: LookupBuffer) -> bool:
    """Whether the node is connected to its store; waits for that up to `STORE_SECONDS`."""
    deadline = time.monotonic() + STORE_SECONDS
    while time.monotonic() < deadline:
        try:
            if buffer.stats()["store_up"]:
                return True
        except NodeUnavailable:
            return False
        time.sleep(0.05)
    return False
