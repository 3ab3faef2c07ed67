"""Hosts of the first KV connectors for tests: `connect` makes connectors, `run` drives one."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from connectors.kv_v0.connector import CHUNK_TOKENS, FirstConfig, LookupBufferKVConnectorV0
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess
from paged_model import HEAD, HEADS, LAYERS, WORDS, Host

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
