"""The locator: asks the store who holds keys, many at a time, on a thread of its own.

Questions that arrive while a round trip is under way go out together in the next one. A store
that fails is a value (`store_down`), never an exception; a breaker keeps a dead store from
costing every question its timeout.
"""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lookup_buffer.inventory import Address
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.storage import Storage
from store import Location, MetadataStore, Record, StoreError

QUESTIONS_MAX = 512
"""Bound on the questions of one round trip."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where a key can be fetched; no sources and a reason where it cannot."""

    record: Record | None
    sources: tuple[tuple[Location, str], ...] = ()
    """(location, endpoint) of nodes that live, this node left out."""
    reason: str = ""


Answer = Callable[[list[Located]], None]


@dataclass(frozen=True, slots=True)
class _Question:
    addresses: Sequence[Address]
    answer: Answer


@dataclass(slots=True)
class Locator:
    """`ask` from any thread; answers are called on the locator's thread and must not block."""

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
                question.answer([found[address] for address in question.addresses])

    def _locate(self, addresses: Iterable[Address], breaker: Breaker) -> dict[Address, Located]:
        found = dict.fromkeys(addresses, Located(None, reason="store_down"))
        if not breaker.allows():
            return found
        keys_by_namespace = defaultdict(list)
        for namespace, key in found:
            keys_by_namespace[namespace].append(key)
        try:
            store = self.storage.store()
            for namespace, keys in keys_by_namespace.items():
                for key, record in zip(keys, store.locate(namespace, keys), strict=True):
                    found[namespace, key] = self._sources(record, store)
        except StoreError:
            breaker.failed()
        else:
            breaker.succeeded()
        return found

    def _sources(self, record: Record | None, store: MetadataStore) -> Located:
        if record is None:
            return Located(None, reason="absent")
        sources = self.directory.sources(record, store)
        return Located(record, sources, "" if sources else "owner_dead")
