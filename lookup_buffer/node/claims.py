"""Claims: the right to produce a key, one holder in the fleet, with a lease.

The store decides. A claim belongs to the session that took it; asking again renews it; it is
given back on request or when the session ends, and lapses with its lease if nobody can. Called
on the loop's thread; the store is asked on a thread of this module's.
"""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lookup_buffer.inventory import Address
from lookup_buffer.messages import Claim, ReleaseClaim
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.session import Session
from lookup_buffer.node.storage import Storage
from store import StoreError

Answer = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Claims:
    loop: asyncio.AbstractEventLoop
    storage: Storage
    identity: Identity
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="lb-claim")
    )

    def claim(self, session: Session, request: Claim, answer: Answer) -> None:
        """Answers granted, holder, remaining_seconds. A store that is down grants: encoding
        twice is what a fault may cost, waiting for nobody is not."""
        address = (request.namespace, request.key)
        token = session.claims.setdefault(address, secrets.token_hex(8))
        self._threads.submit(self._claim, session, address, token, request.lease_seconds, answer)

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
        try:
            found = self.storage.store().claim(
                *address, holder=holder, token=token, lease_seconds=lease_seconds
            )
        except StoreError:
            call_from_thread(
                self.loop, answer, {"granted": True, "holder": "", "remaining_seconds": 0.0}
            )
            return
        if not found.granted:
            call_from_thread(self.loop, session.claims.pop, address, None)
        fields = {
            "granted": found.granted,
            "holder": found.holder,
            "remaining_seconds": found.remaining_seconds,
        }
        call_from_thread(self.loop, answer, fields)

    def _release(self, address: Address, token: str, answer: Answer) -> None:
        try:
            released = self.storage.store().release_claim(*address, token=token)
        except StoreError:
            released = False  # the lease will end it
        call_from_thread(self.loop, answer, {"released": released})
