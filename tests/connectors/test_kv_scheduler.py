"""The KV connector's scheduler side: what it promises, holds and gives back. No engine, no node."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from connector_standins import LedgerBuffer, LedgerHandle, Stored
from connectors.identifiers import Adapters
from connectors.kv.chunks import ChunkChain
from connectors.kv.engine import KvSettings, KvShape
from connectors.kv.metadata import KvStepMetadata, KvWorkerReport
from connectors.kv.scheduler import KvScheduler
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.key import TensorKey

BLOCK, CHUNK = 4, 8
CHUNK_BYTES = 1000


class Request:
    """A stand-in for vLLM's, with what the scheduler side reads."""

    def __init__(self, name: str, length: int, seed: int = 0) -> None:
        self.request_id = name
        self.all_token_ids = [seed * 1000 + place for place in range(length)]
        self.num_prompt_tokens = length
        self.num_computed_tokens = 0
        self.mm_features: list[Any] = []
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params: Any = None


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """The scheduler side as vLLM drives it; block numbers are made up, and never twice the same."""

    def __init__(
        self,
        *,
        ranks: int = 1,
        role: str = "both",
        client_over: Callable[[LedgerBuffer], Any] = lambda buffer: buffer,
        clock: Callable[[], float] | None = None,
        buffer: LedgerBuffer | None = None,
        **settings: Any,
    ) -> None:
        """`clock`: the real one for a real buffer; else `self.clock`, which stands still."""
        self.buffer = buffer or LedgerBuffer()
        self.clock = Clock()
        self._block = 0
        shape = KvShape(
            is_producer=role != "consumer",
            is_consumer=role != "producer",
            block_size=BLOCK,
            chunk_tokens=CHUNK,
            chunk_bytes=CHUNK_BYTES,
            ranks=ranks,
            stores_generated=True,
        )
        self.side = KvScheduler(
            client_over(self.buffer),
            KvSettings(**settings),
            shape,
            clock=clock or self.clock,
        )

    def know(self, request: Request, chunks: Iterable[int], **stored: Any) -> None:
        """The fleet holds these chunks of a request's prompt."""
        names = ChunkChain(request, CHUNK, Adapters()).grow(request.all_token_ids, 100)
        for index in chunks:
            self.buffer.stored[names[index]] = Stored(**stored)

    def blocks(self, tokens: int) -> list[int]:
        count = -(-tokens // BLOCK)
        self._block += count
        return list(range(self._block - count, self._block))

    def allocate(self, request: Request, external: int, tokens: int) -> list[int]:
        blocks = self.blocks(tokens)
        self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), external)
        return blocks

    def start(self, request: Request, blocks: list[int], scheduled: int) -> KvStepMetadata:
        new = SimpleNamespace(
            req_id=request.request_id,
            block_ids=(blocks,),
            num_computed_tokens=request.num_computed_tokens,
        )
        return self.step({request: scheduled}, new=[new])

    def step(
        self, scheduled: dict[Request, int], *, new: Sequence[Any] = (), **cached: Any
    ) -> KvStepMetadata:
        fields: dict[str, Any] = {"req_ids": [], "resumed_req_ids": set(), "new_block_ids": []}
        output = SimpleNamespace(
            scheduled_new_reqs=list(new),
            scheduled_cached_reqs=SimpleNamespace(**{**fields, **cached}),
            num_scheduled_tokens={r.request_id: count for r, count in scheduled.items()},
        )
        metadata = self.side.build_metadata(output)
        for request, count in scheduled.items():
            request.num_computed_tokens += count
        return metadata


def test_the_chunks_of_a_prefix_on_this_host_are_promised_and_loaded() -> None:
    engine, request = Engine(), Request("r", 40)
    engine.know(request, [0, 1, 3])
    assert engine.side.matched(request, 0) == (2 * CHUNK, True)
    assert len(engine.buffer.pinned) == 2, "what comes after a gap is let go of"
    assert engine.side.matched(request, 0) == (2 * CHUNK, True), "vLLM asks again"
    assert len(engine.buffer.calls) == 1

    blocks = engine.allocate(request, 2 * CHUNK, 2 * CHUNK)
    metadata = engine.step({})
    (load,) = metadata.loads
    assert [chunk.blocks for chunk in load.chunks] == [tuple(blocks[:2]), tuple(blocks[2:])]
    assert [chunk.first for chunk in load.chunks] == [0, 0]
    assert metadata.written == blocks
    assert len(engine.buffer.pinned) == 2, "held until it has loaded"
    engine.side.process_report(None, {"r"})
    assert not engine.buffer.pinned


def test_the_last_token_is_always_computed() -> None:
    engine, request = Engine(), Request("r", 2 * CHUNK)
    engine.know(request, [0, 1])
    assert engine.side.matched(request, 0) == (CHUNK, True)


def test_of_a_chunk_that_vllm_has_in_part_the_rest_is_loaded() -> None:
    engine, request = Engine(), Request("r", 40)
    engine.know(request, [0, 1, 2])
    own = CHUNK + BLOCK
    assert engine.side.matched(request, own) == (3 * CHUNK - own, True)
    blocks = engine.allocate(request, 3 * CHUNK - own, 3 * CHUNK)
    (load,) = engine.step({}).loads
    assert [(chunk.first, chunk.blocks) for chunk in load.chunks] == [
        (1, (blocks[3],)),
        (0, tuple(blocks[4:6])),
    ]


def test_blocks_that_another_connector_loads_into_are_written_too() -> None:
    """A MultiConnector gives each connector all blocks, and 0 tokens if it loads none."""
    engine, request = Engine(), Request("r", 40)
    engine.side.matched(request, CHUNK)
    blocks = engine.allocate(request, 0, 40)
    assert engine.step({}).written == blocks[CHUNK // BLOCK :]
    request.num_computed_tokens = 4 * CHUNK
    assert engine.start(request, blocks, CHUNK).written == blocks[4 * CHUNK // BLOCK :]


def test_blocks_that_vllm_evicted_during_a_wait_are_loaded_too() -> None:
    """A request that waits holds no blocks: its prefix may leave vLLM's own cache meanwhile."""
    engine, request = Engine(), Request("r", 40)
    engine.know(request, [0, 1, 2])
    assert engine.side.matched(request, 2 * CHUNK) == (CHUNK, True), "and then there is no room"
    assert engine.side.matched(request, 0) == (3 * CHUNK, True)
    blocks = engine.allocate(request, 3 * CHUNK, 3 * CHUNK)
    (load,) = engine.step({}).loads
    assert [block for chunk in load.chunks for block in chunk.blocks] == blocks
    assert len(engine.buffer.pinned) == 3, "what was held before was let go of"


def test_a_repeated_look_up_does_not_extend_the_wait() -> None:
    engine, request = Engine(fetch_wait_seconds=2.0), Request("r", 40)
    engine.know(request, range(3), needs_fetch=True)
    assert engine.side.matched(request, 2 * CHUNK) == (None, False)
    engine.clock.now += 1.9
    assert engine.side.matched(request, 0) == (None, False)
    engine.clock.now += 0.2
    assert engine.side.matched(request, 0) == (0, False)


def test_no_chunk_on_this_host() -> None:
    engine, request = Engine(), Request("r", 40)
    assert engine.side.matched(request, 0) == (0, False)
    engine.allocate(request, 0, 40)
    assert engine.side.counters.totals() == {"miss:absent": 1}


def test_a_prompt_shorter_than_a_chunk_makes_no_look_up() -> None:
    engine = Engine()
    assert engine.side.matched(Request("r", CHUNK), 0) == (0, False)
    assert not engine.buffer.calls


def test_the_wait_for_a_fetch_is_bounded() -> None:
    engine, request = Engine(fetch_wait_seconds=2.0), Request("r", 40)
    engine.know(request, [0])
    engine.know(request, [1], needs_fetch=True)
    assert engine.side.matched(request, 0) == (None, False)
    engine.clock.now += 1.9
    assert engine.side.matched(request, 0) == (None, False)
    engine.clock.now += 0.2
    assert engine.side.matched(request, 0) == (CHUNK, True), "what is here by then"
    engine.buffer.settle(0, PrefetchState.RESIDENT)
    assert len(engine.buffer.pinned) == 1
    assert "miss:timeout" in engine.side.counters.totals()


def test_a_chunk_counts_when_every_rank_has_its_part() -> None:
    engine, request = Engine(ranks=2), Request("r", 40)
    engine.know(request, [0, 1])
    assert engine.side.matched(request, 0) == (2 * CHUNK, True)
    assert len(engine.buffer.pinned) == 4
    engine.allocate(request, 2 * CHUNK, 2 * CHUNK)
    (load,) = engine.step({}).loads
    assert all(len(chunk.orders) == 2 for chunk in load.chunks)


def test_pins_stay_within_the_budget() -> None:
    engine = Engine(prefetch_bytes=3 * CHUNK_BYTES, fetch_wait_seconds=2.0)
    one, two = Request("1", 60, seed=1), Request("2", 60, seed=2)
    for request in (one, two):
        engine.know(request, range(7))
    assert engine.side.matched(one, 0) == (3 * CHUNK, True)
    assert engine.side.matched(two, 0) == (None, False), "it waits for room"
    engine.clock.now += 2.1
    assert engine.side.matched(two, 0) == (0, False), "and then goes on"
    engine.side.finished(one)
    assert not engine.buffer.pinned
    engine.side.finished(two)
    three = Request("3", 60, seed=1)
    assert engine.side.matched(three, 0) == (3 * CHUNK, True)


def test_an_aborted_request_keeps_its_pins_until_the_load_ends() -> None:
    engine, request = Engine(), Request("r", 40)
    engine.know(request, [0])
    engine.side.matched(request, 0)
    engine.allocate(request, CHUNK, CHUNK)
    engine.step({})
    engine.side.finished(request)
    assert engine.buffer.pinned
    engine.side.process_report(None, {"r"})
    assert not engine.buffer.pinned


def test_a_request_that_ends_before_it_is_scheduled_releases_its_pins() -> None:
    engine, request = Engine(), Request("r", 40)
    engine.know(request, range(4))
    engine.side.matched(request, 0)
    engine.side.finished(request)
    assert not engine.buffer.pinned
    engine.side.close()
    assert engine.buffer.is_closed


def test_after_a_load_that_failed_nothing_is_promised_again() -> None:
    engine, request = Engine(), Request("r", 40)
    engine.know(request, range(4))
    engine.side.matched(request, 0)
    engine.allocate(request, 4 * CHUNK, 4 * CHUNK)
    engine.step({})
    engine.side.process_report(KvWorkerReport({"load_failed:lost": 1}, {"r"}), {"r"})
    assert engine.side.matched(request, 0) == (0, False)
    assert not engine.buffer.pinned


def test_after_a_preemption_the_look_up_is_repeated() -> None:
    engine, request = Engine(), Request("r", 40)
    engine.know(request, [0])
    engine.side.matched(request, 0)
    blocks = engine.allocate(request, CHUNK, 40)
    engine.step({})
    engine.side.process_report(None, {"r"})
    request.num_computed_tokens = CHUNK
    assert len(engine.start(request, blocks, 32).saves) == 4
    engine.know(request, range(4))  # stored meanwhile
    request.num_computed_tokens = 0
    assert engine.side.matched(request, 0) == (4 * CHUNK, True)


def test_chunks_are_stored_by_the_step_that_completes_them() -> None:
    engine, request = Engine(), Request("r", 3 * CHUNK + 2)
    engine.side.matched(request, 0)
    blocks = engine.allocate(request, 0, len(request.all_token_ids))
    metadata = engine.start(request, blocks[:5], CHUNK + 2)
    assert [save.blocks for save in metadata.saves] == [tuple(blocks[:2])]
    assert metadata.written == blocks[:5]
    more: dict[str, Any] = {"req_ids": ["r"], "new_block_ids": [(blocks[5:],)]}
    metadata = engine.step({request: 2 * CHUNK}, **more)
    assert [save.blocks for save in metadata.saves] == [tuple(blocks[2:4]), tuple(blocks[4:6])]
    assert metadata.written == blocks[5:]
    for token in range(CHUNK):  # generated ones, each known after its step
        metadata = engine.step({request: 1}, req_ids=["r"], new_block_ids=[None])
        assert not metadata.saves or token == CHUNK - 2
        request.all_token_ids.append(token)


def test_a_chunk_with_an_unknown_token_has_no_name() -> None:
    """vLLM may plan a step before it knows what the one before gave."""
    engine, request = Engine(), Request("r", CHUNK - 2)
    engine.side.matched(request, 0)
    blocks = engine.allocate(request, 0, 2 * CHUNK)
    engine.start(request, blocks, CHUNK - 2)
    cached: dict[str, Any] = {"req_ids": ["r"], "new_block_ids": [None]}
    assert not engine.step({request: 1}, **cached).saves
    assert not engine.step({request: 1}, **cached).saves, "all computed, none known"
    request.all_token_ids += [7, 7]
    (save,) = engine.step({request: 1}, **cached).saves
    assert save.name == ChunkChain(request, CHUNK, Adapters()).grow(request.all_token_ids, 1)[0]


def test_a_consumer_stores_nothing_and_a_producer_loads_nothing() -> None:
    for role in ("consumer", "producer"):
        engine, request = Engine(role=role), Request("r", 40)
        engine.know(request, [0])
        promised = engine.side.matched(request, 0)
        assert promised == ((CHUNK, True) if role == "consumer" else (0, False))
        external, _ = promised
        blocks = engine.allocate(request, external or 0, 40)
        request.num_computed_tokens = external or 0
        saves = engine.start(request, blocks, 40 - request.num_computed_tokens).saves
        assert len(saves) == (0 if role == "consumer" else 5)


def test_a_prompt_that_wants_its_own_log_probabilities_loads_nothing() -> None:
    engine, request = Engine(), Request("r", 40)
    engine.know(request, range(4))
    request.skip_reading_prefix_cache = True
    assert engine.side.matched(request, 0) == (0, False)


def test_what_was_pinned_in_a_session_that_was_lost_is_looked_up_again() -> None:
    engine, request = Engine(), Request("r", 40)
    engine.know(request, [0, 1])
    assert engine.side.matched(request, 0) == (2 * CHUNK, True)
    engine.buffer.lose_session()
    assert engine.side.matched(request, 0) == (2 * CHUNK, True)
    (load,) = start_load(engine, request, 2 * CHUNK).loads
    assert all(order.ticket in engine.buffer.pinned for c in load.chunks for order in c.orders)
    engine.buffer.lose_session()
    engine.buffer.stored.clear()
    other = Request("other", 40)
    assert engine.side.matched(other, 0) == (0, False)


def start_load(engine: Engine, request: Request, tokens: int) -> KvStepMetadata:
    engine.allocate(request, tokens, tokens)
    return engine.step({})


def test_the_pins_of_a_request_are_released_in_one_message() -> None:
    released = []

    class Buffer(LedgerBuffer):
        def release(self, *handles: Any) -> None:
            released.append(len(handles))
            super().release(*handles)

    engine, request = Engine(ranks=2, buffer=Buffer()), Request("r", 40)
    engine.know(request, range(4))
    assert engine.side.matched(request, 0) == (4 * CHUNK, True)
    engine.side.finished(request)
    assert released == [8]
    assert not engine.buffer.pinned


def test_a_request_that_gets_no_room_looks_again() -> None:
    """What another engine stores, or what arrives after the wait, need not be computed."""
    engine, request = Engine(fetch_wait_seconds=2.0), Request("r", 40)
    engine.know(request, [0])
    engine.know(request, [1, 2], needs_fetch=True)
    while engine.side.matched(request, 0) == (None, False):
        engine.clock.now += 0.1
    assert engine.side.matched(request, 0) == (CHUNK, True)
    calls = len(engine.buffer.calls)
    engine.know(request, [1, 2])
    engine.clock.now += 0.9
    assert engine.side.matched(request, 0) == (CHUNK, True)
    assert len(engine.buffer.calls) == calls, "not at once"
    engine.clock.now += 0.2
    assert engine.side.matched(request, 0) == (3 * CHUNK, True)
    for _ in range(100):
        engine.clock.now += 0.1
        assert engine.side.matched(request, 0) == (3 * CHUNK, True)
    assert len(engine.buffer.calls) <= calls + 11, "once a second"
    assert len(engine.buffer.pinned) == 3
    misses = {name: n for name, n in engine.side.counters.totals().items() if "miss" in name}
    assert misses == {"miss:timeout": 1}
    engine.side.finished(request)
    assert not engine.buffer.pinned


def test_a_chunk_larger_than_the_budget_costs_no_wait() -> None:
    engine, request = Engine(prefetch_bytes=CHUNK_BYTES - 1), Request("r", 40)
    engine.know(request, range(4))
    assert engine.side.matched(request, 0) == (0, False)
    assert engine.side.counters.totals() == {"over_budget": 1}


def test_what_was_pinned_before_the_weights_changed_is_not_loaded() -> None:
    class Buffer(LedgerBuffer):
        def prefetch(self, keys: Sequence[TensorKey], **seconds: Any) -> list[LedgerHandle]:
            if self.namespace:
                return super().prefetch(keys, **seconds)
            failed = PrefetchState.FAILED
            return [LedgerHandle(key, failed, "weights_changed") for key in keys]

    engine, request = Engine(buffer=Buffer()), Request("r", 40)
    engine.know(request, [0, 1])
    assert engine.side.matched(request, 0) == (2 * CHUNK, True)
    engine.buffer.namespace = ""
    assert engine.side.matched(request, 0) == (0, False)
    assert not engine.buffer.pinned
    assert engine.side.counters.totals()["miss:weights_changed"] == 1
