"""The locator with a mirror: caches the store's records, which the store invalidates.

It runs on the loop's thread: a look-up of a cached key costs no round trip and no change of
threads. The thread `lb-locate` opens the store, connects, and reads the membership when a record
names an unknown node. Called as `locator` says, and by `MirrorArbiter`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.locator import NOT_REACHED, Answer, Located, Locator, located
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.storage import Storage
from lookup_buffer.shm.index import RemoteIndex
from store import Found, Record

if TYPE_CHECKING:
    from store.base import Entry, Mirror, MirrorClaims

OPEN_AGAIN_SECONDS = 1.0


@dataclass(slots=True)
class _Question:
    addresses: Sequence[QualifiedKey]
    answer: Answer
    records: dict[QualifiedKey, Found] = field(default_factory=dict)
    left: int = 0


@dataclass(slots=True, eq=False)
class _Watch:
    address: QualifiedKey
    notify: Callable[[], None]
    cancel: Callable[[], None] | None = None
    cancelled: bool = False


@dataclass(slots=True)
class MirrorLocator(Locator):
    loop: asyncio.AbstractEventLoop
    storage: Storage
    directory: Directory
    remote_index: RemoteIndex
    """Lists the keys that other nodes hold, for this host's clients."""
    _epoch: int = -1
    """The epoch of the membership when the current round began."""
    _round: int = 0
    """Verdicts of earlier rounds are out of date, and their entries are removed from the remote
    index."""
    claims: "MirrorClaims | None" = None
    """Claims over the mirror's connections; None until the mirror exists."""
    _mirror: "Mirror | None" = None
    _waiting: list[_Question | _Watch] = field(default_factory=list)
    """Requests from before the store was open."""
    _opening: bool = False
    _open_at: float = 0.0
    _closed: bool = False
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="lb-locate")
    )

    def start(self) -> None:
        self._open()

    def ask(self, addresses: Sequence[QualifiedKey], answer: Answer) -> None:
        question = _Question(addresses, answer)
        if self._mirror is None:
            self._ask_later(question)
        else:
            self._ask(self._mirror, question)

    def known(self, namespace: str, keys: Sequence[str]) -> list[bool | None]:
        if self._mirror is None:
            return [None] * len(keys)
        self._turn()
        entry_of, this_round = self._mirror.entries(namespace).get, self._round
        found: list[bool | None] = []
        for key in keys:
            entry = entry_of(key)
            if entry is None:
                found.append(None)
            elif entry.verdict_epoch == this_round:
                found.append(entry.verdict)
            else:
                found.append(self._judge((namespace, key), entry))
        return found

    def forget(self, address: QualifiedKey) -> None:
        if self._mirror is not None:
            self._mirror.forget(*address)

    def tick(self) -> None:
        self._turn()
        self.remote_index.mark_current()

    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], None]:
        watch = _Watch(address, notify)

        def cancel() -> None:
            watch.cancelled = True
            if watch.cancel is not None:
                watch.cancel()

        if self._mirror is None:
            self._ask_later(watch)
        else:
            watch.cancel = self._mirror.watch(*address, notify)
        return cancel

    def close(self) -> None:
        self._closed = True
        if self._mirror is not None:
            self.storage.close_mirror(self._mirror)
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- the mirror

    def _open(self) -> None:
        self._opening = True
        opened = self._thread.submit(self.storage.store)
        opened.add_done_callback(lambda done: call_from_thread(self.loop, self._opened, done))

    def _opened(self, opened: "Future[object]") -> None:
        self._opening = False
        if self._closed:
            return
        waiting, self._waiting = self._waiting, []
        if opened.exception() is None:
            opened_mirror = self.storage.mirror(self._forgotten)
            assert opened_mirror is not None
            mirror, self.claims = opened_mirror
            self._mirror = mirror
            for asked in waiting:
                if isinstance(asked, _Question):
                    self._ask(mirror, asked)
                elif not asked.cancelled:
                    asked.cancel = mirror.watch(*asked.address, asked.notify)
            return
        self._open_at = self.loop.time() + OPEN_AGAIN_SECONDS
        for asked in waiting:
            if isinstance(asked, _Question):
                asked.answer([NOT_REACHED] * len(asked.addresses))
            elif not asked.cancelled:
                self._waiting.append(asked)  # its waiter has a deadline of its own

    def _ask_later(self, asked: _Question | _Watch) -> None:
        if not self._opening and self.loop.time() < self._open_at and isinstance(asked, _Question):
            asked.answer([NOT_REACHED] * len(asked.addresses))
            return
        self._waiting.append(asked)
        if not self._opening:
            self._open()

    # -- questions

    def _ask(self, mirror: "Mirror", question: _Question) -> None:
        keys_by_namespace = defaultdict(list)
        for namespace, key in question.addresses:
            keys_by_namespace[namespace].append(key)
        question.left = len(keys_by_namespace)
        for namespace, keys in keys_by_namespace.items():

            def answered(
                found: list[Found], namespace: str = namespace, keys: list[str] = keys
            ) -> None:
                for key, one in zip(keys, found, strict=True):
                    question.records[namespace, key] = one
                question.left -= 1
                if not question.left:
                    self._answered(question)

            mirror.ask(namespace, keys, answered)

    def _answered(self, question: _Question) -> None:
        records = [r for r in question.records.values() if isinstance(r, Record)]
        self._meet(records, partial(self._met, question))

    def held(self, record: Record | None, answer: Callable[[bool], None]) -> None:
        """Answer whether a live node holds `record`; perhaps before this returns."""

        def met() -> None:
            answer(record is not None and bool(self.directory.sources(record)))

        self._meet([] if record is None else [record], met)

    def _meet(self, records: Sequence[Record], met: Callable[[], None]) -> None:
        """Call `met` when all nodes that these records name are known, as far as possible."""
        if all(self.directory.knows(at) for record in records for at in record.locations):
            met()
            return
        # An unknown node: read the membership first, on lb-locate.
        read = self._thread.submit(self._read_directory, records)
        read.add_done_callback(lambda _: call_from_thread(self.loop, met))

    def _read_directory(self, records: Sequence[Record]) -> None:
        self.directory.meet(self.storage.store(), records)

    def _met(self, question: _Question) -> None:
        question.answer([self._located(question.records[a]) for a in question.addresses])

    def _located(self, found: Found) -> Located:
        if found is None or isinstance(found, Record):
            return located(found, self.directory)
        return NOT_REACHED

    def _judge(self, address: QualifiedKey, entry: "Entry") -> bool | None:
        """Whether a live node holds it. None if its node is unknown, or if the absence of a
        record was read too long ago."""
        record = entry.record
        if record is None:
            return None if entry.until < self.loop.time() else False
        if entry.read_at > self.directory.refreshed_at and not all(
            map(self.directory.knows, record.locations)
        ):
            return None
        entry.verdict = bool(located(record, self.directory).sources)
        entry.verdict_epoch = self._round
        if entry.verdict:
            self.remote_index.add(address)
        return entry.verdict

    def _turn(self) -> None:
        """Start a new round if nodes appeared or died."""
        if self.directory.epoch != self._epoch:
            self._epoch = self.directory.epoch
            self._judge_anew()

    def _judge_anew(self) -> None:
        self._round += 1
        self.remote_index.clear()

    def _forgotten(self, address: QualifiedKey | None) -> None:
        """The mirror dropped the key; None: many keys at once."""
        if address is None:
            self._judge_anew()
        else:
            self.remote_index.remove(address)
