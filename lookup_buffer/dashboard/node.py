"""The node whose dashboard this is, asked over its unix socket.

Each question has a connection of its own and needs no session, so it counts as no client. A node
whose loop stands still accepts nothing and is silent: that is how it is noticed.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookup_buffer.errors import LookupBufferError
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.protocol.messages import Metrics
from lookup_buffer.times import STALL_SECONDS

READ_BYTES = 64 << 10


class NodeSilent(Exception):
    """The node does not answer; the text is for people."""


@dataclass(frozen=True, slots=True)
class NodeState:
    values: Mapping[str, int]
    """Gauges and counters by name."""
    histograms: Mapping[str, tuple[list[int], float]]
    """Cumulative counts by bound, and the sum in seconds."""
    unhealthy: str
    """Why the node is unhealthy; "" if it is healthy."""


class NodeView:
    """Used on one loop."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._question: asyncio.Task[NodeState] | None = None
        self._answered_at = -math.inf

    async def state(self, age_seconds_max: float = 0.0) -> NodeState:
        """The answer to the question in flight, or one of at most this age; all who ask at the same
        time share it.

        Raises:
            NodeSilent: no answer within STALL_SECONDS.
        """
        loop, question = asyncio.get_running_loop(), self._question
        if question is None or (
            question.done() and loop.time() - self._answered_at > age_seconds_max
        ):
            question = self._question = loop.create_task(self._ask_for_state())
            question.add_done_callback(self._note_answer)
        return await asyncio.shield(question)

    def _note_answer(self, question: "asyncio.Task[NodeState]") -> None:
        self._answered_at = question.get_loop().time()
        if not question.cancelled():
            question.exception()  # nobody may wait for it any more

    async def _ask_for_state(self) -> NodeState:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                answer = await self._ask(Metrics(1))
            return NodeState(answer["values"], answer["histograms"], answer["unhealthy"])
        except (OSError, TimeoutError, LookupBufferError, KeyError) as error:
            raise NodeSilent("the node does not answer its clients") from error

    async def _ask(self, request: Metrics) -> Mapping[str, Any]:
        reader, writer = await asyncio.open_unix_connection(str(self._socket_path))
        try:
            writer.write(encode_frame(request.to_wire()))
            decoder = FrameDecoder()
            while data := await reader.read(READ_BYTES):
                for frame in decoder.feed(data):
                    header: Mapping[str, Any] = frame.header
                    return header
            raise ConnectionError("the node closed the connection")
        finally:
            writer.close()
