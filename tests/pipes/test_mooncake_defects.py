"""Each defect found in Mooncake's pipe, store and connector, and the test that covers it.

 1. None is a tensor with one number: test_no_tensor_is_mistaken_for_none
 2. no tensor without dimensions: test_a_tensor_without_dimensions_passes
 3. no backpressure, and the wait for a reply is unbounded: test_backpressure_is_bounded
 4. one address, one pair: test_several_ends_share_one_address
 5. signals queue behind payload: test_a_signal_overtakes_unreceived_payload
 6. received bytes are copied twice more: test_bytes_are_received_into_the_callers_memory
 7. one thread sends and receives: test_vllm_pipe_defects, 5
 8. a None that is put is ignored: test_missing_empty_and_none_differ
 9. the result of a put is ignored: test_a_put_without_effect_is_reported
10. tensors arrive on the producer's device: test_no_device_travels
11. close has no effect: test_a_closed_end_raises
12. keys are truncated to 64 bits: test_keys_are_not_truncated
13. no namespace: test_namespaces_are_separate
14. an item is two puts: test_an_item_is_received_in_full_or_not_at_all
15. layers are found by counting: test_layers_have_names
16. nothing is ever deleted: test_an_item_expires

P2pNcclEngine: test_p2p_nccl_defects.
"""

import time
from contextlib import ExitStack

import pytest
import torch

from contract_pipe import (
    LARGE,
    SHORT_SECONDS,
    SMALL,
    SOON_SECONDS,
    Ends,
    MakeEnds,
    Threads,
    closing,
    ends,
    make_ends,
    same,
    threads,
)
from lookup_buffer.codec import header_of, packed, writable_bytes
from lookup_buffer.errors import (
    BufferFull,
    Closed,
    LookupTimeout,
    MissingTensor,
    PipeBroken,
    PipeError,
    TensorTooLarge,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.pipes import PipeLimits, open_pipe
from lookup_buffer.pipes.pipe_buffer import PipeBuffer, name_of
from lookup_buffer.protocol.framing import encode_frame
from lookup_buffer.protocol.messages import InsertOutcome
from nodes import MIB, NodeProcess, key
from payloads import block
from raw_ends import RawEnd, offer

__all__ = ["closing", "ends", "make_ends", "threads"]
Pair = tuple[NodeProcess, NodeProcess]


def test_no_tensor_is_mistaken_for_none(ends: Ends) -> None:
    a, b = ends
    theirs = torch.tensor([-150886311])
    a.send_tensor(theirs)
    a.send_tensor(None)
    assert same(b.recv_tensor(timeout=SOON_SECONDS), theirs)
    assert b.recv_tensor(timeout=SOON_SECONDS) is None


def test_a_tensor_without_dimensions_passes(ends: Ends) -> None:
    ends[0].send_tensor(torch.tensor(2.5))
    assert same(ends[1].recv_tensor(timeout=SOON_SECONDS), torch.tensor(2.5))


def test_backpressure_is_bounded(make_ends: MakeEnds) -> None:
    a, _ = make_ends(PipeLimits(buffer_bytes=2 * LARGE))
    with pytest.raises(BufferFull):
        for _ in range(3):
            a.send_tensor(block(LARGE), timeout=SHORT_SECONDS)
    assert a.used_bytes == 2 * LARGE


def test_several_ends_share_one_address(closing: ExitStack) -> None:
    a = closing.enter_context(open_pipe("tcp://127.0.0.1:0", listen=True))
    for number in range(5):
        closing.enter_context(open_pipe(a.uri)).send_tensor(block(SMALL, number), str(number))
    for number in range(5):
        assert same(a.recv_tensor(str(number), timeout=SOON_SECONDS), block(SMALL, number))


def test_a_signal_overtakes_unreceived_payload(make_ends: MakeEnds, threads: Threads) -> None:
    a, b = make_ends(PipeLimits(buffer_bytes=LARGE))
    a.send_tensor(block(LARGE))
    waiting = threads.call(a.send_tensor, block(LARGE, 1), timeout=SOON_SECONDS)
    signal = threads.call(a.send_tensor, torch.tensor(7), "signal", timeout=SOON_SECONDS)
    assert same(b.recv_tensor("signal", timeout=SOON_SECONDS), torch.tensor(7))
    signal.result(SOON_SECONDS)
    assert not waiting.done()
    for seed in range(2):
        assert same(b.recv_tensor(timeout=SOON_SECONDS), block(LARGE, seed))
    waiting.result(SOON_SECONDS)


def test_bytes_are_received_into_the_callers_memory(ends: Ends) -> None:
    a, b = ends
    out = torch.zeros(LARGE, dtype=torch.uint8)
    address = out.data_ptr()
    a.send_tensor(block(LARGE), "k")
    assert b.recv_tensor("k", timeout=SOON_SECONDS, out=out) is out
    assert out.data_ptr() == address
    assert same(out, block(LARGE))


def test_missing_empty_and_none_differ(ends: Ends, node_pair: Pair) -> None:
    a, b = ends
    a.send_tensor(torch.empty(0), "empty")
    a.send_tensor(None, "none")
    assert same(b.recv_tensor("empty", timeout=SOON_SECONDS), torch.empty(0))
    assert b.recv_tensor("none", timeout=SOON_SECONDS) is None
    with pytest.raises(LookupTimeout):
        b.recv_tensor("missing", timeout=SHORT_SECONDS)
    with node_pair[0].client() as buffer:
        empty, none, missing = key(), key(), key()
        buffer.insert(empty, torch.empty(0))
        buffer.insert(none, None)
        assert same(buffer.select(empty), torch.empty(0))
        assert buffer.select(none) is None
        with pytest.raises(MissingTensor):
            buffer.select(missing)


def test_a_put_without_effect_is_reported(ends: Ends, node_pair: Pair) -> None:
    a, b = ends
    b.abort()
    with pytest.raises(PipeError):
        while True:  # until it has detected the end
            a.send_tensor(None)
            time.sleep(0.01)
    with node_pair[0].client() as buffer:
        name = key()
        assert buffer.insert(name, torch.ones(3)) is InsertOutcome.STORED
        assert buffer.insert(name, torch.zeros(3)) is InsertOutcome.EXISTS
        assert same(buffer.select(name), torch.ones(3))
        with pytest.raises(TensorTooLarge):
            buffer.insert(key(), torch.empty(65 * MIB, dtype=torch.uint8))


def test_no_device_travels() -> None:
    assert header_of(torch.ones(3)).to_fields().keys() == {"dtype", "shape", "nbytes", "kind"}


def test_a_closed_end_raises(ends: Ends) -> None:
    ends[0].close()
    for operation in (ends[0].recv_tensor, lambda: ends[0].send_tensor(None)):
        with pytest.raises(Closed):
            operation()


def test_keys_are_not_truncated(ends: Ends) -> None:
    a, b = ends
    keys = ["k" * 4095 + last for last in "xyz"]
    for number, each in enumerate(keys):
        a.send_tensor(torch.tensor(number), each)
    for number, each in reversed(list(enumerate(keys))):
        assert same(b.recv_tensor(each, timeout=SOON_SECONDS), torch.tensor(number))
    tokens = torch.arange(10)
    assert len(name_of(tokens, torch.ones(10))) == 64, "256 bits"


def test_namespaces_are_separate(node_pair: Pair) -> None:
    name = key()
    with node_pair[0].client("model A") as one, node_pair[0].client("model B") as other:
        one.insert(name, torch.ones(3))
        assert other.has_caches([name]) == [False]
        with pytest.raises(MissingTensor):
            other.select(name)


def test_an_item_is_received_in_full_or_not_at_all(closing: ExitStack, threads: Threads) -> None:
    pipe = open_pipe("tcp://127.0.0.1:0", listen=True)
    closing.callback(pipe.abort)
    tokens, roi = torch.arange(3), torch.ones(3)
    item = packed([tokens, roi, block(LARGE), block(LARGE), block(LARGE)])
    whole = bytes(writable_bytes(item))
    with RawEnd(pipe) as raw:
        raw.send(offer(1, name_of(tokens, roi).encode(), len(whole)))
        selecting = threads.call(PipeBuffer(pipe).drop_select, tokens, roi)
        assert raw.receive() == ["pull", 1]
        raw.send_bytes(encode_frame(["data", 1], len(whole)) + whole[: len(whole) // 2])
    with pytest.raises(PipeBroken):
        selecting.result(SOON_SECONDS)


def test_layers_have_names(ends: Ends) -> None:
    a, b = ends
    for layer in range(28, 32):  # the layers of the last pipeline stage
        a.send_tensor(torch.tensor(layer), TensorKey("hash", "request", f"layer.{layer}"))
    for layer in (31, 28, 30, 29):
        name = TensorKey("hash", "request", f"layer.{layer}")
        assert same(b.recv_tensor(name, timeout=SOON_SECONDS), torch.tensor(layer))


def test_an_item_expires(node_pair: Pair) -> None:
    with node_pair[0].client() as buffer:
        name = key()
        buffer.insert(name, torch.ones(3), ttl_seconds=0.1)
        deadline = time.monotonic() + SOON_SECONDS
        while buffer.has_caches([name]) == [True] and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(MissingTensor):
            buffer.select(name)
