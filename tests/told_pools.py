"""Pools that are stand-ins: they say to their nodes what a test has them say."""

import queue
from collections.abc import Callable
from typing import Any

import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.session import next_request_id
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.messages import Offer, OpenPool, Received, Request, SeenPool

FINGERPRINT = Namespace.named("tests").fingerprint
POOL, LIBRARY, PORT, MARK = "ab" * 6, "cd" * 4, 4321, 17
NBYTES = 100_000
POOL_BYTES = 10 * NBYTES


class Told:
    """A pool that keeps what it is told, and says nothing by itself but what it is.

    What it hears of other pools comes with their nodes' beats, in between, and is apart."""

    def __init__(
        self,
        client: LookupBuffer,
        *,
        name: str = POOL,
        pool_bytes: int = POOL_BYTES,
        receives: bool = True,
        offers: bool = True,
    ) -> None:
        self.name, self.opening = name, (pool_bytes, receives, offers)
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.sees: dict[str, SeenPool] = {}
        """The pools of others that are there, as it was told."""
        self.lost_sight: list[str] = []
        self.say: Callable[[Request], None] = lambda _request: None
        client.join_lane(self)

    def attached(self, to_node: Callable[[Request], None]) -> None:
        self.say = to_node
        to_node(OpenPool(next_request_id(), "nccl", LIBRARY, PORT, self.name, *self.opening))

    def lost(self) -> None:
        pass

    def on_event(self, message: dict[str, Any]) -> None:
        if message["event"] != "pools":
            self.events.put(message)
            return
        self.sees |= {at.pool: at for at in (SeenPool(*fields) for fields in message["there"])}
        for pool in message["gone"]:
            del self.sees[pool]
            self.lost_sight.append(pool)

    def tensor(self, ticket: int) -> torch.Tensor:
        raise AssertionError("nobody loads here")

    def hears(self, event: str) -> dict[str, Any]:
        message = self.events.get(timeout=10.0)
        assert message["event"] == event, message
        return message

    def offers(self, one: TensorKey, checksum: int) -> None:
        self.say(Offer(next_request_id(), FINGERPRINT, one.text, MARK, checksum))

    def answers(self, ticket: int, reason: str = "", source: int = 1) -> None:
        self.say(Received(next_request_id(), ticket, reason, source))
