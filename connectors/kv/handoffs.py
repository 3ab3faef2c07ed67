"""Hand-off of one request's KV from a prefill engine to a decode engine.

The engine that computes the prompt hands all of its KV to one other engine, under a transfer id. A
router copies it from one engine's answer to the other's request, in `kv_transfer_params`:

    to the producer      {"do_remote_decode": true}, and "transfer_id" where the router has one
    from the producer    {"do_remote_prefill": true, "transfer_id": ...}
    to the consumer      what the producer returned

The pieces are ordinary chunks, and the blocks of the rest of the prompt. Their names depend on the
prompt's tokens, so an id that is used with another prompt matches nothing. Runs in the scheduler's
thread, and calls only the buffer's `has_caches`.
"""

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from connectors.counters import Counters
from connectors.kv.chunks import key_of
from connectors.kv.metadata import ChunkLoad, ChunkSave, RequestLoad
from lookup_buffer.errors import InvalidKey
from lookup_buffer.key import TensorKey
from lookup_buffer.times import NODE_SHARE

if TYPE_CHECKING:
    from connectors.kv.chunks import ChunkChain
    from connectors.kv.engine import KvShape
    from connectors.kv.requests import KvRequest
    from lookup_buffer.client.buffer import LookupBuffer

ID_CHARACTERS_MAX: Final = 256
CHECK_SECONDS: Final = 1e-3
CHECK_SECONDS_MAX: Final = 64e-3
"""How long one check for the end of a hand-off may block: at first, and twice as long after each
that a busy node or a far store did not answer in time."""
CHECKS_APART: Final = 5
"""Between two checks of a request is so many times what one may take."""


class Handoffs:
    """The scheduler side of requests whose KV comes from or goes to another engine."""

    def __init__(
        self,
        buffer: "LookupBuffer",
        wait_seconds: float,
        shape: "KvShape",
        *,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._buffer = buffer
        self._wait_seconds = wait_seconds
        self._shape = shape
        self._counters = counters
        self._clock = clock
        self._check_seconds = CHECK_SECONDS

    def incoming_tokens(self, state: "KvRequest", computed: int) -> int | None:
        """How many tokens beyond the first `computed` the hand-off delivers.

        0: not known yet, call again. None: the request proceeds without the hand-off, because
        nothing is left to load or `handoff_wait_seconds` have passed.
        """
        assert state.chain is not None
        left = int(state.request.num_prompt_tokens) - computed
        now = self._clock()
        if not state.deadline:
            state.deadline = now + self._wait_seconds
        if left > 0 and not state.has_arrived and now >= state.next_check:
            # The producer stores the last piece last: if it is there, all are.
            last = piece_names(state.chain, state.request)[-1]
            keys = [key_of(last, rank, state.incoming) for rank in range(self._shape.ranks)]
            state.has_arrived = self._has(keys)
            state.next_check = self._clock() + CHECKS_APART * self._check_seconds
        if left > 0 and state.has_arrived:
            return left
        if left > 0 and now < state.deadline:
            return 0
        self._counters.add("miss:not_handed_over")
        state.incoming, state.deadline = "", 0.0
        return None

    def _has(self, keys: list[TensorKey]) -> bool:
        """Whether the buffer has all of them, as far as it says so in time."""
        bound, started = self._check_seconds, self._clock()
        found = all(self._buffer.has_caches(keys, timeout=bound))
        took = self._clock() - started
        longer = 2 * bound if took >= NODE_SHARE * bound else 2 * took
        self._check_seconds = min(max(longer, CHECK_SECONDS), CHECK_SECONDS_MAX)
        return found

    def load(self, state: "KvRequest") -> RequestLoad:
        """The load of a hand-off, after vLLM has allocated blocks. It takes every piece out of the
        buffer, also those whose blocks vLLM has already."""
        assert state.chain is not None
        transfer, state.incoming, state.deadline = state.incoming, "", 0.0
        known = state.computed // self._shape.block_size
        chunks = []
        for name, begin, stop in self._spans(state):
            blocks = tuple(state.blocks[max(begin, known) : stop])
            chunks.append(ChunkLoad(name, blocks, max(known - begin, 0), transfer=transfer))
        self._counters.add("handoff_received")
        return RequestLoad(state.request.request_id, tuple(chunks))

    def saves(self, state: "KvRequest") -> list[ChunkSave]:
        """The saves of a hand-off, for the step that completes the prompt; the last piece is last.
        Empty if they were returned before."""
        if state.is_sent:
            return []
        state.is_sent = True
        self._counters.add("handoff_sent")
        return [
            ChunkSave(name, tuple(state.blocks[begin:stop]), state.outgoing)
            for name, begin, stop in self._spans(state)
        ]

    def _spans(self, state: "KvRequest") -> list[tuple[str, int, int]]:
        """For each piece: its name, and its range of the request's blocks."""
        assert state.chain is not None
        block = self._shape.block_size
        per_chunk = self._shape.chunk_tokens // block
        end = -(-state.request.num_prompt_tokens // block)
        return [
            (name, index * per_chunk, min((index + 1) * per_chunk, end))
            for index, name in enumerate(piece_names(state.chain, state.request))
        ]


def outgoing_id(request: Any) -> str:
    """The id under which this engine hands over the request's KV; empty without a hand-off."""
    params = _params(request)
    if not params.get("do_remote_decode"):
        return ""
    return _transfer_id(params) or uuid.uuid4().hex


def incoming_id(request: Any) -> str:
    """The id under which another engine handed over the request's KV; empty without a hand-off."""
    params = _params(request)
    return _transfer_id(params) if params.get("do_remote_prefill") else ""


def transfer_params(transfer: str) -> dict[str, Any]:
    """The `kv_transfer_params` of the producer's answer, which the router passes to the
    consumer."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer}


def piece_names(chain: "ChunkChain", request: Any) -> list[str]:
    """The names of the prompt's whole chunks, and of the rest after them."""
    tokens = request.all_token_ids[: request.num_prompt_tokens]
    return [*chain.grow(tokens, len(tokens)), chain.rest(tokens)]


def _params(request: Any) -> Mapping[str, Any]:
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, Mapping) else {}


def _transfer_id(params: Mapping[str, Any]) -> str:
    """The id in `params`; empty if it is not valid. A client's input raises nothing."""
    given = params.get("transfer_id")
    if not isinstance(given, str) or not 0 < len(given) <= ID_CHARACTERS_MAX:
        return ""
    try:
        TensorKey("piece", request_id=given)
    except InvalidKey:
        return ""
    return given
