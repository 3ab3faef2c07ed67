"""Pairs: this process's ends of the lanes to other pools, and receiving tensors over them.

`Pairs` makes a pair in the background, when a pool is discovered or when a record names it. A probe
makes the communicator at once, so no read waits for it. The number of pairs is bounded: the least
recently used one is closed, and so are pairs with pools that have ended. After a failure a pair
pauses before it is made again, longer after each failure.

`PoolReceiver` receives a tensor from another pool into this one. It runs on the lane's threads (see
`lane.RECEIVERS`). Each failure is returned as a reason (see `fields.Fallback`); the bytes then
come over the hosts. `lane` reports the results to the node.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from xxhash import xxh3_64_intdigest

from lookup_buffer.codec import writable_bytes
from lookup_buffer.device import protocol
from lookup_buffer.device.memory import PoolMemory
from lookup_buffer.device.pool import DevicePool, Entry
from lookup_buffer.device.protocol import ProtocolVersion, make_upgrade, pipe_memory
from lookup_buffer.device.stats import DaemonThreads, LaneStats
from lookup_buffer.errors import (
    BufferFull,
    CodecError,
    CorruptTensor,
    LookupBufferError,
    LookupTimeout,
    MissingTensor,
    PipeBroken,
    PipeClosed,
    PipeTimeout,
    ProtocolError,
    TensorTooLarge,
)
from lookup_buffer.key import QualifiedKey
from lookup_buffer.pipes.connect import open_tcp_end
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.pipes.stream import StreamPipe
from lookup_buffer.protocol.auth import LANE
from lookup_buffer.protocol.fields import Fallback, MaybeFallback
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import SeenPool
from lookup_buffer.times import Clock

PAIRS_MAX: Final = 16
WARM_MAX: Final = 8
"""On discovery of a pool a pair is made only while there are fewer than this. A communicator on a
GPU takes 50 to 100 MB at each end, used or not. The remaining pairs are left for pools that a read
needs."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
MAKE_SECONDS: Final = 30.0
DISCOVERY_SECONDS: Final = 10.0
"""Bound on the time to make a communicator that no read needs yet."""
MAKERS: Final = 2
"""Threads that only make pairs. A pool that cannot be reached takes seconds, and must not delay
receiving."""


class Source(NamedTuple):
    """Another pool that has a requested tensor."""

    host: str
    mark: int
    lane: str
    library: str
    port: int
    pool: str
    checksum: int


@dataclass(slots=True, eq=False)
class Pair:
    """One remote pool, and the pipe to it while it is open."""

    pool: str
    pipe: StreamPipe | None = None
    is_making: bool = False
    """The pair is being made, or is queued for it."""
    queued_on_discovery: bool = False
    """It is queued only because its pool was discovered. A read that needs it does not wait for
    that queue."""
    failures: int = 0
    paused_until: float = 0.0
    last_request: int = 0
    users: int = 0

    @property
    def is_open(self) -> bool:
        """Whether its pipe exists and the other end is not known to be gone."""
        return self.pipe is not None and not self.pipe.is_lost


class Pairs:
    """Thread-safe.

    Args:
        stats: counts and logs the reason why a pair cannot be made.
        pairs_max: bound on the pairs; the least recently used ones beyond it are closed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        memory: PoolMemory,
        version: ProtocolVersion,
        *,
        token: str | None,
        limits: PipeLimits,
        stats: LaneStats,
        pairs_max: int = PAIRS_MAX,
        clock: Clock = time.monotonic,
    ) -> None:
        self._memory = memory
        self._version = version
        self._upgrade = make_upgrade(version, memory)(False, limits.silence_seconds)
        self._token = token
        self._limits = limits
        self._makers = DaemonThreads(stats, "lb-lane-make", MAKERS)
        self._discovery_makers = DaemonThreads(stats, "lb-lane-sight", 1)
        self._warn = stats.warn
        self._pairs_max = pairs_max
        self._clock = clock
        self._lock = threading.Lock()
        self._pairs: OrderedDict[str, Pair] = OrderedDict()
        self._closed = False

    def open_pairs(self) -> int:
        with self._lock:
            return sum(pair.is_open for pair in self._pairs.values())

    def fallback_reason(self, source: Source) -> MaybeFallback:
        """The reason why nothing can be received from there now (see `fields.Fallback`); "" if
        there is an open pair. Starts making the pair if it does not exist."""
        if (source.lane, source.library) != (self._version.lane, self._version.library):
            return Fallback.VERSION
        with self._lock:
            pair = self._pairs.get(source.pool)
            if pair is None:
                pair = self._pairs[source.pool] = Pair(source.pool)
            self._pairs.move_to_end(source.pool)
            surplus = self._surplus()
            reason: MaybeFallback = ""
            if pair.pipe is None:
                reason = Fallback.ABANDONED if self._clock() < pair.paused_until else Fallback.COLD
            is_begun = pair.is_making and not pair.queued_on_discovery
            makes = reason == Fallback.COLD and not is_begun and not self._closed
            if makes:
                pair.is_making, pair.queued_on_discovery = True, False
        for pipe in surplus:
            pipe.abort()
        if makes and not self._makers.submit(lambda: self._make(pair, source.host, source.port)):
            pair.is_making = False
        return reason

    def warm(self, seen: SeenPool) -> None:
        """Start a pair with a pool that was just discovered, if there is spare capacity.

        It never replaces another pair. It is tried once; a record that names the pool tries again.
        """
        if (seen.lane, seen.library) != (self._version.lane, self._version.library):
            return
        with self._lock:
            used = sum(pair.is_open or pair.is_making for pair in self._pairs.values())
            if self._closed or seen.pool in self._pairs or used >= WARM_MAX:
                return
            pair = self._pairs[seen.pool] = Pair(
                seen.pool, is_making=True, queued_on_discovery=True
            )
            self._pairs.move_to_end(seen.pool, last=False)  # never used, so the first to be closed
        if not self._discovery_makers.submit(lambda: self._make_on_discovery(pair, seen)):
            with self._lock:
                pair.is_making = pair.is_making and not pair.queued_on_discovery
                pair.queued_on_discovery = False

    def forget(self, pools: Iterable[str]) -> None:
        """Close the pairs with these pools, which have ended according to their nodes. One in use
        is left alone: if its pool has ended, it fails."""
        pipes = []
        with self._lock:
            for pool in pools:
                pair = self._pairs.get(pool)
                if pair is not None and not pair.users:
                    del self._pairs[pool]
                    pipes += [pair.pipe] if pair.pipe is not None else []
        for pipe in pipes:
            pipe.abort()

    def _surplus(self) -> list[StreamPipe]:
        """Call with the lock held. Removes the least recently used pairs beyond the bound, and
        returns their pipes."""
        pipes = []
        for name, pair in list(self._pairs.items())[: max(0, len(self._pairs) - self._pairs_max)]:
            if not (pair.users or pair.is_making):
                del self._pairs[name]
                pipes += [pair.pipe] if pair.pipe is not None else []
        return pipes

    def receive(
        self, source: Source, namespace: str, key: str, out: torch.Tensor, timeout: float
    ) -> None:
        """Receive the tensor from there into `out`, within `timeout` seconds. If that fails, the
        pair pauses.

        Raises:
            MissingTensor: the pool no longer has it. The pair stays open.
            PipeClosed: the other end closed the pair in order; another one may be made.
            LookupBufferError: the pair failed.
        """
        with self._lock:
            pair = self._pairs.get(source.pool)
            pipe = pair.pipe if pair is not None else None
            if pair is None or pipe is None:
                raise PipeBroken("the pair has ended")
            pair.users += 1
            pair.last_request += 1
            number = pair.last_request
        try:
            deadline = self._clock() + timeout
            request = {
                "ask": number, "pool": source.pool, "namespace": namespace, "key": key,
                "mark": source.mark,
            }  # fmt: skip
            pipe.send_tensor(protocol.message(request), timeout=timeout)
            reply = pipe.recv_tensor(protocol.reply_key(number), timeout=timeout)
            if protocol.fields_in(reply).get("status") != "ok":
                raise MissingTensor(f"the pool no longer holds {key}")
            left = max(0.0, deadline - self._clock())
            pipe.recv_tensor(protocol.payload_key(number), timeout=left, out=out)
        except MissingTensor:
            raise
        except PipeClosed:  # in order, after a long idle time: a new pair can be made
            with self._lock:
                pair.pipe = None if pair.pipe is pipe else pair.pipe
            pipe.abort()
            raise
        except CodecError as error:  # `out` has the dtype and shape of the record
            self.fail(source.pool, pipe)
            raise ProtocolError(
                f"a pool sent a tensor of another dtype or shape than published: {error}"
            ) from error
        except LookupBufferError:
            self.fail(source.pool, pipe)
            raise
        finally:
            with self._lock:
                pair.users -= 1

    def fail(self, pool: str, pipe: StreamPipe | None = None) -> None:
        """The pair with this pool failed in use: close it, and let it pause. Never waits."""
        with self._lock:
            pair = self._pairs.get(pool)
            if pair is None or pair.pipe is None or (pipe is not None and pair.pipe is not pipe):
                return
            broken = self._pause(pair)
        if broken is not None:
            broken.abort()

    def _pause(self, pair: Pair) -> StreamPipe | None:
        pair.failures += 1
        pause = min(PAUSE_SECONDS * 2 ** min(pair.failures - 1, 10), PAUSE_SECONDS_MAX)
        pair.paused_until = self._clock() + pause
        broken, pair.pipe = pair.pipe, None
        return broken

    def close(self, timeout: float) -> None:
        """Idempotent. Waits at most `timeout` seconds for pairs that are being made."""
        with self._lock:
            self._closed = True
            pipes = [pair.pipe for pair in self._pairs.values() if pair.pipe is not None]
            self._pairs.clear()
        for pipe in pipes:
            pipe.abort()
        deadline = time.monotonic() + timeout
        self._makers.close(timeout)
        self._discovery_makers.close(max(0.0, deadline - time.monotonic()))

    # -- in the background

    def _make_on_discovery(self, pair: Pair, seen: SeenPool) -> None:
        with self._lock:
            is_due, pair.queued_on_discovery = pair.queued_on_discovery, False
        if is_due:  # else a read needed it first, and `fallback_reason` queued it
            self._make(pair, seen.host, seen.port, on_discovery=True)

    def _make(self, pair: Pair, host: str, port: int, *, on_discovery: bool = False) -> None:
        pipe, is_refused = None, False
        try:
            pipe = self._open(host, port, on_discovery)
        except Exception as error:  # noqa: BLE001 -- a device's, too: else `is_making` would stay
            # A pool with many pairs refuses those of discovery. A record that names it retries.
            is_refused = on_discovery and isinstance(error, PipeClosed)
            if not is_refused:
                self._warn(Fallback.ABANDONED, f"no pair with {host}:{port}: {error}")
        with self._lock:
            pair.is_making = False
            wanted = not self._closed and self._pairs.get(pair.pool) is pair
            if pipe is not None and wanted:
                pair.pipe, pair.failures = pipe, 0
                return
            if not is_refused:
                self._pause(pair)
        if pipe is not None:
            pipe.abort()

    def _open(self, host: str, port: int, on_discovery: bool) -> StreamPipe:
        shown = f"[{host}]" if ":" in host else host
        pipe = open_tcp_end(
            f"lane://{shown}:{port}",
            listen=False,
            timeout=self._limits.silence_seconds,
            token=self._token,
            limits=self._limits,
            upgrade=self._upgrade,
            memory=pipe_memory(self._version, self._memory),
            purpose=LANE,
        )
        try:
            with self._memory.working():
                probe = protocol.message({"ask": 0, "mark": 0, "on_discovery": on_discovery})
                pipe.send_tensor(probe, timeout=self._limits.silence_seconds)
                pipe.recv_tensor(
                    protocol.payload_key(0),
                    timeout=DISCOVERY_SECONDS if on_discovery else MAKE_SECONDS,
                )
        except BaseException:
            pipe.abort()
            raise
        return pipe


class PoolReceiver:
    def __init__(
        self, pool: DevicePool, memory: PoolMemory, pairs: Pairs, stats: LaneStats
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._pairs = pairs
        self._stats = stats

    def receive(
        self,
        message: dict[str, Any],
        key: QualifiedKey,
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> tuple[Entry | None, MaybeFallback, int]:
        """Receive from the first source that has the tensor.

        Returns the entry, "" and the number of that source, counted from 1. Without an entry: None,
        the reason, and 0.
        """
        reason: MaybeFallback = Fallback.STALE
        header = TensorHeader.from_fields(message["header"])
        for number, fields in enumerate(message["sources"], start=1):
            source = Source(*fields)
            reason = self._pairs.fallback_reason(source)
            if not reason:
                if not is_wanted():
                    return None, Fallback.TIMEOUT, 0
                entry, reason = self._from(source, header, key, deadline)
                if entry is not None:
                    return entry, "", number
            elif reason == Fallback.VERSION:
                what = f"{source.lane} of library {source.library}"
                self._stats.warn(
                    reason, f"the pool at {source.host} has {what}, which differs from this one"
                )
        return None, reason, 0

    def _from(
        self, source: Source, header: TensorHeader, key: QualifiedKey, deadline: float
    ) -> tuple[Entry | None, MaybeFallback]:
        try:
            self._pool.reserve(header.nbytes)
        except (BufferFull, TensorTooLarge) as error:
            self._stats.warn(Fallback.NO_ROOM, error)
            return None, Fallback.NO_ROOM
        reason: MaybeFallback = ""
        try:
            with self._memory.working():
                # Allocated here, so that a GPU's memory belongs to the pool's stream. The stream
                # then waits for the model's pending work on the former content of that memory.
                tensor = self._memory.empty(header)
                left = max(0.0, deadline - time.monotonic())
                self._pairs.receive(source, *key, tensor, left)
            self._check(tensor, source)
            return self._pool.put(key, (tensor, None), header.nbytes, source.checksum), ""
        except MissingTensor:
            reason = Fallback.STALE
        except PipeClosed:
            reason = Fallback.COLD
        except CorruptTensor as error:
            reason = Fallback.CHECKSUM
            self._stats.warn(reason, error)
        except (BufferFull, CodecError) as error:
            reason = Fallback.DEVICE
            self._stats.warn(reason, error)
        except (LookupTimeout, PipeTimeout) as error:
            reason = Fallback.TIMEOUT
            self._stats.warn(reason, error)
        except LookupBufferError as error:
            reason = Fallback.PEER_FAILED
            self._stats.warn(reason, error)
        except Exception as error:  # noqa: BLE001 -- a failed device, with any error of torch
            reason = Fallback.DEVICE
            self._pairs.fail(source.pool)
            self._stats.warn(reason, error)
        self._pool.cancel(header.nbytes)
        return None, reason

    def _check(self, tensor: "torch.Tensor", source: Source) -> None:
        """Verify the checksum of a tensor on the host. A GPU's is not verified: that would need a
        copy to the host."""
        if tensor.device.type != "cpu":
            return
        if xxh3_64_intdigest(writable_bytes(tensor)) != source.checksum:
            raise CorruptTensor("a pool sent bytes whose checksum is not the published one")
