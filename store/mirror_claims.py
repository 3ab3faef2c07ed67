"""Claims over the mirror's tracked connections: acquired and released without a thread.

The commands take effect in the order of the connection. The claim script also reads the record.
That read is tracked, so the mirror caches it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from redis.exceptions import NoScriptError

from store import layout
from store.answers import ClaimAnswer, Claiming, Releasing
from store.base import MirrorClaims
from store.calls import claim_answer, claim_call, release_call
from store.client import Call, Script
from store.errors import StoreCorrupt, StoreError, StoreRefused
from store.mirror import RedisMirror
from store.record import check_namespace, check_token
from store.replies import translated
from store.tracking import TrackedConnection

OnReply = Callable[[TrackedConnection | None, Any], None]


class RedisMirrorClaims(MirrorClaims):
    """If a slot has moved, the result is StoreRefused: this class does not follow redirections, but
    the store does.
    """

    def __init__(self, mirror: RedisMirror, claim: Script, release: Script) -> None:
        self._mirror = mirror
        self._claim = claim
        self._release = release

    def claim(self, claiming: Claiming, answer: Callable[[ClaimAnswer | StoreError], None]) -> None:
        check_namespace(claiming.namespace)
        check_token(claiming.token)
        address = (claiming.namespace, claiming.key)
        sent_at = self._mirror.now()

        def on_reply(connection: TrackedConnection | None, reply: Any) -> None:
            if connection is None or isinstance(reply, StoreError):
                answer(reply)
                return
            record = layout.record(*address).encode()
            self._mirror.cache_reply(connection, record, address, reply[-1], sent_at)
            answer(claim_answer(claiming, reply))

        self._run(self._claim, claim_call(claiming), on_reply)

    def release(self, releasing: Releasing, answer: Callable[[bool | StoreError], None]) -> None:
        check_namespace(releasing.namespace)
        self._run(self._release, release_call(releasing), lambda _, reply: answer(_released(reply)))

    def _run(self, script: Script, call: Call, on_reply: OnReply) -> None:
        """`on_reply` gets the connection and the script's result, or None and a StoreError."""
        answered = partial(self._answered, script, call, on_reply)
        self._mirror.send(_name(call), script.by_digest(call), answered)

    def _answered(
        self,
        script: Script,
        call: Call,
        on_reply: OnReply,
        connection: TrackedConnection | None,
        reply: Any,
    ) -> None:
        if isinstance(reply, NoScriptError):
            # Happens once after each start of a server.
            answered = partial(self._answered, script, call, on_reply)
            self._mirror.send(_name(call), script.by_text(call), answered)
            return
        found = translated(reply)
        if connection is not None and isinstance(found, StoreRefused):
            self._mirror.refused(connection, reply)
        on_reply(connection, found)


def _name(call: Call) -> bytes:
    """All keys of a call are on one server."""
    return call[0][0].encode()


def _released(answer: Any) -> bool | StoreError:
    if isinstance(answer, StoreCorrupt) and answer.wrong_type:
        return False  # a foreign value: not our claim
    return answer if isinstance(answer, StoreError) else bool(answer == 1)
