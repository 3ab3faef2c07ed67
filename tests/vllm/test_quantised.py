"""Engines with one model, one path and one precision, of which some quantise the weights.

Both kinds name the image alike. The method is the one that vLLM 0.32 runs on a CPU; it wants
bfloat16, so tokens are compared with those of an engine of the same kind, not with the reference.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engines import (
    OUTCOME_SECONDS,
    START_SECONDS,
    Album,
    Engine,
    connector,
    engine_settings,
    weights,
)
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess, StartNode, wait_until
from store import open_store

pytestmark = [pytest.mark.vllm, pytest.mark.part(name="engines")]
PRECISE = {"dtype": "bfloat16"}
QUANTISED = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}


@contextmanager
def engine(
    name: str, arguments: dict[str, str], node: NodeProcess | None, work: Path
) -> Iterator[Engine]:
    settings = engine_settings(
        name,
        weights(seed=0),
        work,
        ec_transfer_config=None if node is None else connector(node),
        extra_arguments=arguments,
    )
    with Engine(settings) as started:
        started.wait_ready(timeout_seconds=START_SECONDS)
        yield started


def test_a_quantised_engine_shares_with_its_own_kind_only(
    start_node: StartNode, album: Album, tmp_path: Path
) -> None:
    node = start_node()
    question = album.about(0)
    with node.client("stats") as client:
        with engine("precise", PRECISE, node, tmp_path) as precise:
            first = precise.generate(question)
            wait_until(lambda: client.stats()["items"] == 1, OUTCOME_SECONDS)
        with engine("quantised", QUANTISED, node, tmp_path) as quantised:
            second = quantised.generate(question)
            wait_until(lambda: client.stats()["items"] == 2, OUTCOME_SECONDS)
        with engine("another", QUANTISED, node, tmp_path) as another:
            third = another.generate(question)
        with engine("alone", QUANTISED, None, tmp_path) as alone:
            control = alone.generate(question)
        assert client.stats()["items"] == 2
    assert [answer.origins for answer in (first, second, third)] == [
        ("encoded",),
        ("encoded",),
        ("loaded",),
    ]
    assert first.identifiers == second.identifiers == third.identifiers
    assert second.tokens == third.tokens == control.tokens
    told_apart(node, *first.identifiers)


def told_apart(node: NodeProcess, identifier: str) -> None:
    """The two namespaces differ in the one setting, and the two outputs in their bytes."""
    assert node.config.store_url is not None
    with open_store(node.config.store_url) as store:
        fingerprints = {record.namespace for record in store.scan() if record.key == identifier}
        one, other = (store.namespaces()[fingerprint] for fingerprint in fingerprints)
    assert {part for part in one | other if one.get(part) != other.get(part)} == {"quantization"}
    outputs = []
    for parts in (one, other):
        with LookupBuffer(node.config, Namespace(parts)) as client:
            outputs.append(client.select(TensorKey(identifier)))
    first, second = outputs
    assert first is not None
    assert second is not None
    assert first.shape == second.shape
    assert not torch.equal(first, second)
