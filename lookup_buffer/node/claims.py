"""Claims: the right to produce a key, one holder in the fleet, with a lease.

The store decides; a store that is down or slow grants. A claim belongs to the session that took
it; asking again renews it; it is given back on request or when the session ends, and lapses with
its lease if nobody can. Called on the loop's thread; the store is asked on a thread of this
module's.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lookup_buffer.inventory import Address
from lookup_buffer.messages import Claim, ReleaseClaim
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.session import Session
from lookup_buffer.node.storage import Storage
from store import ClaimState, StoreError

Answer = Callable[[dict[str, Any]], None]

ANSWER_SECONDS = 0.4
"""Well within what a client waits for an answer, however many claims wait for a slow store."""
GRANTED_UNASKED = {"granted": True, "holder": "", "remaining_seconds": 0.0}


@dataclass(slots=True)
class Claims:
    loop: asyncio.AbstractEventLoop
    storage: Storage
    identity: Identity
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="lb-claim")
    )
    _breaker: Breaker = field(default_factory=lambda: Breaker(time.monotonic))
    """Used on that one thread."""

    def claim(self, session: Session, request: Claim, answer: Answer) -> None:
        """Answers granted, holder, remaining_seconds. A store that is down grants: encoding
        twice is what a fault may cost, waiting for nobody is not."""
        address = (request.namespace, request.key)
        token = session.claims.setdefault(address, secrets.token_hex(8))
        answered: list[bool] = []

        def answer_once(fields: dict[str, Any]) -> None:
            if not answered:
                answered.append(True)
                bound.cancel()
                answer(fields)

        bound = self.loop.call_later(ANSWER_SECONDS, answer_once, GRANTED_UNASKED)
        self._threads.submit(
            self._claim, session, address, token, request.lease_seconds, answer_once
        )

    def release(self, session: Session, request: ReleaseClaim, answer: Answer) -> None:
        """Answers released: whether the claim was still this session's."""
        address = (request.namespace, request.key)
        token = session.claims.pop(address, None)
        if token is None:
            answer({"released": False})
        else:
            self._threads.submit(self._release, address, token, answer)

    def release_all(self, session: Session) -> None:
        for address, token in session.claims.items():
            self._threads.submit(self._release, address, token, lambda _: None)
        session.claims.clear()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=False)

    def _claim(
        self, session: Session, address: Address, token: str, lease_seconds: float, answer: Answer
    ) -> None:
        holder = f"{self.identity.node}:{self.identity.boot}"
        if not self._breaker.allows():
            call_from_thread(self.loop, answer, GRANTED_UNASKED)
            return
        try:
            found = self.storage.store().claim(
                *address,
                holder=holder,
                token=token,
                state=ClaimState.ENCODING,
                lease_seconds=lease_seconds,
            )
        except StoreError:
            self._breaker.failed()
            call_from_thread(self.loop, answer, GRANTED_UNASKED)
            return
        self._breaker.succeeded()
        if not found.granted:
            call_from_thread(self.loop, session.claims.pop, address, None)
        fields = {
            "granted": found.granted,
            "holder": found.holder,
            "remaining_seconds": found.remaining_seconds,
        }
        call_from_thread(self.loop, answer, fields)

    def _release(self, address: Address, token: str, answer: Answer) -> None:
        released = False
        if self._breaker.allows():
            try:
                released = self.storage.store().release_claim(*address, token=token)
                self._breaker.succeeded()
            except StoreError:
                self._breaker.failed()  # the lease will end it
        call_from_thread(self.loop, answer, {"released": released})
