"""Hosts of the first KV connectors for tests: `connect` makes connectors, `run` drives one.

Their model is small, with paged attention in plain torch, driven as those hosts drove theirs: a
prefill batch of several sequences, a slot mapping, hidden states.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from connectors.kv_v0.connector import (
    CHUNK_TOKENS,
    FirstConfig,
    KVConnectorBase,
    LookupBufferKVConnectorV0,
    ModelInput,
    States,
)
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess

LAYERS, HEADS, HEAD, BLOCK, BLOCKS, WORDS = 2, 2, 8, 4, 64, 50
WIDTH = HEADS * HEAD


@dataclass(frozen=True, slots=True)
class Metadata:
    seq_lens: list[int]
    slot_mapping: torch.Tensor
    num_prefill_tokens: int
    context_lens: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    input_tokens: torch.Tensor
    attn_metadata: Metadata


class Host:
    """One engine: its cache, and where the tokens of each sequence of the last batch lie in it."""

    def __init__(self, *, whole_shape: bool = False, block: int = BLOCK) -> None:
        self._block = block
        shape = (2, BLOCKS, block, HEADS, HEAD) if whole_shape else (2, BLOCKS, block * WIDTH)
        self.kv_caches = [torch.zeros(shape) for _ in range(LAYERS)]
        self.computed = 0
        """Tokens that the model ran for."""
        generator = torch.Generator().manual_seed(7)
        self._weights = [
            [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(4)]
            for _ in range(LAYERS)
        ]
        self._embedding = torch.randn(WORDS, WIDTH, generator=generator)
        self._positions = torch.randn(BLOCKS * BLOCK, WIDTH, generator=generator)
        self._slots: list[torch.Tensor] = []
        self._free = torch.randperm(BLOCKS, generator=generator).tolist()

    def batch(self, *prompts: list[int], contexts: tuple[int, ...] = ()) -> Batch:
        """Room for each prompt, and the batch of their tokens; those of a context are in the cache
        already, as far as the host says."""
        self._slots = [self._room(len(prompt)) for prompt in prompts]
        before = contexts or (0,) * len(prompts)
        parts = [prompt[skip:] for prompt, skip in zip(prompts, before, strict=True)]
        slots = [slots[skip:] for slots, skip in zip(self._slots, before, strict=True)]
        tokens = torch.tensor([token for part in parts for token in part])
        lengths = [len(prompt) for prompt in prompts]
        return Batch(tokens, Metadata(lengths, torch.cat(slots), len(tokens), list(before)))

    def _room(self, tokens: int) -> torch.Tensor:
        size = self._block
        blocks = [self._free.pop() for _ in range(-(-tokens // size))]
        return torch.cat([torch.arange(size) + block * size for block in blocks])[:tokens]

    def run(self, batch: ModelInput, connector: KVConnectorBase | None = None) -> torch.Tensor:
        """The next word's logits of each sequence, as the old model runner came by them."""
        given: ModelInput = batch
        hidden: States | None = None
        bypass = False
        if connector is not None:
            hidden, bypass, given = connector.recv_kv_caches_and_hidden_states(
                self, batch, self.kv_caches
            )
        if not bypass:
            hidden = self._forward(given)
            if connector is not None:
                connector.send_kv_caches_and_hidden_states(self, given, self.kv_caches, hidden)
        assert isinstance(hidden, torch.Tensor)
        metadata = (batch if bypass else given).attn_metadata
        lengths = [a - b for a, b in zip(metadata.seq_lens, metadata.context_lens, strict=True)]
        last = torch.tensor(lengths).cumsum(0) - 1
        return hidden[last] @ self._embedding.T

    def _forward(self, batch: ModelInput) -> torch.Tensor:
        metadata, rows, start = batch.attn_metadata, [], 0
        for length, context, slots in zip(
            metadata.seq_lens, metadata.context_lens, self._slots, strict=True
        ):
            end = start + length - context
            tokens = batch.input_tokens[start:end]
            assert torch.equal(metadata.slot_mapping[start:end], slots[context:])
            rows.append(self._sequence(tokens, slots, context))
            self.computed += len(tokens)
            start = end
        return torch.cat(rows)

    def _sequence(self, tokens: torch.Tensor, slots: torch.Tensor, context: int) -> torch.Tensor:
        places = torch.arange(context, len(slots))
        hidden = self._embedding[tokens] + self._positions[places]
        causal = torch.arange(len(slots))[None, :] <= places[:, None]
        for cache, (query, key, value, out) in zip(self.kv_caches, self._weights, strict=True):
            keys, values = cache[0].view(-1, HEADS, HEAD), cache[1].view(-1, HEADS, HEAD)
            keys[slots[context:]] = (hidden @ key).view(-1, HEADS, HEAD)
            values[slots[context:]] = (hidden @ value).view(-1, HEADS, HEAD)
            asked = (hidden @ query).view(-1, HEADS, HEAD)
            scores = torch.einsum("qhd,khd->hqk", asked, keys[slots]) / HEAD**0.5
            weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, values[slots])
            hidden = hidden + torch.tanh(mixed.reshape(-1, WIDTH) @ out)
        return hidden


Connect = Callable[..., LookupBufferKVConnectorV0]
SHORT, LONG = CHUNK_TOKENS + 5, 3 * CHUNK_TOKENS + 2


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(WORDS), k=length)


def config_of(node: NodeProcess, namespace: Namespace, **fields: Any) -> FirstConfig:
    """Of a host with the small model, but for `fields`."""
    sizes = {"layers": range(LAYERS), "heads": HEADS, "head_size": HEAD, "dtype": torch.float32}
    return FirstConfig(node.config, namespace, **{**sizes, **fields})


@pytest.fixture
def connect(node_pair: tuple[NodeProcess, NodeProcess]) -> Iterator[Connect]:
    """connect(host=1, rank=1): connectors of one model, new for each test."""
    made: list[LookupBufferKVConnectorV0] = []
    model = Namespace.named(f"first-{time.monotonic()}")

    def of(
        host: int = 0, rank: int = 0, namespace: Namespace = model, **fields: Any
    ) -> LookupBufferKVConnectorV0:
        config = config_of(node_pair[host], namespace, **fields)
        made.append(LookupBufferKVConnectorV0(rank, rank, config))
        return made[-1]

    yield of
    for connector in made:
        connector.close()


def alone(*prompts: list[int]) -> torch.Tensor:
    """What a host without a connector says."""
    host = Host()
    return host.run(host.batch(*prompts))


def run(connector: LookupBufferKVConnectorV0, *prompts: list[int]) -> tuple[torch.Tensor, int]:
    """What a new host says, and for how many tokens its model ran."""
    host = Host()
    logits = host.run(host.batch(*prompts), connector)
    return logits, host.computed
