"""The locator without a mirror: looks up keys in the store on the thread `lb-locate`.

Requests that arrive during a round trip are sent together in the next one. There is a circuit
breaker for each server, so that a dead server does not cost every request its timeout. Called by
`resolver`, `takings` and others on the loop's thread, where the answers arrive, too.
"""

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.locator import NOT_REACHED, Answer, Located, Locator, located
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.storage import Storage
from store import Record, StoreError, StoreUnavailable

QUESTIONS_MAX = 512
"""Bound on the requests of one round trip."""
LOOK_AGAIN_SECONDS = (0.005, 0.01, 0.02, 0.05)
"""A watch polls: its notifications come after these pauses; the last one repeats."""


@dataclass(frozen=True, slots=True)
class _Question:
    addresses: Sequence[QualifiedKey]
    answer: Answer


@dataclass(slots=True)
class _Poll:
    loop: asyncio.AbstractEventLoop
    notify: Callable[[], None]
    looks: int = 0
    timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        last = len(LOOK_AGAIN_SECONDS) - 1
        pause_seconds = LOOK_AGAIN_SECONDS[min(self.looks, last)]
        self.timer = self.loop.call_later(pause_seconds, self._look)

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _look(self) -> None:
        self.looks += 1
        self.begin()
        self.notify()


@dataclass(slots=True)
class AskingLocator(Locator):
    loop: asyncio.AbstractEventLoop
    storage: Storage
    directory: Directory
    clock: Callable[[], float] = time.monotonic
    _questions: "queue.SimpleQueue[_Question | None]" = field(default_factory=queue.SimpleQueue)
    _breakers: defaultdict[str, Breaker] = field(init=False)
    """By server name. Used on `lb-locate` only."""
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._breakers = defaultdict(lambda: Breaker(self.clock))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="lb-locate", daemon=True)
        self._thread.start()

    def ask(self, addresses: Sequence[QualifiedKey], answer: Answer) -> None:
        self._questions.put(_Question(addresses, answer))

    def known(self, namespace: str, keys: Sequence[str]) -> list[bool | None]:
        return [None] * len(keys)

    def forget(self, address: QualifiedKey) -> None:
        """Nothing is cached."""

    def tick(self) -> None:
        """Nothing is cached, so nothing is out of date."""

    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], None]:
        poll = _Poll(self.loop, notify)
        poll.begin()
        return poll.cancel

    def close(self) -> None:
        self._questions.put(None)
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while (first := self._questions.get()) is not None:
            asked = [first]
            while len(asked) < QUESTIONS_MAX and not self._questions.empty():
                following = self._questions.get()
                if following is None:
                    self._questions.put(None)
                    break
                asked.append(following)
            found = self._locate({item for question in asked for item in question.addresses})
            for question in asked:
                answers = [found[address] for address in question.addresses]
                call_from_thread(self.loop, question.answer, answers)

    def _locate(self, addresses: Iterable[QualifiedKey]) -> dict[QualifiedKey, Located]:
        found = dict.fromkeys(addresses, NOT_REACHED)
        groups = defaultdict(list)
        for address in found:
            groups[self.storage.place_of(address)].append(address)
        asked = {p: group for p, group in groups.items() if self._breakers[p].allows()}
        records = self._look_up([address for group in asked.values() for address in group])
        for place, group in asked.items():
            if all(address not in records for address in group):
                self._breakers[place].failed()
            else:
                self._breakers[place].succeeded()
        for address, record in records.items():
            found[address] = located(record, self.directory)
        return found

    def _look_up(self, addresses: Sequence[QualifiedKey]) -> dict[QualifiedKey, Record | None]:
        """The records of `addresses`, without those whose server was not reached."""
        if not addresses:
            return {}
        try:
            store = self.storage.store()
            answers = store.look_up(addresses)
        except StoreError:
            return {}
        records = {
            address: answer
            for address, answer in zip(addresses, answers, strict=True)
            if not isinstance(answer, StoreUnavailable)
        }
        self.directory.meet(store, records.values())
        return records
