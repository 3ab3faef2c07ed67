"""How the scheduler side and the workers of an engine come by their client of the buffer."""

import re
import time
from typing import TYPE_CHECKING, Any, cast

from connectors.counters import logger
from connectors.ec.current import CurrentBuffer
from connectors.naming import Identity, Naming
from connectors.weights_flag import WeightsFlag
from lookup_buffer.client.buffer import EngineSeat, LookupBuffer
from lookup_buffer.errors import LookupBufferError, NodeUnavailable
from store import redact

if TYPE_CHECKING:
    from connectors.settings import SharedSettings

STORE_SECONDS = 5.0
DEVICE_NAME_MAX = 12
_MAKER = re.compile(r"^(?:NVIDIA |AMD |Intel |Instinct |GeForce |Tesla )+")


def open_client(
    settings: "SharedSettings", seat: EngineSeat, identity: Identity, connector: str
) -> LookupBuffer:
    """The client of the scheduler (the seat's rank is None) or of one worker. A worker's has no
    namespace: it enters the one that comes with the steps of its scheduler.

    Raises:
        LookupBufferError: the configuration is refused, or node or store are required and absent.
    """
    try:
        buffer = LookupBuffer(settings.buffer_config(), engine=seat, required=settings.required)
        if seat.rank is None:
            _check_reachable(buffer, settings)
            return _current(buffer, seat.engine_id, identity)
    except LookupBufferError as error:
        if seat.rank in (None, 0):  # the first of them ends the start, so this is said once
            logger.error("%s: %s", connector, error)
        raise
    return buffer


def engine_id(common: object, parallel: Any) -> str:
    """vLLM tells data-parallel engines apart for KV connectors only; ours would share their claims,
    and one would take the other's workers for its own."""
    index = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    suffix = f"_dp{index}"
    return f"{common}{suffix}" if index and not str(common).endswith(suffix) else str(common)


def device_name() -> str:
    """What a worker computes on, as records name it: cpu, or the accelerator without its maker."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if kind == "cpu":
        return kind
    try:
        name = _MAKER.sub("", str(current_platform.get_device_name()))
    except Exception:  # noqa: BLE001 -- not every platform says it
        name = kind
    printable = "".join(letter for letter in name if " " <= letter <= "~")
    return printable[:DEVICE_NAME_MAX].strip()


def _current(buffer: LookupBuffer, engine: str, identity: Identity) -> LookupBuffer:
    """The client for as long as this engine has the weights that its namespace names."""
    try:
        flag = WeightsFlag.adopt(engine)
    except OSError:
        logger.warning("lookup buffer: weights that change in this engine would not be noticed")
        return cast("LookupBuffer", CurrentBuffer(buffer, Naming(identity)))
    return cast("LookupBuffer", CurrentBuffer(buffer, Naming(identity, mark=flag.mark), flag))


def _check_reachable(buffer: LookupBuffer, settings: "SharedSettings") -> None:
    """Say at start what would otherwise only show as misses."""
    if not buffer.attached:
        logger.warning("lookup buffer: no node yet; until there is one, nothing is shared")
    elif not _store_comes_up(buffer):
        what = f"the store at {redact(settings.store_url)} cannot be reached"
        if settings.required:
            buffer.close()
            raise NodeUnavailable(f"{what}, and setting 'required' is on")
        logger.warning("lookup buffer: %s; until it can, hosts share nothing", what)


def _store_comes_up(buffer: LookupBuffer) -> bool:
    """Whether the node reaches its store; a node that just started is given time to connect."""
    deadline = time.monotonic() + STORE_SECONDS
    while time.monotonic() < deadline:
        try:
            if buffer.stats()["store_up"]:
                return True
        except NodeUnavailable:
            return False
        time.sleep(0.05)
    return False
