"""Pairs: this process's ends of the lanes to other pools, and receiving tensors over them.

`Pairs` makes a pair in the background, when a pool is first seen or when a record names it. A probe
makes the communicator at once, so no read waits for that. The number of pairs is bounded: the least
recently used one is closed, and so are pairs with pools that are gone. After a failure a pair
pauses before it is made again, longer after each failure.

`PoolReceiver` brings a tensor from another pool into this one. It runs on the lane's threads (see
`lane.RECEIVERS`). Each failure is returned as a reason (see `fields.Fallback`); the bytes then
come over the hosts.

Neither knows the node: `lane` reports the results.
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
from lookup_buffer.device.protocol import ProtocolVersion, joining, memory_of
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
from lookup_buffer.pipes.connect import meet
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.pipes.stream import StreamPipe
from lookup_buffer.protocol.fields import Fallback, MaybeFallback
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import SeenPool

PAIRS_MAX: Final = 16
WARM_MAX: Final = 8
"""A pair is made for a pool that was only seen while there are fewer pairs than this. A
communicator on a GPU takes 50 to 100 MB at each end, used or not. The remaining pairs are left for
pools that are wanted."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
MAKE_SECONDS: Final = 30.0
AT_SIGHT_SECONDS: Final = 10.0
"""How long making a communicator may take when no read needs it yet."""
MAKERS: Final = 2
"""Threads that only make pairs. A pool that cannot be reached takes seconds, and must not delay
receiving."""


class Source(NamedTuple):
    """Where another pool holds a wanted tensor."""

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
    waits_at_sight: bool = False
    """It is queued only because its pool was seen. A read that wants it does not wait for that
    queue."""
    failures: int = 0
    rests_until: float = 0.0
    last_ask: int = 0
    users: int = 0

    @property
    def is_open(self) -> bool:
        """Whether its pipe exists and the other end is not known to be gone."""
        return self.pipe is not None and not self.pipe.is_lost


class Pairs:
    """Thread-safe.

    Args:
        notes: receives the reason when a pair cannot be made.
        pairs_max: bound on the pairs; the least recently used ones beyond it are closed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        place: PoolMemory,
        dialect: ProtocolVersion,
        *,
        token: str | None,
        limits: PipeLimits,
        notes: LaneStats,
        pairs_max: int = PAIRS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._dialect = dialect
        self._join = joining(dialect, place)(False, limits.silence_seconds)
        self._token = token
        self._limits = limits
        self._makers = DaemonThreads(notes, "lb-lane-make", MAKERS)
        self._at_sight = DaemonThreads(notes, "lb-lane-sight", 1)
        self._warn = notes.warn
        self._pairs_max = pairs_max
        self._clock = clock
        self._lock = threading.Lock()
        self._pairs: OrderedDict[str, Pair] = OrderedDict()
        self._closed = False

    def open_pairs(self) -> int:
        with self._lock:
            return sum(pair.is_open for pair in self._pairs.values())

    def why_not(self, source: Source) -> MaybeFallback:
        """The reason why nothing can be received from there now (see `fields.Fallback`); "" if it
        can. Starts making the pair if it does not exist."""
        if (source.lane, source.library) != (self._dialect.lane, self._dialect.library):
            return Fallback.VERSION
        with self._lock:
            pair = self._pairs.get(source.pool)
            if pair is None:
                pair = self._pairs[source.pool] = Pair(source.pool)
            self._pairs.move_to_end(source.pool)
            surplus = self._surplus()
            reason: MaybeFallback = ""
            if pair.pipe is None:
                reason = Fallback.ABANDONED if self._clock() < pair.rests_until else Fallback.COLD
            is_begun = pair.is_making and not pair.waits_at_sight
            makes = reason == Fallback.COLD and not is_begun and not self._closed
            if makes:
                pair.is_making, pair.waits_at_sight = True, False
        for pipe in surplus:
            pipe.abort()
        if makes and not self._makers.soon(lambda: self._make(pair, source.host, source.port)):
            pair.is_making = False
        return reason

    def warm(self, seen: SeenPool) -> None:
        """Start a pair with a pool that was just seen, if there is spare capacity.

        It never replaces another pair. It is tried once; a record that names the pool tries again.
        """
        if (seen.lane, seen.library) != (self._dialect.lane, self._dialect.library):
            return
        with self._lock:
            used = sum(pair.is_open or pair.is_making for pair in self._pairs.values())
            if self._closed or seen.pool in self._pairs or used >= WARM_MAX:
                return
            pair = self._pairs[seen.pool] = Pair(seen.pool, is_making=True, waits_at_sight=True)
            self._pairs.move_to_end(seen.pool, last=False)  # never used, so the first to be closed
        if not self._at_sight.soon(lambda: self._make_at_sight(pair, seen)):
            with self._lock:
                pair.is_making = pair.is_making and not pair.waits_at_sight
                pair.waits_at_sight = False

    def forget(self, pools: Iterable[str]) -> None:
        """Close the pairs with these pools, which are gone according to their nodes. A pair in use
        ends by itself."""
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
            pair.last_ask += 1
            ask = pair.last_ask
        try:
            deadline = self._clock() + timeout
            question = {
                "ask": ask, "pool": source.pool, "namespace": namespace, "key": key,
                "mark": source.mark,
            }  # fmt: skip
            pipe.send_tensor(protocol.message(question), timeout=timeout)
            verdict = pipe.recv_tensor(protocol.verdict_key(ask), timeout=timeout)
            if protocol.fields_in(verdict).get("status") != "ok":
                raise MissingTensor(f"the pool no longer holds {key}")
            left = max(0.0, deadline - self._clock())
            pipe.recv_tensor(protocol.payload_key(ask), timeout=left, out=out)
        except MissingTensor:
            raise
        except PipeClosed:  # orderly, after a long idle time: another pair can be made
            with self._lock:
                pair.pipe = None if pair.pipe is pipe else pair.pipe
            pipe.abort()
            raise
        except CodecError as error:  # `out` has the dtype and shape of the record
            self.fail(source.pool, pipe)
            raise ProtocolError(
                f"a pool sent something else than its node published: {error}"
            ) from error
        except LookupBufferError:
            self.fail(source.pool, pipe)
            raise
        finally:
            with self._lock:
                pair.users -= 1

    def fail(self, pool: str, pipe: StreamPipe | None = None) -> None:
        """The user of the pair to this pool saw it fail: close it, and let it pause. Never
        waits."""
        with self._lock:
            pair = self._pairs.get(pool)
            if pair is None or pair.pipe is None or (pipe is not None and pair.pipe is not pipe):
                return
            broken = self._rest(pair)
        if broken is not None:
            broken.abort()

    def _rest(self, pair: Pair) -> StreamPipe | None:
        pair.failures += 1
        pause = min(PAUSE_SECONDS * 2 ** min(pair.failures - 1, 10), PAUSE_SECONDS_MAX)
        pair.rests_until = self._clock() + pause
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
        self._at_sight.close(max(0.0, deadline - time.monotonic()))

    # -- in the background

    def _make_at_sight(self, pair: Pair, seen: SeenPool) -> None:
        with self._lock:
            is_due, pair.waits_at_sight = pair.waits_at_sight, False
        if is_due:  # else a read wanted it first, and `why_not` queued it
            self._make(pair, seen.host, seen.port, at_sight=True)

    def _make(self, pair: Pair, host: str, port: int, *, at_sight: bool = False) -> None:
        pipe, is_refused = None, False
        try:
            pipe = self._open(host, port, at_sight)
        except Exception as error:  # noqa: BLE001 -- a device's, too: else `is_making` would stay
            # A pool with many pairs refuses one made at sight. A record that names it tries again.
            is_refused = at_sight and isinstance(error, PipeClosed)
            if not is_refused:
                self._warn(Fallback.ABANDONED, f"no pair with {host}:{port}: {error}")
        with self._lock:
            pair.is_making = False
            wanted = not self._closed and self._pairs.get(pair.pool) is pair
            if pipe is not None and wanted:
                pair.pipe, pair.failures = pipe, 0
                return
            if not is_refused:
                self._rest(pair)
        if pipe is not None:
            pipe.abort()

    def _open(self, host: str, port: int, at_sight: bool) -> StreamPipe:
        shown = f"[{host}]" if ":" in host else host
        pipe = meet(
            f"lane://{shown}:{port}",
            listen=False,
            timeout=self._limits.silence_seconds,
            token=self._token,
            limits=self._limits,
            joined=self._join,
            memory=memory_of(self._dialect, self._place),
        )
        try:
            with self._place.working():
                probe = protocol.message({"ask": 0, "mark": 0, "at_sight": at_sight})
                pipe.send_tensor(probe, timeout=self._limits.silence_seconds)
                pipe.recv_tensor(
                    protocol.payload_key(0), timeout=AT_SIGHT_SECONDS if at_sight else MAKE_SECONDS
                )
        except BaseException:
            pipe.abort()
            raise
        return pipe


class PoolReceiver:
    def __init__(self, pool: DevicePool, place: PoolMemory, pairs: Pairs, notes: LaneStats) -> None:
        self._pool = pool
        self._place = place
        self._pairs = pairs
        self._notes = notes

    def bring(
        self,
        message: dict[str, Any],
        address: QualifiedKey,
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
            reason = self._pairs.why_not(source)
            if not reason:
                if not is_wanted():
                    return None, Fallback.TIMEOUT, 0
                entry, reason = self._from(source, header, address, deadline)
                if entry is not None:
                    return entry, "", number
            elif reason == Fallback.VERSION:
                what = f"{source.lane} of library {source.library}"
                self._notes.warn(reason, f"the pool at {source.host} speaks {what}, and not ours")
        return None, reason, 0

    def _from(
        self, source: Source, header: TensorHeader, address: QualifiedKey, deadline: float
    ) -> tuple[Entry | None, MaybeFallback]:
        try:
            self._pool.reserve(header.nbytes)
        except (BufferFull, TensorTooLarge) as error:
            self._notes.warn(Fallback.NO_ROOM, error)
            return None, Fallback.NO_ROOM
        reason: MaybeFallback = ""
        try:
            with self._place.working():
                # Allocated here, so that a GPU's memory belongs to the pool's stream. The stream
                # then waits for the model's pending work on the former content of that memory.
                tensor = self._place.empty(header)
                left = max(0.0, deadline - time.monotonic())
                self._pairs.receive(source, *address, tensor, left)
            self._check(tensor, source)
            return self._pool.put(address, (tensor, None), header.nbytes, source.checksum), ""
        except MissingTensor:
            reason = Fallback.STALE
        except PipeClosed:
            reason = Fallback.COLD
        except CorruptTensor as error:
            reason = Fallback.CHECKSUM
            self._notes.warn(reason, error)
        except (BufferFull, CodecError) as error:
            reason = Fallback.DEVICE
            self._notes.warn(reason, error)
        except (LookupTimeout, PipeTimeout) as error:
            reason = Fallback.TIMEOUT
            self._notes.warn(reason, error)
        except LookupBufferError as error:
            reason = Fallback.PEER_FAILED
            self._notes.warn(reason, error)
        except Exception as error:  # noqa: BLE001 -- a failed device, with any error of torch
            reason = Fallback.DEVICE
            self._pairs.fail(source.pool)
            self._notes.warn(reason, error)
        self._pool.cancel(header.nbytes)
        return None, reason

    def _check(self, tensor: "torch.Tensor", source: Source) -> None:
        """Verify the checksum of a tensor on the host. A GPU's is not verified: it would have to be
        copied off."""
        if tensor.device.type != "cpu":
            return
        if xxh3_64_intdigest(writable_bytes(tensor)) != source.checksum:
            raise CorruptTensor("a pool sent other bytes than its node published")
