"""PipeBuffer against a plain dictionary: random items, full budgets, ends and deaths."""

import contextlib
from collections import deque
from itertools import count

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from contract_pipe import same
from hypothesis_profiles import examples
from lookup_buffer.codec import Value, packed
from lookup_buffer.errors import BufferFull, LookupTimeout, PipeBroken, TensorTooLarge
from lookup_buffer.pipes import PipeLimits, open_pipe
from lookup_buffer.pipes.pipe_buffer import PipeBuffer
from patience import scaled
from payloads import block

BUDGET = 300_000
TOKENS = ((1,), (1, 2), (2, 1), (1, 2, 3), (100_000,), (100_001,))
SIZES = (None, 0, 1000, 70_000, 120_000)
SOON_SECONDS = scaled(10.0)


class Items(RuleBasedStateMachine):
    """One thread drives both ends, so the model has the exact content and budget."""

    @initialize()
    def open(self) -> None:
        self.limits = limits = PipeLimits(buffer_bytes=BUDGET)
        pipe = open_pipe("tcp://127.0.0.1:0", listen=True, limits=limits)
        self.pipe = pipe
        self.consumer_pipe = open_pipe(pipe.uri, limits=limits)
        self.producer, self.consumer = PipeBuffer(pipe), PipeBuffer(self.consumer_pipe)
        self.items: dict[tuple[int, ...], deque[tuple[int, list[Value]]]] = {
            tokens: deque() for tokens in TOKENS
        }
        self.used = 0
        self.numbers = count()

    @rule(tokens=st.sampled_from(TOKENS), size=st.sampled_from(SIZES), hole=st.booleans())
    def insert(self, tokens: tuple[int, ...], size: int | None, hole: bool) -> None:
        number = next(self.numbers)
        # Tokens outside of the region of interest are in the item, and not in its key.
        ids = torch.tensor([7, *tokens] if hole else tokens)
        roi = torch.tensor([not hole] * (len(ids) - len(tokens)) + [True] * len(tokens))
        value = None if size is None else block(size, number)
        item: list[Value] = [ids, roi, value, value, torch.tensor(float(number))]
        cost = self.limits.cost(packed(item).nbytes)
        if self.used + cost > BUDGET:
            with pytest.raises(BufferFull):
                self.producer.insert(ids, roi, *item[2:], timeout=0.0)
        else:
            self.producer.insert(ids, roi, *item[2:], timeout=SOON_SECONDS)
            self.items[tokens].append((number, item))
            self.used += cost

    @rule()
    def insert_too_much(self) -> None:
        with pytest.raises(TensorTooLarge):
            tokens, roi = torch.tensor([1]), torch.tensor([True])
            self.producer.insert(tokens, roi, block(BUDGET), None, None)

    @rule(tokens=st.sampled_from(TOKENS))
    def select(self, tokens: tuple[int, ...]) -> None:
        ids, roi = torch.tensor(tokens), torch.ones(len(tokens))
        if self.items[tokens]:
            got = self.consumer.drop_select(ids, roi, timeout=SOON_SECONDS)
            self._taken(self.items[tokens], got)
        else:
            with pytest.raises(LookupTimeout):
                self.consumer.drop_select(ids, roi, timeout=0.0)

    @rule()
    def select_any(self) -> None:
        queues = [queue for queue in self.items.values() if queue]
        if queues:
            got = self.consumer.drop_select(None, None, timeout=SOON_SECONDS)
            self._taken(min(queues, key=lambda queue: queue[0][0]), got)
        else:
            with pytest.raises(LookupTimeout):
                self.consumer.drop_select(None, None, timeout=0.0)

    def _taken(self, queue: "deque[tuple[int, list[Value]]]", got: list[Value]) -> None:
        _, item = queue.popleft()
        assert all(same(a, b) for a, b in zip(got, item, strict=True))
        self.used -= self.limits.cost(packed(item).nbytes)

    @rule()
    def the_producer_dies_and_another_comes(self) -> None:
        self.pipe.abort()
        with pytest.raises(PipeBroken):  # once it has detected the end
            for _ in range(1 + sum(map(len, self.items.values()))):
                self.consumer.drop_select(None, None, timeout=SOON_SECONDS)
        self.consumer.close()
        self.open()

    def teardown(self) -> None:
        with contextlib.suppress(AttributeError):
            self.pipe.abort()
            self.consumer_pipe.abort()


def test_random_items() -> None:
    run_state_machine_as_test(
        Items,
        settings=settings(
            max_examples=examples(25),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
