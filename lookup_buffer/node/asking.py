"""The locator that asks the store each time, many keys at once, on a thread of its own.

Questions that arrive while a round trip is under way go out together in the next one. A breaker
keeps a dead store from costing every question its timeout.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.inventory import Address
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.locator import NOT_REACHED, Answer, Located, Locator, located
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.storage import Storage
from store import StoreError

QUESTIONS_MAX = 512
"""Bound on the questions of one round trip."""
LOOK_AGAIN_SECONDS = (0.005, 0.01, 0.02, 0.05)
"""How long a watch waits before it says that something may have changed; the last one repeats."""


@dataclass(frozen=True, slots=True)
class _Question:
    addresses: Sequence[Address]
    answer: Answer


@dataclass(slots=True)
class _Poll:
    notify: Callable[[], None]
    pauses: Iterable[float] = field(
        default_factory=lambda: itertools.chain(
            LOOK_AGAIN_SECONDS, itertools.repeat(LOOK_AGAIN_SECONDS[-1])
        )
    )
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class AskingLocator(Locator):
    loop: asyncio.AbstractEventLoop
    storage: Storage
    directory: Directory
    clock: Callable[[], float] = time.monotonic
    _questions: "queue.SimpleQueue[_Question | None]" = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="lb-locate", daemon=True)
        self._thread.start()

    def ask(self, addresses: Sequence[Address], answer: Answer) -> None:
        self._questions.put(_Question(addresses, answer))

    def known(self, namespace: str, keys: Sequence[str]) -> list[bool | None]:
        return [None] * len(keys)

    def watch(self, address: Address, notify: Callable[[], None]) -> Callable[[], None]:
        poll = _Poll(notify)
        self._again(poll, iter(poll.pauses))
        return partial(_cancel, poll)

    def _again(self, poll: _Poll, pauses: "Iterable[float]") -> None:
        def look() -> None:
            self._again(poll, pauses)
            poll.notify()

        poll.timer = self.loop.call_later(next(iter(pauses)), look)

    def close(self) -> None:
        self._questions.put(None)
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        breaker = Breaker(self.clock)
        while (first := self._questions.get()) is not None:
            asked = [first]
            while len(asked) < QUESTIONS_MAX and not self._questions.empty():
                following = self._questions.get()
                if following is None:
                    self._questions.put(None)
                    break
                asked.append(following)
            found = self._locate(
                {item for question in asked for item in question.addresses}, breaker
            )
            for question in asked:
                answers = [found[address] for address in question.addresses]
                call_from_thread(self.loop, question.answer, answers)

    def _locate(self, addresses: Iterable[Address], breaker: Breaker) -> dict[Address, Located]:
        found = dict.fromkeys(addresses, NOT_REACHED)
        if not breaker.allows():
            return found
        keys_by_namespace = defaultdict(list)
        for namespace, key in found:
            keys_by_namespace[namespace].append(key)
        try:
            store = self.storage.store()
            for namespace, keys in keys_by_namespace.items():
                records = store.locate(namespace, keys)
                self.directory.meet(store, records)
                for key, record in zip(keys, records, strict=True):
                    found[namespace, key] = located(record, self.directory)
        except StoreError:
            breaker.failed()
        else:
            breaker.succeeded()
        return found


def _cancel(poll: _Poll) -> None:
    if poll.timer is not None:
        poll.timer.cancel()
        poll.timer = None
