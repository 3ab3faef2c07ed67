"""The first interface of KV connectors with hosts that are not alike, or have more than tokens."""

import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from connectors.kv_v0.connector import (
    CHUNK_TOKENS,
    Intermediate,
    KVConnectorBase,
    LookupBufferKVConnectorV0,
    Prefilled,
)
from first_hosts import (
    BLOCK,
    BLOCKS,
    HEAD,
    HEADS,
    LAYERS,
    LONG,
    SHORT,
    Batch,
    Connect,
    Host,
    Metadata,
    alone,
    config_of,
    prompt,
    run,
)
from lookup_buffer.errors import ConfigError
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess
from patience import scaled


@pytest.mark.processes
def test_no_vllm_is_imported() -> None:
    code = "import sys, connectors.kv_v0.connector; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=scaled(60)).returncode == 0


def test_the_methods_take_what_the_first_interface_had() -> None:
    model = ["self", "model_executable", "model_input", "kv_caches"]
    for name, parameters in {
        "__init__": ["self", "rank", "local_rank", "config"],
        "send_kv_caches_and_hidden_states": [*model, "hidden_or_intermediate_states"],
        "recv_kv_caches_and_hidden_states": model,
        "close": ["self"],
    }.items():
        method = getattr(LookupBufferKVConnectorV0, name)
        assert list(inspect.signature(method).parameters) == parameters
        assert name in KVConnectorBase.__abstractmethods__


# -- further defects of the first implementation


@dataclass(frozen=True, slots=True)
class RicherBatch:
    """As the old model runner's input: the tokens of a picture are the same for every picture."""

    input_tokens: torch.Tensor
    attn_metadata: Metadata
    multi_modal_kwargs: dict[str, Any]
    lora_requests: set[str]


@pytest.mark.parametrize(
    "other", [{"multi_modal_kwargs": {"pixel_values": 1}}, {"lora_requests": {"adapter"}}], ids=str
)
def test_defect_images_and_adapters_are_mistaken_for_the_tokens(
    connect: Connect, other: dict[str, Any]
) -> None:
    """Neither taken from a prompt with the same tokens, nor given to one."""
    for tokens, plain_first in ((prompt(SHORT, 1), True), (prompt(SHORT, 2), False)):
        host = Host()
        batch = host.batch(tokens)
        fields = {"multi_modal_kwargs": {}, "lora_requests": set[str](), **other}
        if plain_first:
            run(connect(), tokens)
        host.run(RicherBatch(batch.input_tokens, batch.attn_metadata, **fields), connect())
        assert host.computed == SHORT
        assert run(connect(), tokens)[1] == (0 if plain_first else SHORT)


def test_a_host_may_say_that_there_is_nothing_besides_tokens(connect: Connect) -> None:
    tokens, host = prompt(SHORT, 3), Host()
    run(connect(), tokens)
    batch = host.batch(tokens)
    host.run(RicherBatch(batch.input_tokens, batch.attn_metadata, {}, set()), connect())
    assert host.computed == 0


def test_defect_a_prompt_that_was_loaded_in_part_is_not_stored(connect: Connect) -> None:
    """Each turn of a conversation loads all turns before, whichever host computed them."""
    turns, tokens, loaded = prompt(5 * CHUNK_TOKENS + 5, 4), 2 * CHUNK_TOKENS, 0
    while tokens <= len(turns):
        logits, computed = run(connect(host=tokens % 2), turns[:tokens])
        assert computed == tokens - loaded
        assert torch.allclose(logits, alone(turns[:tokens]), atol=1e-5)
        loaded, tokens = tokens, tokens + CHUNK_TOKENS
    assert run(connect(), turns[:loaded])[1] == 0, "with the states of every turn"


def test_a_batch_of_prompts_that_were_loaded_in_part_is_stored_under_their_own(
    connect: Connect,
) -> None:
    """The first of three is new, of the second two chunks are known, the third is known."""
    new, known = prompt(LONG, 5), prompt(SHORT, 6)
    longer = prompt(2 * CHUNK_TOKENS, 7)
    run(connect(), longer, known)
    longer = longer + prompt(SHORT, 8)
    assert run(connect(), new, longer, known)[1] == LONG + SHORT + 1
    logits, computed = run(connect(), new, longer, known)
    assert computed == 0
    assert torch.allclose(logits, alone(new, longer, known), atol=1e-5)


def test_defect_ranks_that_hit_differently_wait_for_each_other_in_the_model(
    connect: Connect,
) -> None:
    """Rank 1 lost the last chunks. Both compute them: a batch is computed by all ranks together,
    or left out by all."""
    tokens = prompt(LONG, 9)
    alike: dict[str, Any] = {"world_size": 2, "agree": list}
    run(connect(rank=0, **alike), tokens)
    run(connect(rank=1, **alike), tokens[: 2 * CHUNK_TOKENS])
    said, meet = list[list[int]](), threading.Barrier(2)

    def lowest(numbers: list[int]) -> list[int]:
        said.append(numbers)
        meet.wait(30.0)
        return [min(column) for column in zip(*said, strict=True)]

    computed = dict[int, int]()

    def rank(number: int) -> None:
        connector = connect(rank=number, world_size=2, agree=lowest)
        computed[number] = run(connector, tokens)[1]

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert computed == {0: LONG - 2 * CHUNK_TOKENS, 1: LONG - 2 * CHUNK_TOKENS}


def test_several_ranks_that_cannot_agree_are_refused(connect: Connect) -> None:
    with pytest.raises(ConfigError, match="set 'agree'"):
        connect(world_size=2)


@dataclass(frozen=True, slots=True)
class Handed:
    tensors: dict[str, torch.Tensor]


def test_defect_stages_of_a_pipeline(connect: Connect) -> None:
    """A stage that is not the last hands intermediate states on, by names, which come back so."""
    stage: dict[str, Any] = {"intermediate": Intermediate(("hidden_states", "residual"), Handed)}
    tokens, host = prompt(LONG, 10), Host()
    batch = host.batch(tokens)
    hidden = host._forward(batch)
    states = Handed({"hidden_states": hidden, "residual": -hidden})
    connect(**stage).send_kv_caches_and_hidden_states(host, batch, host.kv_caches, states)
    given, bypass, _ = connect(host=1, **stage).recv_kv_caches_and_hidden_states(
        host, batch, host.kv_caches
    )
    assert bypass
    assert isinstance(given, Handed)
    assert torch.equal(given.tensors["hidden_states"], hidden)
    assert torch.equal(given.tensors["residual"], -hidden)
    with pytest.raises(ConfigError, match="not the last"):
        connect().send_kv_caches_and_hidden_states(host, batch, host.kv_caches, states)


def test_defect_stages_with_other_layers_of_the_same_number(connect: Connect) -> None:
    tokens = prompt(SHORT, 11)
    run(connect(layers=range(0, LAYERS)), tokens)
    assert run(connect(layers=range(1, LAYERS + 1)), tokens)[1] == SHORT
    assert run(connect(layers=range(1, LAYERS + 1)), tokens)[1] == 0


def test_defect_a_node_that_does_not_answer_costs_its_time_for_each_sequence(
    start_node: Callable[..., NodeProcess],
) -> None:
    node = start_node()
    connector = LookupBufferKVConnectorV0(0, 0, config_of(node, Namespace.named("frozen")))
    prompts = [prompt(3, seed) for seed in range(20)]
    with node.frozen():
        started = time.monotonic()
        for _ in range(5):
            logits, computed = run(connector, *prompts)
        assert time.monotonic() - started < 50.0, "100 sequences, of a second each at least"
    assert computed == 60
    assert torch.equal(logits, alone(*prompts))
    connector.close()


def test_defect_neighbouring_token_ids_are_one_prompt() -> None:
    """They were compared as floats that are close."""
    one, other = (Prefilled([token], torch.tensor([0]), 0) for token in (100_000, 100_001))
    assert one.names() != other.names()


# -- hosts that are not alike


def test_other_models_share_nothing(connect: Connect) -> None:
    tokens = prompt(SHORT, 12)
    run(connect(), tokens)
    assert run(connect(namespace=Namespace.named("other weights")), tokens)[1] == SHORT


def test_caches_of_other_dtypes_share_nothing_and_each_has_its_own(connect: Connect) -> None:
    tokens = prompt(SHORT, 13)
    run(connect(), tokens)
    for computed in (SHORT, 0):
        host = Host()
        host.kv_caches = [cache.double() for cache in host.kv_caches]
        batch, connector = host.batch(tokens), connect(dtype=torch.float64)
        given = connector.recv_kv_caches_and_hidden_states(host, batch, host.kv_caches)
        assert given[1] == (not computed)
        hidden = torch.ones(SHORT, HEADS * HEAD)
        connector.send_kv_caches_and_hidden_states(host, batch, host.kv_caches, hidden)


def test_hosts_with_other_block_sizes_share_chunks(connect: Connect) -> None:
    tokens = prompt(LONG, 14)
    run(connect(), tokens)
    host = Host(block=2 * BLOCK)
    logits = host.run(host.batch(tokens), connect())
    assert host.computed == 0
    assert torch.equal(logits, alone(tokens))


def test_two_prompts_that_begin_alike_keep_their_own_ends(connect: Connect) -> None:
    """Also in one batch, and with the ends of one in the place of the other's."""
    start = prompt(CHUNK_TOKENS, 15)
    one, other = start + prompt(SHORT, 16), start + prompt(SHORT, 17)
    run(connect(), one)
    logits, computed = run(connect(), one, other, other[CHUNK_TOKENS:])
    assert computed == 1 + SHORT + SHORT
    assert torch.allclose(logits, alone(one, other, other[CHUNK_TOKENS:]), atol=1e-5)


def test_the_same_tokens_behind_others_are_not_the_same(connect: Connect) -> None:
    """The KV of a chunk depends on all tokens before it."""
    first, other, middle = (prompt(CHUNK_TOKENS, seed) for seed in (21, 22, 23))
    run(connect(), first + middle)
    run(connect(), other)
    logits, computed = run(connect(), other + middle)
    assert computed == CHUNK_TOKENS
    assert torch.allclose(logits, alone(other + middle), atol=1e-5)


def test_latent_vectors_are_one_side(connect: Connect) -> None:
    """MLA: a cache of `[blocks, block size, size]`."""
    latent: dict[str, Any] = {"heads": 1, "head_size": 24, "latent": True}
    tokens, host = prompt(LONG, 18), Host()
    batch, hidden = host.batch(tokens), torch.ones(LONG, 5)
    caches = [torch.randn(BLOCKS, BLOCK, 24) for _ in range(LAYERS)]
    connect(**latent).send_kv_caches_and_hidden_states(host, batch, caches, hidden)
    empty = [torch.zeros_like(cache) for cache in caches]
    _, bypass, _ = connect(**latent).recv_kv_caches_and_hidden_states(host, batch, empty)
    assert bypass
    slots = batch.attn_metadata.slot_mapping
    for cache, other in zip(caches, empty, strict=True):
        assert torch.equal(cache.view(-1, 24)[slots], other.view(-1, 24)[slots])


@pytest.mark.parametrize(
    "shape",
    [(BLOCKS, BLOCK, 24), (BLOCKS, 2, BLOCK, HEADS, HEAD)],
    ids=["latent", "values behind keys in each block"],
)
def test_a_cache_of_another_layout_is_refused(connect: Connect, shape: tuple[int, ...]) -> None:
    host = Host()
    caches = [torch.zeros(shape) for _ in range(LAYERS)]
    with pytest.raises(ConfigError, match="along its first dimension"):
        connect().recv_kv_caches_and_hidden_states(host, host.batch(prompt(3, 19)), caches)


def test_tokens_without_a_slot_are_computed_by_the_model(connect: Connect) -> None:
    """Behind a window of attention; the old hosts wrote -1."""
    tokens, host = prompt(SHORT, 20), Host()
    batch = host.batch(tokens)
    metadata = batch.attn_metadata
    slots = metadata.slot_mapping.clone()
    slots[:3] = -1
    windowed = Batch(batch.input_tokens, Metadata([SHORT], slots, SHORT, [0]))
    connector = connect()
    connector.send_kv_caches_and_hidden_states(host, windowed, host.kv_caches, torch.ones(SHORT, 4))
    assert connector.recv_kv_caches_and_hidden_states(host, windowed, host.kv_caches)[1] is False
    assert run(connect(), tokens)[1] == SHORT
