"""The KV connector's worker side with real tensors and a node: right bytes or a reported fault."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.kv import worker
from connectors.kv.chunks import key_of
from connectors.kv.engine import KvSettings
from connectors.kv.metadata import ChunkLoad, ChunkSave, KvStepMetadata, RequestLoad
from connectors.kv.worker import KvWorker, LoadResults
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.namespace import Namespace
from nodes import MIB, NodeProcess, StartNode, wait_until
from patience import scaled

LAYERS, BLOCKS, PAGE = 3, 12, (2, 4, 16)
SECONDS = 10.0


class Rank:
    """A worker and its cache, in which every block of every layer has different content."""

    def __init__(
        self,
        buffer: LookupBuffer,
        rank: int = 0,
        page: tuple[int, ...] = PAGE,
        **settings: Any,
    ) -> None:
        self.buffer = buffer
        count = LAYERS * BLOCKS * torch.Size(page).numel()
        values = torch.arange(count, dtype=torch.float32).view(LAYERS, BLOCKS, *page)
        self.layers = {f"layer.{i}": layer + 1e6 * rank for i, layer in enumerate(values)}
        self.worker = KvWorker(lambda: buffer, KvSettings(**settings), rank=rank, num_blocks=BLOCKS)
        self.worker.register(self.layers)

    def content(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.stack([layer[list(blocks)] for layer in self.layers.values()])

    def step(self, metadata: KvStepMetadata, model: Callable[[], None] | None = None) -> None:
        """As vLLM calls it."""
        self.worker.copy_out_before_writes(metadata)
        if model is not None:
            model()
        self.worker.load(metadata)
        self.worker.save(metadata)

    def save(self, *saves: ChunkSave) -> None:
        self.step(KvStepMetadata(saves=list(saves)))
        assert self.worker.saves.drain(SECONDS)

    def load(self, *chunks: ChunkLoad, request: str = "r") -> LoadResults:
        self.step(KvStepMetadata(loads=[RequestLoad(request, chunks)]))
        results = LoadResults()

        def ended() -> bool:
            fresh = self.worker.results()
            results.loaded.update(fresh.loaded)
            results.lost_blocks.update(fresh.lost_blocks)
            results.failed.update(fresh.failed)
            return request in results.loaded

        wait_until(ended, SECONDS, "the load ends")
        return results

    def chunk(self, name: str, blocks: Sequence[int], first: int = 0, ranks: int = 1) -> ChunkLoad:
        """What a scheduler side would order, pinned."""
        handles = self.buffer.prefetch([key_of(name, r) for r in range(ranks)], timeout=SECONDS)
        orders = tuple(handle.order for handle in handles if handle.order is not None)
        assert len(orders) == ranks
        return ChunkLoad(name, tuple(blocks), first, orders)


@pytest.fixture
def buffer(node_pair: tuple[NodeProcess, NodeProcess]) -> Iterator[LookupBuffer]:
    with LookupBuffer(node_pair[0].config, Namespace.named(f"kv-{time.monotonic()}")) as client:
        yield client


@pytest.fixture
def rank(buffer: LookupBuffer) -> Iterator[Rank]:
    made = Rank(buffer)
    yield made
    made.worker.close()


def test_a_stored_chunk_is_loaded_into_other_blocks_by_another_engine(rank: Rank) -> None:
    expected = rank.content((4, 1, 7))
    rank.save(ChunkSave("chunk", (4, 1, 7)))
    results = rank.load(rank.chunk("chunk", (9, 10, 2)))
    assert torch.equal(rank.content((9, 10, 2)), expected)
    assert results == LoadResults(loaded={"r"})
    assert rank.worker.counters.totals() == {"saved": 1}


def test_the_rest_of_a_chunk_leaves_other_blocks_alone(rank: Rank) -> None:
    rank.save(ChunkSave("chunk", (0, 1, 2)))
    before, expected = rank.content(range(BLOCKS)), rank.content((2,))
    rank.load(rank.chunk("chunk", (8,), first=2))
    before[:, 8] = expected[:, 0]
    assert torch.equal(rank.content(range(BLOCKS)), before)


def test_each_rank_has_its_own_part(buffer: LookupBuffer) -> None:
    ranks = [Rank(buffer, number) for number in range(2)]
    for each in ranks:
        each.save(ChunkSave("chunk", (0, 1)))
    for each in ranks:
        expected = each.content((0, 1))
        each.load(each.chunk("chunk", (5, 6), ranks=2))
        assert torch.equal(each.content((5, 6)), expected)
    for each in ranks:
        each.worker.close()


def test_blocks_that_get_other_content_are_copied_before(rank: Rank) -> None:
    """The thread that stores stands still meanwhile, as behind a large chunk."""
    gate = threading.Event()
    insert = rank.worker.saves._insert
    rank.worker.saves._insert = lambda *each: gate.wait(SECONDS) and insert(*each)
    expected = rank.content((3, 4)), rank.content((5,))
    rank.step(KvStepMetadata(saves=[ChunkSave("freed", (3, 4)), ChunkSave("kept", (5,))]))

    def model() -> None:
        for layer in rank.layers.values():
            layer[4] = -1.0

    rank.step(KvStepMetadata(written=[4]), model)
    gate.set()
    assert rank.worker.saves.drain(SECONDS)
    for name, blocks, content in (("freed", (8, 9), expected[0]), ("kept", (10,), expected[1])):
        rank.load(rank.chunk(name, blocks))
        assert torch.equal(rank.content(blocks), content)
    assert rank.worker.counters.totals()["copied_early"] == 1


def test_without_memory_for_its_copy_a_chunk_is_not_stored(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the later content of its blocks stored, and the model continues."""
    gate = threading.Event()
    insert = rank.worker.saves._insert
    rank.worker.saves._insert = lambda *each: gate.wait(SECONDS) and insert(*each)
    rank.step(KvStepMetadata(saves=[ChunkSave("freed", (3, 4))]))

    def refused(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB.")

    with monkeypatch.context() as patch:
        patch.setattr("connectors.kv.worker.gather_blocks", refused)
        rank.step(KvStepMetadata(written=[4]), lambda: None)
    gate.set()
    assert rank.worker.saves.drain(SECONDS)
    assert rank.worker.counters.totals()["save_skipped:buffer_full"] == 1
    assert rank.buffer.has_caches([key_of("freed", 0)]) == [False]


def test_a_block_of_several_chunks_is_copied_for_each(rank: Rank) -> None:
    """Prompts that begin alike share vLLM's blocks, and one may end within a chunk."""
    gate = threading.Event()
    insert = rank.worker.saves._insert
    rank.worker.saves._insert = lambda *each: gate.wait(SECONDS) and insert(*each)
    saved = {"first": (1, 2), "one": (3, 4), "other": (3, 5)}
    expected = {name: rank.content(blocks) for name, blocks in saved.items()}
    rank.step(KvStepMetadata(saves=[ChunkSave(name, blocks) for name, blocks in saved.items()]))

    def model() -> None:
        for layer in rank.layers.values():
            layer[3] = -1.0

    rank.step(KvStepMetadata(written=[3]), model)
    gate.set()
    assert rank.worker.saves.drain(SECONDS)
    for name, content in expected.items():
        rank.load(rank.chunk(name, (8, 9)))
        assert torch.equal(rank.content((8, 9)), content), name


def test_a_chunk_on_this_host_is_not_copied_again(rank: Rank) -> None:
    rank.save(ChunkSave("chunk", (0, 1)))
    rank.save(ChunkSave("chunk", (0, 1)))
    assert rank.worker.counters.totals() == {"saved": 1, "save_exists": 1}


def test_from_the_first_chunk_that_does_not_load_all_blocks_are_lost(rank: Rank) -> None:
    for name, blocks in (("one", (0, 1)), ("two", (2, 3)), ("three", (4, 5))):
        rank.save(ChunkSave(name, blocks))
    expected = rank.content((0, 1))
    chunks = [
        rank.chunk(name, (6 + 2 * place, 7 + 2 * place))
        for place, name in enumerate(("one", "two", "three"))
    ]
    (order,) = chunks[1].orders
    chunks[1] = replace(chunks[1], orders=(replace(order, boot="f" * 16),))  # another node's start
    results = rank.load(*chunks)
    assert results == LoadResults({"r"}, {8, 9, 10, 11}, {"r"})
    assert torch.equal(rank.content((6, 7)), expected)
    report = rank.worker.report()
    assert report is not None
    assert report.failed == {"r"}
    assert report.counts["load_failed:lost"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(LAYERS, 2, *PAGE, dtype=torch.float64),
        torch.zeros(LAYERS + 1, 2, *PAGE),
        torch.zeros(LAYERS, 1, *PAGE),
        torch.zeros(LAYERS, 2, 2, 4, 8),
        torch.zeros(7),
    ],
    ids=["dtype", "layers", "blocks", "page", "shape"],
)
def test_bytes_of_another_cache_shape_are_never_loaded(rank: Rank, wrong: torch.Tensor) -> None:
    rank.buffer.insert(key_of("wrong", 0), wrong)
    before = rank.content(range(BLOCKS))
    assert rank.load(rank.chunk("wrong", (6, 7))).lost_blocks == {6, 7}
    assert torch.equal(rank.content(range(BLOCKS)), before)


def test_a_lost_node_costs_only_its_chunks(
    start_node: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    node = start_node()
    buffer = LookupBuffer(node.config, Namespace.named("gone"))
    rank = Rank(buffer, drain_seconds=0.1)
    rank.save(ChunkSave("chunk", (0, 1)))
    expected, chunk = rank.content((0, 1)), rank.chunk("chunk", (5, 6))
    node.kill()
    assert rank.load(chunk) == LoadResults({"r"}), "the arena is still mapped"
    assert torch.equal(rank.content((5, 6)), expected)
    rank.save(ChunkSave("other", (0, 1)))
    assert rank.worker.counters.totals()["save_skipped:node"] == 1
    rank.worker.close()


def test_a_save_costs_the_models_thread_only_an_enqueue(rank: Rank) -> None:
    gate = threading.Event()
    insert = rank.worker.saves._insert
    rank.worker.saves._insert = lambda *each: gate.wait(SECONDS) and insert(*each)
    used = []
    for step in range(3):  # Python's collector may run on any thread, and passes over all modules
        started = time.thread_time()
        saves = [ChunkSave(f"{step}-{i}", (0, 1)) for i in range(50)]
        rank.step(KvStepMetadata(saves=saves))
        used.append(time.thread_time() - started)
    gate.set()
    assert rank.worker.saves.drain(SECONDS)
    assert min(used) < 0.025, f"{used} s for 50 chunks each"


def test_a_step_that_runs_no_model_waits_for_a_load_and_another_does_not(rank: Rank) -> None:
    rank.save(ChunkSave("chunk", (0, 1)))
    gate, copy = threading.Event(), rank.worker.loads._copy

    def held_up(chunk: ChunkLoad, after: Any, seconds: float) -> None:
        gate.wait(SECONDS)
        copy(chunk, after, seconds)

    rank.worker.loads._copy = held_up
    started = time.monotonic()
    assert not rank.worker.loads.take(60.0).loaded
    assert time.monotonic() - started < 30.0, "nothing loads"
    chunk = rank.chunk("chunk", (5, 6))
    rank.step(KvStepMetadata(loads=[RequestLoad("r", (chunk,))]))
    assert not rank.worker.results(is_idle=True).loaded
    threading.Timer(0.05, gate.set).start()
    assert rank.worker.loads.take(SECONDS).loaded == {"r"}
    assert not rank.worker.results().loaded


def test_hand_offs_that_do_not_come_delay_no_chunk_of_this_host_and_no_other_hand_off(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from an engine whose node is not reached: 2 s each, one after the other, before all."""
    monkeypatch.setattr(worker, "HANDOFF_SECONDS", 3.0)
    rank.save(ChunkSave("here", (0, 1)), ChunkSave("piece", (2,), "id"))
    expected = rank.content((0, 1)), rank.content((2,))
    lost = [ChunkLoad("piece", (), 0, transfer=f"lost-{number}") for number in range(24)]
    loads = [RequestLoad(each.transfer, (each,)) for each in lost]
    loads.append(RequestLoad("piece", (ChunkLoad("piece", (9,), 0, transfer="id"),)))
    rank.step(KvStepMetadata(loads=loads))
    began = time.monotonic()
    assert rank.load(rank.chunk("here", (7, 8)), request="here").loaded == {"here"}
    wait_until(lambda: "piece" in rank.worker.results().loaded, 40.0)
    assert time.monotonic() - began < scaled(len(lost) * 3.0 / 2)
    assert torch.equal(rank.content((7, 8)), expected[0])
    assert torch.equal(rank.content((9,)), expected[1])


def test_of_a_hand_off_that_does_not_fit_nothing_stays(start_node: StartNode) -> None:
    """Each of its pieces would wait for room, and all that is to be stored after it."""
    node = start_node(capacity_bytes=64 * MIB)
    with node.client() as buffer:
        rank = Rank(buffer, page=(512, 1024), handoff_wait_seconds=1.0)  # 6 MiB a block
        pieces = [ChunkSave(f"p{number}", (number,), "large") for number in range(8)]
        began = time.monotonic()
        rank.save(*pieces, ChunkSave("small", (8,), "id"), ChunkSave("shared", (9,)))
        assert time.monotonic() - began < scaled(1.0)
        counts = rank.worker.counters.totals()
        assert (counts["saved"], counts["save_skipped:buffer_full"]) == (5 + 2, 3)
        keys = [key_of(each.name, 0, each.transfer) for each in pieces]
        assert buffer.has_caches(keys) == 8 * [False]
        assert buffer.has_caches([key_of("small", 0, "id"), key_of("shared", 0)]) == [True, True]
        rank.save(ChunkSave("p0", (0,), "large"))
        assert buffer.has_caches(keys[:1]) == [True], "a second attempt"
        rank.worker.close()


def test_a_piece_that_finds_the_queue_full_ends_its_hand_off(buffer: LookupBuffer) -> None:
    rank = Rank(buffer, save_queue_items=2)
    with rank.worker.saves._changed:  # its thread ends nothing meanwhile
        rank.step(KvStepMetadata(saves=[ChunkSave(f"p{n}", (n,), "id") for n in range(4)]))
    assert rank.worker.saves.drain(SECONDS)
    rank.save(ChunkSave("shared", (9,)))
    keys = [key_of(f"p{number}", 0, "id") for number in range(4)]
    assert buffer.has_caches(keys) == 4 * [False]
    rank.worker.close()
