"""Claims by way of a mirror's connections: asked for and given back without a thread or a wait.

On the mirror's lanes, in whose order they take effect. The script that decides a claim reads the
record as well; what it reads is tracked, so the mirror knows it from then on.
"""

from collections.abc import Callable
from typing import Any

from store import layout
from store.answers import ClaimAnswer, Claiming, Releasing
from store.calls import claim_answer, claim_call, release_call
from store.connection import Refusal
from store.errors import StoreCorrupt, StoreError, StoreRefused
from store.lane import Lane
from store.link import Call, Script, translated
from store.mirror import Mirror
from store.record import check_namespace, check_token

Heard = Callable[[Lane | None, Any], None]


class MirrorClaims:
    """All methods, and all answers, on the mirror's loop; an answer maybe before they return.

    Whoever is pointed elsewhere (a slot has moved) hears StoreRefused: the store itself follows.
    """

    def __init__(self, mirror: Mirror, claim: Script, release: Script) -> None:
        self._mirror = mirror
        self._claim = claim
        self._release = release

    def claim(self, claiming: Claiming, answer: Callable[[ClaimAnswer | StoreError], None]) -> None:
        """As MetadataStore.claim."""
        check_namespace(claiming.namespace)
        check_token(claiming.token)
        address = (claiming.namespace, claiming.key)
        asked_at = self._mirror.now()

        def heard(lane: Lane | None, reply: Any) -> None:
            if lane is None or isinstance(reply, StoreError):
                answer(reply)
                return
            record = layout.record(*address).encode()
            self._mirror.take_in(lane, record, address, reply[-1], asked_at)
            answer(claim_answer(claiming, reply))

        self._run(self._claim, claim_call(claiming), heard)

    def release(self, releasing: Releasing, answer: Callable[[bool | StoreError], None]) -> None:
        """As MetadataStore.release_many, of one."""
        check_namespace(releasing.namespace)
        self._run(self._release, release_call(releasing), lambda _, reply: answer(_released(reply)))

    def _run(self, script: Script, call: Call, heard: Heard) -> None:
        """`heard` gets the lane and the answer, or a StoreError."""
        name = call[0][0].encode()  # all keys of a call lie on one server

        def answered(lane: Lane | None, reply: Any) -> None:
            if isinstance(reply, Refusal) and reply.code == "NOSCRIPT":
                # Once after each start of a server.
                self._mirror.send(name, script.by_text(call), answered)
                return
            found = translated(reply)
            if lane is not None and isinstance(found, StoreRefused):
                self._mirror.refused(lane, reply)
            heard(lane, found)

        self._mirror.send(name, script.by_digest(call), answered)


def _released(answer: Any) -> bool | StoreError:
    if isinstance(answer, StoreCorrupt) and answer.wrong_type:
        return False  # what stands there is somebody else's
    return answer if isinstance(answer, StoreError) else bool(answer == 1)
