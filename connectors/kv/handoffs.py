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
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
"""How long one check for the end of hand-offs may block: at first, and twice as long after each
that a busy node or a far store did not answer in time."""
CHECKS_APART: Final = 5
"""Between two checks, each for all requests that wait, is so many times what one may take."""
LOADED_MAX: Final = 1024
"""So many transfers are remembered whose load has ended. A request for one does not wait for it."""


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
        self._next_check = 0.0
        self._awaited: dict[KvRequest, list[TensorKey]] = {}
        """The keys of the last pieces, by the request that waits for them."""
        self._takers: dict[str, KvRequest] = {}
        """By transfer id: the request that loads it. Others wait for what becomes of it."""
        self._loading: dict[str, str] = {}
        """The transfer ids of the loads that have begun, by request id."""
        self._loaded: OrderedDict[str, None] = OrderedDict()

    def incoming_tokens(self, state: "KvRequest", computed: int) -> int | None:
        """How many tokens beyond the first `computed` the hand-off delivers.

        0: not known yet, call again. None: the request proceeds without the hand-off, because
        nothing is left to load, another request has taken it, or `handoff_wait_seconds` have
        passed.
        """
        left = int(state.request.num_prompt_tokens) - computed
        if left > 0:
            now = self._clock()
            if not state.deadline:
                state.deadline = now + self._wait_seconds
            if self._takers.get(state.incoming, state) is state:
                self._await(state)
                if state.has_arrived:
                    self._takers[state.incoming] = state
                    return left
            is_taken = state.has_arrived is False and state.incoming in self._loaded
            if now < state.deadline and not is_taken:
                return 0
        self._counters.add("miss:not_handed_over")
        self.forget(state)
        state.incoming, state.deadline = "", 0.0
        return None

    def _await(self, state: "KvRequest") -> None:
        """Check what is awaited, with what `state` awaits, if it is time to."""
        if state not in self._awaited:
            assert state.chain is not None
            # The producer stores the last piece last: if it is there, all are.
            last = piece_names(state.chain, state.request)[-1]
            keys = [key_of(last, rank, state.incoming) for rank in range(self._shape.ranks)]
            self._awaited[state] = keys
        if not state.has_arrived and self._clock() >= self._next_check:
            self._check([one for one in self._awaited if not one.has_arrived])
            self._next_check = self._clock() + CHECKS_APART * self._check_seconds

    def _check(self, states: "Sequence[KvRequest]") -> None:
        keys = [key for state in states for key in self._awaited[state]]
        bound, started = self._check_seconds, self._clock()
        found = self._buffer.has_caches(keys, timeout=bound)
        took = self._clock() - started
        longer = 2 * bound if took >= NODE_SHARE * bound else 2 * took
        self._check_seconds = min(max(longer, CHECK_SECONDS), CHECK_SECONDS_MAX)
        ranks = self._shape.ranks
        for index, state in enumerate(states):
            state.has_arrived = all(found[index * ranks : (index + 1) * ranks])

    def forget(self, state: "KvRequest") -> None:
        """The request has ended, or no longer waits for its hand-off."""
        self._awaited.pop(state, None)
        if self._takers.get(state.incoming) is state:
            del self._takers[state.incoming]

    def load_ended(self, request_id: str) -> None:
        """Of whatever a request loaded. Others that wait for the same hand-off find out whether
        there is another one."""
        transfer = self._loading.pop(request_id, "")
        if not transfer:
            return
        self._takers.pop(transfer, None)
        self._loaded[transfer] = None
        if len(self._loaded) > LOADED_MAX:
            self._loaded.popitem(last=False)
        for state in self._awaited:
            if state.incoming == transfer:
                state.has_arrived = None

    def load(self, state: "KvRequest") -> RequestLoad:
        """The load of a hand-off, after vLLM has allocated blocks. It takes every piece out of the
        buffer, also those whose blocks vLLM has already."""
        assert state.chain is not None
        transfer, state.incoming, state.deadline = state.incoming, "", 0.0
        self._awaited.pop(state, None)
        self._loading[state.request.request_id] = transfer
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
