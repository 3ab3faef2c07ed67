"""Hand-off of one request's KV from a prefill engine to a decode engine.

The engine that computes the prompt hands all of its KV to one other engine, under a transfer id. A
router copies it from one engine's answer to the other's request, in `kv_transfer_params`:

    to the producer      {"do_remote_decode": true}, and "transfer_id" where the router has one
    from the producer    {"do_remote_prefill": true, "transfer_id": ...}
    to the consumer      what the producer returned

The pieces are ordinary chunks, and the blocks of the rest of the prompt. Their names contain the
prompt's tokens, so an id that is used with another prompt finds nothing. Runs in the scheduler's
thread. Its only calls outwards are the buffer's `has_caches`.
"""

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from connectors.counters import Counters
from connectors.kv.chunks import key_of
from connectors.kv.metadata import ChunkLoad, ChunkSave, RequestLoad
from lookup_buffer.errors import InvalidKey
from lookup_buffer.key import TensorKey

if TYPE_CHECKING:
    from connectors.kv.chunks import ChunkChain
    from connectors.kv.engine import KvShape
    from connectors.kv.scheduler import KvRequest
    from lookup_buffer.client.buffer import LookupBuffer

ID_CHARACTERS_MAX: Final = 256
ASK_SECONDS: Final = 1e-3
ASK_AGAIN_SECONDS: Final = 5e-3


def handed_out(request: Any) -> str:
    """The id under which this engine has to hand over the request's KV; empty without a
    hand-off."""
    params = _params(request)
    if not params.get("do_remote_decode"):
        return ""
    return _transfer_id(params) or uuid.uuid4().hex


def taken_over(request: Any) -> str:
    """The id under which another engine handed over the request's KV; empty without a hand-off."""
    params = _params(request)
    return _transfer_id(params) if params.get("do_remote_prefill") else ""


def reply(transfer: str) -> dict[str, Any]:
    """The `kv_transfer_params` of the producer's answer, which the router passes to the
    consumer."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer}


def pieces(chain: "ChunkChain", request: Any) -> list[str]:
    """The names of the prompt's whole chunks, and of the rest behind them."""
    tokens = request.all_token_ids[: request.num_prompt_tokens]
    return [*chain.grow(tokens, len(tokens)), chain.rest(tokens)]


def _params(request: Any) -> Mapping[str, Any]:
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, Mapping) else {}


def _transfer_id(params: Mapping[str, Any]) -> str:
    """The id in `params`; empty where it is no valid id. No input of a client fails the engine."""
    given = params.get("transfer_id")
    if not isinstance(given, str) or not 0 < len(given) <= ID_CHARACTERS_MAX:
        return ""
    try:
        TensorKey("piece", request_id=given)
    except InvalidKey:
        return ""
    return given


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

    def awaited(self, state: "KvRequest", computed: int) -> int | None:
        """How many tokens beyond `computed` were handed over.

        0 means: not yet, ask again. None means: the request goes on without them, because nothing
        is left to load or the wait of `handoff_wait_seconds` has ended.
        """
        assert state.chain is not None
        left = int(state.request.num_prompt_tokens) - computed
        now = self._clock()
        if not state.deadline:
            state.deadline = now + self._wait_seconds
        if left > 0 and not state.is_taken_over and now >= state.ask_next:
            # The producer stores the last piece last: when it is there, all are.
            last = pieces(state.chain, state.request)[-1]
            keys = [key_of(last, rank, state.taken_over) for rank in range(self._shape.ranks)]
            state.is_taken_over = all(self._buffer.has_caches(keys, timeout=ASK_SECONDS))
            state.ask_next = self._clock() + ASK_AGAIN_SECONDS
        if left > 0 and state.is_taken_over:
            return left
        if left > 0 and now < state.deadline:
            return 0
        self._counters.add("miss:not_handed_over")
        state.taken_over, state.deadline = "", 0.0
        return None

    def take_over(self, state: "KvRequest") -> RequestLoad:
        """The load of a hand-off, once vLLM has allocated blocks. It takes every piece out of the
        buffer, also those that vLLM has already."""
        assert state.chain is not None
        transfer, state.taken_over, state.deadline = state.taken_over, "", 0.0
        known = state.computed // self._shape.block_size
        chunks = []
        for name, begin, stop in self._spans(state):
            blocks = tuple(state.blocks[max(begin, known) : stop])
            chunks.append(ChunkLoad(name, blocks, max(known - begin, 0), transfer=transfer))
        self._counters.add("taken_over")
        return RequestLoad(state.request.request_id, tuple(chunks))

    def hand_out(self, state: "KvRequest") -> list[ChunkSave]:
        """The saves of a hand-off, for the step that completes the prompt; the last piece is last.
        Empty where they were returned before."""
        if state.is_handed_out:
            return []
        state.is_handed_out = True
        self._counters.add("handed_out")
        return [
            ChunkSave(name, tuple(state.blocks[begin:stop]), state.handed_out)
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
            for index, name in enumerate(pieces(state.chain, state.request))
        ]
