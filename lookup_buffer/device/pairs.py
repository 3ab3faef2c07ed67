"""Pairs: this process's ends of the lanes to other pools.

Made in the background when a pool is first heard of, with a probe that takes the communicator;
never while somebody waits. A bounded number, the least recently used goes. A pair that failed is
left alone for a while, longer each time.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from lookup_buffer.device import asking
from lookup_buffer.device.crew import Crew
from lookup_buffer.device.dialect import Dialect, joining, memory_of
from lookup_buffer.device.notes import Notes
from lookup_buffer.device.place import Place
from lookup_buffer.errors import (
    CodecError,
    LookupBufferError,
    MissingTensor,
    PipeBroken,
    PipeClosed,
    ProtocolError,
)
from lookup_buffer.pipes.meeting import meet
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits

PAIRS_MAX: Final = 16
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
MAKE_SECONDS: Final = 30.0
MAKERS: Final = 2
"""Threads of their own: whoever cannot be reached takes seconds, and holds up no reception."""


class Source(NamedTuple):
    """Where another pool has what is wanted."""

    host: str
    mark: int
    lane: str
    library: str
    port: int
    pool: str
    checksum: int


@dataclass(slots=True, eq=False)
class Pair:
    """One pool, and the pipe to it while there is one."""

    pool: str
    pipe: KVPipe | None = None
    is_making: bool = False
    failures: int = 0
    rests_until: float = 0.0
    last_ask: int = 0
    users: int = 0


class Pairs:
    """Thread-safe.

    Args:
        notes: told why one cannot be made.
    """

    def __init__(
        self,
        place: Place,
        dialect: Dialect,
        *,
        token: str | None,
        limits: PipeLimits,
        notes: Notes,
        pairs_max: int = PAIRS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._dialect = dialect
        self._join = joining(dialect, place)(False, limits.silence_seconds)
        self._token = token
        self._limits = limits
        self._makers = Crew(notes, "lb-lane-make", MAKERS)
        self._warn = notes.warn
        self._pairs_max = pairs_max
        self._clock = clock
        self._lock = threading.Lock()
        self._pairs: OrderedDict[str, Pair] = OrderedDict()
        self._closed = False

    def open_pairs(self) -> int:
        with self._lock:
            return sum(pair.pipe is not None for pair in self._pairs.values())

    def why_not(self, source: Source) -> str:
        """Why nothing comes from there now (see `lane.FALLBACKS`), "" where it may; a pair that is
        not there yet is begun."""
        if (source.lane, source.library) != (self._dialect.lane, self._dialect.library):
            return "version"
        with self._lock:
            pair = self._pairs.get(source.pool)
            if pair is None:
                pair = self._pairs[source.pool] = Pair(source.pool)
            self._pairs.move_to_end(source.pool)
            surplus = self._surplus()
            reason = ""
            if pair.pipe is None:
                reason = "abandoned" if self._clock() < pair.rests_until else "cold"
            makes = reason == "cold" and not pair.is_making and not self._closed
            pair.is_making = pair.is_making or makes
        for pipe in surplus:
            pipe.abort()
        if makes and not self._makers.soon(lambda: self._make(pair, source)):
            pair.is_making = False
        return reason

    def _surplus(self) -> list[KVPipe]:
        """Under the lock: forget the least recently used, beyond the bound."""
        pipes = []
        for name, pair in list(self._pairs.items())[: max(0, len(self._pairs) - self._pairs_max)]:
            if not (pair.users or pair.is_making):
                del self._pairs[name]
                pipes += [pair.pipe] if pair.pipe is not None else []
        return pipes

    def receive(
        self, source: Source, namespace: str, key: str, out: torch.Tensor, timeout: float
    ) -> None:
        """Fill `out` from there. Where this fails the pair rests.

        Raises:
            MissingTensor: the pool has it no more. The pair stays.
            PipeClosed: the other end has ended it; another one may be made.
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
            pipe.send_tensor(asking.message(question), timeout=timeout)
            verdict = pipe.recv_tensor(asking.verdict_key(ask), timeout=timeout)
            if asking.fields_in(verdict).get("status") != "ok":
                raise MissingTensor(f"the pool no longer holds {key}")
            left = max(0.0, deadline - self._clock())
            pipe.recv_tensor(asking.payload_key(ask), timeout=left, out=out)
        except MissingTensor:
            raise
        except PipeClosed:  # in order, for nobody asked for long: there will be another
            with self._lock:
                pair.pipe = None if pair.pipe is pipe else pair.pipe
            pipe.abort()
            raise
        except CodecError as error:  # `out` is what the record tells of
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

    def fail(self, pool: str, pipe: KVPipe | None = None) -> None:
        """The pair to this pool does not work, as its user has seen: it rests. Never waits."""
        with self._lock:
            pair = self._pairs.get(pool)
            if pair is None or pair.pipe is None or (pipe is not None and pair.pipe is not pipe):
                return
            broken = self._rest(pair)
        if broken is not None:
            broken.abort()

    def _rest(self, pair: Pair) -> KVPipe | None:
        pair.failures += 1
        pause = min(PAUSE_SECONDS * 2 ** min(pair.failures - 1, 10), PAUSE_SECONDS_MAX)
        pair.rests_until = self._clock() + pause
        broken, pair.pipe = pair.pipe, None
        return broken

    def close(self, timeout: float) -> None:
        """Idempotent; waits so long at most for one that is being made."""
        with self._lock:
            self._closed = True
            pipes = [pair.pipe for pair in self._pairs.values() if pair.pipe is not None]
            self._pairs.clear()
        for pipe in pipes:
            pipe.abort()
        self._makers.close(timeout)

    # -- in the background

    def _make(self, pair: Pair, source: Source) -> None:
        pipe = None
        try:
            pipe = self._open(source)
        except Exception as error:  # noqa: BLE001 -- a device's, too: or it would be made for ever
            self._warn("abandoned", f"no pair with {source.host}:{source.port}: {error}")
        with self._lock:
            pair.is_making = False
            wanted = not self._closed and self._pairs.get(pair.pool) is pair
            if pipe is not None and wanted:
                pair.pipe, pair.failures = pipe, 0
                return
            self._rest(pair)
        if pipe is not None:
            pipe.abort()

    def _open(self, source: Source) -> KVPipe:
        host = f"[{source.host}]" if ":" in source.host else source.host
        pipe = meet(
            f"lane://{host}:{source.port}",
            listen=False,
            timeout=self._limits.silence_seconds,
            token=self._token,
            limits=self._limits,
            joined=self._join,
            memory=memory_of(self._dialect, self._place),
        )
        try:
            with self._place.working():
                pipe.send_tensor(
                    asking.message({"ask": 0, "mark": 0}), timeout=self._limits.silence_seconds
                )
                pipe.recv_tensor(asking.payload_key(0), timeout=MAKE_SECONDS)
        except BaseException:
            pipe.abort()
            raise
        return pipe
