"""Reasons of misses and of withdrawn copies: one value each, the same text on the wire."""

from enum import StrEnum
from typing import Any

import pytest

from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.client.pending import PendingPrefetches
from lookup_buffer.errors import MissReason
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.fields import Fallback
from lookup_buffer.protocol.framing import pack, unpack
from lookup_buffer.protocol.messages import ClaimOutcome
from store import GoneReason


@pytest.mark.parametrize("kind", [MissReason, Fallback, GoneReason, ClaimOutcome])
def test_a_reason_is_its_text_on_the_wire(kind: type[StrEnum]) -> None:
    for reason in kind:
        assert pack(reason) == pack(reason.value)
        assert type(unpack(pack(reason))) is str
        assert f"{reason}" == str(reason) == reason.value


class ClientSession:
    """In place of a client's: keeps what is sent to the node."""

    namespace = "0" * 64

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def post(self, request: Any) -> None:
        self.sent.append(request)


@pytest.mark.parametrize(
    ("received", "known"),
    [("absent", MissReason.ABSENT), ("of_a_later_version", MissReason.OTHER)],
)
def test_a_reason_of_another_version_settles_a_handle(received: str, known: MissReason) -> None:
    session = ClientSession()
    prefetches = PendingPrefetches(session, None)  # type: ignore[arg-type]
    (handle,) = prefetches.start([TensorKey("k")], 0.0)
    entry = {"state": "missing", "reason": received}
    prefetches.on_event({"id": session.sent[0].id, "entries": [[0, entry]]})
    assert (handle.state, handle.reason) == (PrefetchState.MISSING, known)
