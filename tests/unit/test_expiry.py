"""Items that expire together are removed in many turns of the loop."""

from contextlib import closing
from typing import Any

import pytest

from lookup_buffer.node import arena as arena_module
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.expiry import Expiry
from lookup_buffer.protocol.header import TensorHeader
from virtual_loop import VirtualLoop

NAMESPACE = "f" * 64


def test_others_have_their_turn_while_many_items_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "EXPIRED_PAGE", 10)
    loop, left = VirtualLoop(), [100]
    parts: Any = loop
    arena = Arena(1 << 20, lambda _address, _reason: None, loop.time)
    expiry = Expiry(parts, arena)

    def turn() -> None:
        left.append(arena.gauges().items)
        if left[-1]:
            loop.call_soon(turn)

    with closing(arena):
        for n in range(100):
            header, address = TensorHeader.of_none(), (NAMESPACE, str(n))
            item = arena.reserve(address, header, origin="local", ttl_seconds=60.0)
            assert item is not None
            arena.release([arena.commit(item, 0, 1).ticket], 1)
        loop.now = 60.0
        loop.call_soon(turn)
        for _ in range(3):  # one beat after the other
            expiry.begin()
        loop.run(0.0)
    assert left == [100, *range(90, -1, -10)]
