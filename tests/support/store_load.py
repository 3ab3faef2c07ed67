"""A load on a store from several threads: what each call took, what is acknowledged, what is lost.

A `Writer` does what a node's registrar does, in small: one thread that keeps the desired state of
its keys, tries again what was not reached, and repeats what it wrote lately when another server has
taken over. A `Reader` looks keys up all the while.

`Stalls` measures when this process did not run: the machine gave its cores to others, or one thread
held the interpreter, as Python's collector does while it walks over all objects. A thread that only
sleeps notices it by waking late, and what it noticed can be taken off what a call took. Waiting for
a server is no stall: others run.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from nodes import wait_until
from store import (
    BlockingStore,
    Publication,
    Publishing,
    Record,
    StoreUnavailable,
    Withdrawing,
)
from store.testing.samples import a_location, a_record

TICK_SECONDS = 0.005
NOTICED_SECONDS = 0.02
"""What several threads cost one another when they take turns is less."""


class Stalls(threading.Thread):
    """Use it in `with`, around what is measured."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._spans: list[tuple[float, float]] = []
        self._awake_at = time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> "Stalls":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.is_set():
            due = time.monotonic() + TICK_SECONDS
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            if now - due > NOTICED_SECONDS:
                self._spans.append((due, now))
            self._awake_at = now

    def seconds_between(self, start: float, end: float) -> float:
        """How much of that time was lost, in seconds. Both are a time.monotonic() of the past."""
        wait_until(lambda: self._awake_at >= end, 5.0, "the last stall is noticed")
        lost = (min(end, until) - max(start, since) for since, until in self._spans)
        return sum(seconds for seconds in lost if seconds > 0)


CALL_SECONDS = 0.5
MARGIN_SECONDS = 0.4
"""For a machine with two cores that others use. Two timeouts in a row would not fit."""
LIMIT_SECONDS = CALL_SECONDS + MARGIN_SECONDS
BATCH = 8
PAUSE_SECONDS = 0.002
TTL_SECONDS = 600.0
PAGE = 500
"""Keys that are read in one call, which has `CALL_SECONDS`."""
ASKED_MAX = 20
MANY_KEYS = 10_000
"""Of each writer: so many that some are not changed again while a server is replaced."""

T = TypeVar("T")


class Caller(threading.Thread):
    """Calls until it is told to stop. Read its figures from outside, `failure` after the end."""

    def __init__(self, store: BlockingStore) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.slowest = 0.0
        self.calls = 0
        self._suspects: list[tuple[float, float]] = []
        self.raised = 0
        self.failure: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                self.step()
                time.sleep(PAUSE_SECONDS)
        except BaseException as error:
            self.failure = error

    def step(self) -> None:
        raise NotImplementedError

    def timed(self, call: Callable[[], T]) -> T | None:
        """None where the store was not reached at all."""
        started = time.monotonic()
        try:
            return call()
        except StoreUnavailable:
            self.raised += 1
            return None
        finally:
            self.calls += 1
            ended = time.monotonic()
            self.slowest = max(self.slowest, ended - started)
            if ended - started > LIMIT_SECONDS:
                self._suspects.append((started, ended))

    def late(self, stalls: Stalls) -> list[float]:
        """What each call took that was over the limit by itself, without what the process lost."""
        spans = list(self._suspects)
        own = [end - start - stalls.seconds_between(start, end) for start, end in spans]
        return [seconds for seconds in own if seconds > LIMIT_SECONDS]

    def measure_anew(self) -> None:
        self.slowest = 0.0
        self._suspects = []

    def end(self) -> None:
        self._ended.set()
        self.join()


class Writer(Caller):
    """Publishes and withdraws keys of its own. `desired` is the generation of each, 0 for none."""

    def __init__(self, store: BlockingStore, namespace: str, node: str, keys: int) -> None:
        super().__init__(store)
        self.namespace, self.node = namespace, node
        self.keys = [f"{node}-{n}" for n in range(keys)]
        self.desired: dict[str, int] = {}
        self.written_at: dict[str, float] = {}
        self.due: dict[str, None] = {}
        self.partly = 0
        """Calls that reached some servers and not others."""
        self.restored = 0
        """Publications that had been acknowledged, were lost, and are there again."""
        self._acknowledged: dict[str, int] = {}
        self._doubtful: set[str] = set()
        """Their last write got no answer, and may still take effect, after the next one."""
        self.busy = True
        self._failovers = store.failovers()
        self._chance = random.Random(node)

    def step(self) -> None:
        if self.busy:
            for key in self._chance.sample(self.keys, BATCH // 2):
                generation = abs(self.desired.get(key, 0)) + 1
                # The sign says whether it is there: a withdrawn key remembers its generation.
                self.desired[key] = generation if self._chance.random() < 0.7 else -generation
                self.due[key] = None
        batch = list(self.due)[:BATCH]
        self._write([key for key in batch if self.desired[key] > 0], self._publish)
        self._write([key for key in batch if self.desired[key] <= 0], self._withdraw)
        if (failovers := self.store.failovers()) > self._failovers:
            self._failovers = failovers
            recent = [key for key, at in self.written_at.items() if at > time.monotonic() - 60.0]
            self.due |= dict.fromkeys(recent)

    def _write(self, keys: Sequence[str], write: Callable[[Sequence[str]], Sequence[bool]]) -> None:
        """A key that was written is due no more, until it changes again."""
        if not keys:
            return
        now = time.monotonic()
        written = self.timed(lambda: write(keys)) or [False] * len(keys)
        self.partly += len(set(written)) == 2
        for key, done in zip(keys, written, strict=True):
            self.due.pop(key)
            if done and key not in self._doubtful:
                self.written_at[key] = now
                continue
            self.due[key] = None  # behind the others, so that they go on; and once more at the end
            if done:
                self.written_at[key] = now
                self._doubtful.discard(key)
            else:
                self._doubtful.add(key)

    def _publish(self, keys: Sequence[str]) -> list[bool]:
        publishings = [
            Publishing(
                a_record(self.namespace, key),
                a_location(self.node, generation=self.desired[key]),
                TTL_SECONDS,
            )
            for key in keys
        ]
        answers = self.store.publish_many(publishings)
        assert set(answers) <= {Publication.ADDED, Publication.PRESENT, Publication.UNREACHED}
        for key, answer in zip(keys, answers, strict=True):
            if answer is Publication.ADDED:
                self.restored += self._acknowledged.get(key) == self.desired[key]
            if answer is not Publication.UNREACHED:
                self._acknowledged[key] = self.desired[key]
        return [answer is not Publication.UNREACHED for answer in answers]

    def _withdraw(self, keys: Sequence[str]) -> list[bool]:
        withdrawings = [Withdrawing(self.namespace, key, self.node, "evicted") for key in keys]
        return [answer is not None for answer in self.store.withdraw_many(withdrawings)]

    def wrong(self, store: BlockingStore) -> list[str]:
        """Keys of which the store says something else than was last acknowledged."""
        keys = list(self.desired)
        found = [
            one
            for start in range(0, len(keys), PAGE)
            for one in self._located(store, keys[start : start + PAGE])
        ]
        return [
            f"{key}: {self.desired[key]}, found {record and record.locations}"
            for key, record in zip(keys, found, strict=True)
            if _generation(record) != max(self.desired[key], 0)
        ]

    def _located(self, store: BlockingStore, keys: Sequence[str]) -> list[Record | None]:
        """Asks again where not all was reached in time: it may be there nevertheless."""
        for _ in range(ASKED_MAX):
            with suppress(StoreUnavailable):
                found = store.look_up([(self.namespace, key) for key in keys])
                reached = [one for one in found if not isinstance(one, StoreUnavailable)]
                if len(reached) == len(keys):
                    return reached
        raise AssertionError(f"the store was not reached {ASKED_MAX} times")


class Reader(Caller):
    """Looks keys up, which are all there. `had_at` is when each was last found."""

    def __init__(self, store: BlockingStore, namespace: str, keys: Sequence[str]) -> None:
        super().__init__(store)
        self.namespace, self.keys = namespace, keys
        self.had_at = dict.fromkeys(keys, 0.0)

    def step(self) -> None:
        found = self.timed(lambda: self.store.locate(self.namespace, self.keys))
        for key, record in zip(self.keys, found or (), strict=False):
            if record is not None:
                self.had_at[key] = time.monotonic()


class Load:
    """Three writers and two readers of keys that stay."""

    def __init__(self, store: BlockingStore, namespace: str, keys: int, stalls: Stalls) -> None:
        self.store, self.namespace = store, namespace
        self._stalls = stalls
        self.lasting = [f"lasting-{n}" for n in range(32)]
        lasting = [
            Publishing(a_record(namespace, k), a_location("n"), TTL_SECONDS) for k in self.lasting
        ]
        assert store.publish_many(lasting) == [Publication.ADDED] * len(lasting)
        self.writers = [Writer(store, namespace, f"node-{n}", keys) for n in range(3)]
        self.readers = [Reader(store, namespace, self.lasting) for _ in range(2)]
        self.callers: list[Caller] = [*self.writers, *self.readers]

    @property
    def slowest(self) -> float:
        return max(caller.slowest for caller in self.callers)

    def within_budget(self) -> None:
        """No call so far took longer than it may; starts to measure anew."""
        slowest, calls = self.slowest, sum(caller.calls for caller in self.callers)
        print(f"{calls} calls, the slowest {slowest:.3f} s")
        assert not [late for caller in self.callers for late in caller.late(self._stalls)]
        for caller in self.callers:
            caller.measure_anew()

    def moves(self, seconds: float) -> float:
        """Wait until every writer and reader has got through; the seconds that it took."""
        calls = {caller: (caller.calls, caller.raised) for caller in self.callers}

        def gets_through() -> bool:
            return all(
                c.calls - calls[c][0] > c.raised - calls[c][1] and not c.failure
                for c in self.callers
            )

        return wait_until(gets_through, seconds, "the load goes on")

    def write(self, calls: int) -> None:
        """Wait until the writers have called so many times more."""
        due = sum(writer.calls for writer in self.writers) + calls
        wait_until(lambda: sum(w.calls for w in self.writers) >= due, 5.0, "the load goes on")

    def settle(self, seconds: float = 15.0) -> None:
        """No more changes; wait until nothing is due, and look whether all is as acknowledged."""
        for writer in self.writers:
            writer.busy = False
        wait_until(lambda: not any(w.due for w in self.writers), seconds, "nothing is due")
        self.end()
        for writer in self.writers:
            assert not writer.due
            if wrong := writer.wrong(self.store):
                raise AssertionError(
                    f"{len(wrong)} of {len(writer.desired)} keys are wrong; the writer has seen "
                    f"{writer._failovers} failovers of {self.store.failovers()}; {wrong[:20]}"
                )

    def end(self) -> None:
        for caller in self.callers:
            caller.end()
        failures = [caller.failure for caller in self.callers if caller.failure]
        if failures:
            raise failures[0]


@contextmanager
def under_load(store: BlockingStore, namespace: str, keys: int = 1000) -> Iterator[Load]:
    """Few `keys` for each writer are changed all the time, many stay as they are for long."""
    with Stalls() as stalls:
        load = Load(store, namespace, keys, stalls)
        for caller in load.callers:
            caller.start()
        try:
            yield load
        finally:
            load.end()


def _generation(record: Record | None) -> int:
    return record.locations[0].generation if record else 0
