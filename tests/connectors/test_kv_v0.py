"""The first interface of KV connectors, and each defect of its first implementation by name."""

import threading
import time
from collections.abc import Callable

import torch

from connectors.kv_v0.connector import CHUNK_TOKENS, LookupBufferKVConnectorV0
from first_hosts import (
    BLOCKS,
    HEAD,
    HEADS,
    LONG,
    SHORT,
    Batch,
    Connect,
    Host,
    alone,
    config_of,
    prompt,
    run,
)
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess
from patience import scaled


def test_a_batch_that_was_computed_elsewhere_bypasses_the_model(connect: Connect) -> None:
    def bypasses(attempt: int) -> bool:
        lengths = (SHORT, LONG, 3)
        prompts = [prompt(n, 1000 * attempt + n) for n in lengths]
        logits, computed = run(connect(host=0), *prompts)
        assert computed == sum(lengths)
        assert torch.equal(logits, alone(*prompts))
        logits, computed = run(connect(host=1), *prompts)
        expected = alone(*prompts)
        if computed == 0:
            assert torch.equal(logits, expected)
        # A batch of which a part was loaded is computed in other shapes, which round differently.
        assert torch.allclose(logits, expected, atol=1e-3)
        return computed == 0

    # A look-up that gets no answer in time is a miss, as on a machine whose core stood still.
    assert any(bypasses(attempt) for attempt in range(1, 6))


def test_the_cache_is_as_after_the_models_run(connect: Connect) -> None:
    tokens = prompt(LONG, 4)
    one, two = Host(), Host(whole_shape=True)
    one.run(one.batch(tokens), connect())
    two.run(two.batch(tokens), connect())
    assert two.computed == 0
    for own, other in zip(one.kv_caches, two.kv_caches, strict=True):
        assert torch.equal(own, other.view(own.shape)), "both gave the same slots"


def test_no_bypass_without_hidden_states(connect: Connect) -> None:
    """KV alone lets the model begin later, but it has to run."""
    tokens, host = prompt(LONG, 5), Host()
    batch = host.batch(tokens)
    hidden = host._forward(batch)
    connect().send_kv_caches_and_hidden_states(host, batch, host.kv_caches, hidden[:0])
    logits, computed = run(connect(), tokens)
    assert computed == 1, "one token, whose states are wanted"
    assert torch.allclose(logits, alone(tokens), atol=1e-5)
    connect().send_kv_caches_and_hidden_states(host, batch, host.kv_caches, hidden)
    assert run(connect(), tokens)[1] == 0, "now they are there"


def test_states_that_do_not_fit_together_are_computed(connect: Connect) -> None:
    """Who inserts others, of another width, does not end the host."""
    known, forged, host = prompt(SHORT, 14), prompt(SHORT, 15), Host()
    run(connect(), known)
    batch = host.batch(forged)
    hidden = host._forward(batch)
    connect().send_kv_caches_and_hidden_states(host, batch, host.kv_caches, hidden[:, :1])
    logits, computed = run(connect(), known, forged)
    assert computed == 2, "of each the token whose states are wanted"
    assert torch.allclose(logits, alone(known, forged), atol=1e-5)


# -- the defects of the first implementation


def test_defect_a_longer_prompt_that_was_stored_writes_past_this_ones_slots(
    connect: Connect,
) -> None:
    """It matched by prefix and put as much as the sender had. Here keys are exact."""
    stored = prompt(LONG, 6)
    run(connect(), stored)
    host = Host()
    batch = host.batch(stored[:SHORT])
    host.run(batch, connect())
    used = set((batch.attn_metadata.slot_mapping).tolist())
    for cache in host.kv_caches:
        by_slot = cache.view(2, -1, HEADS, HEAD)
        for slot in range(BLOCKS * 4):
            assert slot in used or not by_slot[:, slot].any(), slot
    assert torch.allclose(run(connect(), stored[:SHORT])[0], alone(stored[:SHORT]), atol=1e-5)


def test_defect_one_miss_drags_the_whole_batch_to_recompute(connect: Connect) -> None:
    known, new = prompt(LONG, 7), prompt(SHORT, 8)
    run(connect(), known)
    logits, computed = run(connect(), known, new)
    assert computed == 1 + SHORT
    assert torch.allclose(logits, alone(known, new), atol=1e-5)


def test_defect_partial_kv_is_thrown_away(connect: Connect) -> None:
    stored = prompt(LONG, 9)
    run(connect(), stored)
    longer = stored[: 2 * CHUNK_TOKENS + 3] + prompt(20, 10)
    logits, computed = run(connect(), longer)
    assert computed == len(longer) - 2 * CHUNK_TOKENS
    assert torch.allclose(logits, alone(longer), atol=1e-5)


def test_defect_the_first_consumer_removes_it_for_all_others(connect: Connect) -> None:
    tokens = prompt(SHORT, 11)
    run(connect(), tokens)
    for _ in range(3):
        assert run(connect(host=1), tokens)[1] == 0


def test_defect_a_miss_hangs(connect: Connect) -> None:
    """No KV was sent and none will be: the consumer's model runs at once."""
    connector = connect()
    started = time.monotonic()
    assert run(connector, prompt(LONG, 12))[1] == LONG
    assert time.monotonic() - started < scaled(5.0)


def test_defect_chunked_prefill_is_mistaken_for_a_prompt(connect: Connect) -> None:
    """A batch with the second half of a prompt: its tokens do not determine the first half."""
    tokens = prompt(LONG, 13)
    half = CHUNK_TOKENS + 1
    for _ in range(2):
        host = Host()
        first = host.batch(tokens)
        host._forward(first)
        slots = first.attn_metadata.slot_mapping
        metadata = type(first.attn_metadata)([LONG], slots[half:], LONG - half, [half])
        second = Batch(first.input_tokens[half:], metadata)
        assert torch.allclose(host.run(second, connect()), alone(tokens), atol=1e-5)
    assert run(connect(), tokens[half:])[1] == LONG - half, "nothing was stored under its name"


def test_defect_decoding_rows_in_the_batch(connect: Connect) -> None:
    """Those behind the prefill tokens are left to the model; their sender warned and stopped."""
    known, decoding = prompt(SHORT, 14), prompt(SHORT, 15)
    run(connect(), known)
    host = Host()
    batch = host.batch(known, decoding, contexts=(0, SHORT - 1))
    metadata = batch.attn_metadata
    mixed = type(metadata)(metadata.seq_lens, metadata.slot_mapping, SHORT, metadata.context_lens)
    states, bypass, given = connect().recv_kv_caches_and_hidden_states(
        host, Batch(batch.input_tokens, mixed), host.kv_caches
    )
    assert (states, bypass) == (None, False)
    assert given.input_tokens.tolist() == [known[-1], decoding[-1]]
    assert given.attn_metadata.num_prefill_tokens == 1


def test_defect_ranks_mix_their_heads(connect: Connect) -> None:
    tokens = prompt(SHORT, 16)
    run(connect(rank=0, world_size=2, agree=list), tokens)
    assert run(connect(rank=1, world_size=2, agree=list), tokens)[1] == SHORT
    assert run(connect(rank=0, world_size=1), tokens)[1] == SHORT
    assert run(connect(rank=0, world_size=2, agree=list), tokens)[1] == 0


def test_defect_close_fails_and_leaves_a_thread(connect: Connect) -> None:
    before = threading.active_count()
    connector = connect()
    run(connector, prompt(SHORT, 17))
    connector.close()
    connector.close()
    assert threading.active_count() == before
    assert run(connector, prompt(SHORT, 17))[1] == SHORT, "closed, and the host goes on"


def test_a_lost_node_costs_a_computation(start_node: Callable[..., NodeProcess]) -> None:
    node = start_node()
    config = config_of(node, Namespace.named("gone"))
    connector = LookupBufferKVConnectorV0(0, 0, config)
    tokens = prompt(LONG, 18)
    run(connector, tokens)
    node.kill()
    logits, _ = run(connector, tokens)
    assert torch.allclose(logits, alone(tokens), atol=1e-5)
    connector.close()
