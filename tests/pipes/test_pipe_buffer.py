"""PipeBuffer: the functions of vLLM's first lookup buffer, without its defects.

Each defect of `SimpleBuffer` that was found has a test with its name:

1. a prefix matches: test_a_prefix_does_not_match
2. token ids from 100,000 on equal their neighbours: test_no_tolerance_between_large_token_ids
3. a miss blocks all later requests: test_a_miss_does_not_block_a_hit
4. a full buffer and a consumer that requests another item deadlock:
   test_a_full_buffer_does_not_withhold_a_requested_item
5. an item larger than the buffer waits forever: test_an_item_larger_than_the_buffer_is_refused
6. None ends the handler: test_none_is_a_value, test_any_item_is_the_oldest
7. a consumer's death loses an item without an error, and items are charged twice:
   test_the_producer_gets_an_error_at_a_consumers_death, test_an_item_is_charged_once
   (hand-offs of `LookupBuffer` bring the item back)
8. tensors are sent under the buffer's lock: test_a_slow_consumer_stalls_no_insert
9. its own stress test hangs: test_two_hundred_items_in_different_orders_with_room_for_two
And one of its connector: its thread keeps the process alive,
   test_a_process_with_an_open_buffer_ends
"""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from contract_pipe import SHORT_SECONDS, SOON_SECONDS, Threads, same, threads
from lookup_buffer.errors import BufferFull, ConfigError, LookupTimeout, PipeBroken, TensorTooLarge
from lookup_buffer.pipes import KVPipe, PipeLimits, open_pipe
from lookup_buffer.pipes.pipe_buffer import PipeBuffer
from patience import scaled
from payloads import block
from raw_ends import RawEnd

__all__ = ["threads"]
ITEM = 100_000
"""Bytes of a key; its value has as many."""
Pair = tuple[PipeBuffer, PipeBuffer]


def make_pair(buffer_bytes: int = 1 << 30) -> Pair:
    limits = PipeLimits(buffer_bytes=buffer_bytes)
    producer = open_pipe("tcp://127.0.0.1:0", listen=True, limits=limits)
    return PipeBuffer(producer), PipeBuffer(open_pipe(producer.uri, limits=limits))


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = make_pair()
    yield pair
    for buffer in pair[::-1]:
        buffer.close()


@pytest.fixture
def pipe() -> Iterator[KVPipe]:
    """A producer's pipe, without a consumer yet."""
    pipe = open_pipe("tcp://127.0.0.1:0", listen=True)
    yield pipe
    pipe.abort()


@pytest.fixture
def small_pair() -> Iterator[Pair]:
    """Room for two items."""
    pair = make_pair(2 * (2 * ITEM + 4096))
    yield pair
    for buffer in pair[::-1]:
        buffer.close()


def insert(buffer: PipeBuffer, ids: list[int], number: int, **options: float) -> None:
    tokens = torch.tensor(ids)
    whole = torch.ones(len(ids), dtype=torch.bool)
    key = torch.full((ITEM,), number, dtype=torch.uint8)
    buffer.insert(tokens, whole, key, key + 1, torch.tensor([float(number)]), **options)


def select(buffer: PipeBuffer, ids: list[int], timeout: float = SOON_SECONDS) -> int:
    tokens = torch.tensor(ids)
    whole = torch.ones(len(ids), dtype=torch.bool)
    got = buffer.drop_select(tokens, whole, timeout=timeout)
    assert same(got[0], tokens)
    assert same(got[1], whole)
    return number_of(got)


def number_of(got: list[torch.Tensor | None]) -> int:
    _, _, key, value, hidden = got
    assert key is not None
    assert hidden is not None
    assert same(value, key + 1)
    assert float(hidden) == float(key[0])
    return int(key[0])


def test_items_are_found_by_their_tokens_in_any_order(pair: Pair) -> None:
    producer, consumer = pair
    order = list(range(20))
    for number in order:
        insert(producer, [1, 2, number], number)
    random.Random(0).shuffle(order)
    assert [select(consumer, [1, 2, number]) for number in order] == order


def test_any_item_is_the_oldest(pair: Pair) -> None:
    producer, consumer = pair
    for number in range(3):
        insert(producer, [number], number)
    assert select(consumer, [1]) == 1
    got = [number_of(consumer.drop_select(None, None, timeout=SOON_SECONDS)) for _ in range(2)]
    assert got == [0, 2]
    with pytest.raises(LookupTimeout):
        consumer.drop_select(None, None, timeout=SHORT_SECONDS)
    with pytest.raises(ConfigError):
        consumer.drop_select(torch.tensor([1]), None)


def test_only_the_region_of_interest_counts(pair: Pair) -> None:
    producer, consumer = pair
    tokens, roi = torch.tensor([7, 1, 2, 9]), torch.tensor([False, True, True, False])
    producer.insert(tokens, roi, None, None, torch.tensor([1.0]))
    everything = torch.ones(2, dtype=torch.bool)
    got = consumer.drop_select(torch.tensor([1, 2]), everything, timeout=SOON_SECONDS)
    assert same(got[0], tokens)
    assert same(got[1], roi)


def test_duplicates_are_a_fifo(pair: Pair) -> None:
    producer, consumer = pair
    for number in (1, 2):
        insert(producer, [5], number)
    assert [select(consumer, [5]) for _ in range(2)] == [1, 2]
    with pytest.raises(LookupTimeout):
        select(consumer, [5], SHORT_SECONDS)


# -- the defects of the first lookup buffer


def test_a_prefix_does_not_match(pair: Pair) -> None:
    producer, consumer = pair
    insert(producer, [1, 2, 3, 4, 5], 1)
    insert(producer, [1, 2], 2)
    insert(producer, [9], 3)
    with pytest.raises(LookupTimeout):
        select(consumer, [9, 1, 2, 3], SHORT_SECONDS)
    assert (select(consumer, [1, 2]), select(consumer, [1, 2, 3, 4, 5])) == (2, 1)


def test_no_tolerance_between_large_token_ids(pair: Pair) -> None:
    producer, consumer = pair
    insert(producer, [100_000], 1)
    with pytest.raises(LookupTimeout):
        select(consumer, [100_001], SHORT_SECONDS)


def test_a_miss_does_not_block_a_hit(pair: Pair, threads: Threads) -> None:
    producer, consumer = pair
    missing = threads.call(select, consumer, [404])
    insert(producer, [1], 1)
    assert select(consumer, [1]) == 1
    assert not missing.done()
    insert(producer, [404], 2)
    assert missing.result(SOON_SECONDS) == 2


def test_a_full_buffer_does_not_withhold_a_requested_item(
    small_pair: Pair, threads: Threads
) -> None:
    producer, consumer = small_pair
    insert(producer, [1], 1)
    insert(producer, [2], 2)
    waiting = threads.call(insert, producer, [3], 3, timeout=SOON_SECONDS)
    assert not waiting.done()
    assert select(consumer, [3]) == 3
    waiting.result(SOON_SECONDS)


def test_an_item_larger_than_the_buffer_is_refused(small_pair: Pair) -> None:
    tokens, roi = torch.tensor([1]), torch.tensor([True])
    with pytest.raises(TensorTooLarge):
        small_pair[0].insert(tokens, roi, torch.ones(ITEM), torch.ones(ITEM), None, timeout=60.0)


def test_the_wait_for_a_full_buffer_is_bounded(small_pair: Pair) -> None:
    producer, consumer = small_pair
    insert(producer, [1], 1)
    insert(producer, [2], 2)
    with pytest.raises(BufferFull):
        insert(producer, [3], 3, timeout=SHORT_SECONDS)
    assert (select(consumer, [2]), select(consumer, [1])) == (2, 1)


@pytest.mark.parametrize("which", range(3))
def test_none_is_a_value(pair: Pair, which: int) -> None:
    producer, consumer = pair
    tokens, roi = torch.tensor([1]), torch.tensor([True])
    values: list[torch.Tensor | None] = [torch.ones(3)] * 3
    values[which] = None
    producer.insert(tokens, roi, *values)
    got = consumer.drop_select(tokens, roi, timeout=SOON_SECONDS)[2:]
    assert all(same(a, b) for a, b in zip(got, values, strict=True))


def test_the_producer_gets_an_error_at_a_consumers_death(pipe: KVPipe) -> None:
    producer = PipeBuffer(pipe)
    with RawEnd(pipe) as consumer:
        insert(producer, [1], 1)
        assert consumer.receive()[:2] == ["offer", 1]
        consumer.send(["pull", 1])
    with pytest.raises(PipeBroken):
        while True:  # until it has detected the end
            insert(producer, [2], 2)


def test_an_item_is_charged_once(pipe: KVPipe) -> None:
    producer, consumer = PipeBuffer(pipe), PipeBuffer(open_pipe(pipe.uri))
    insert(producer, [1], 1)
    assert 2 * ITEM < pipe.used_bytes < 2 * ITEM + 4096
    assert select(consumer, [1]) == 1
    deadline = time.monotonic() + SOON_SECONDS
    while pipe.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pipe.used_bytes == 0
    consumer.close()


def test_a_slow_consumer_stalls_no_insert(pipe: KVPipe) -> None:
    producer = PipeBuffer(pipe)
    tokens, roi = torch.tensor([1]), torch.tensor([True])
    with RawEnd(pipe) as consumer:
        producer.insert(tokens, roi, block(64 << 20), None, None)
        assert consumer.receive()[:2] == ["offer", 1]
        consumer.send(["pull", 1])  # without reading the bytes
        started = time.monotonic()
        for number in range(50):
            insert(producer, [number], number, timeout=SOON_SECONDS)
        assert time.monotonic() - started < SOON_SECONDS


LEFT_OPEN = """
import torch
from lookup_buffer.pipes.pipe_buffer import PipeBuffer
from lookup_buffer.pipes import open_pipe

pipe = open_pipe("tcp://127.0.0.1:0", listen=True)
producer, consumer = PipeBuffer(pipe), PipeBuffer(open_pipe(pipe.uri))
tokens, roi = torch.tensor([1]), torch.tensor([True])
producer.insert(tokens, roi, None, None, torch.ones(1 << 20))
assert consumer.drop_select(tokens, roi)[4] is not None
"""


@pytest.mark.processes
def test_a_process_with_an_open_buffer_ends() -> None:
    command = [sys.executable, "-c", LEFT_OPEN]
    run = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert run.returncode == 0, run.stderr


def test_two_hundred_items_in_different_orders_with_room_for_two(small_pair: Pair) -> None:
    """The stress test of the first lookup buffer, which its later versions could not pass."""
    producer, consumer = small_pair
    inserts, selects = (random.Random(seed).sample(range(200), 200) for seed in (1, 2))
    with ThreadPoolExecutor(200) as pool:
        inserting = [pool.submit(insert, producer, [n], n, timeout=60.0) for n in inserts]
        assert [select(consumer, [n], 30.0) for n in selects] == selects
        for one in inserting:
            one.result(SOON_SECONDS)
