"""The contract of all pipes, what travels: a class that a test module of each pipe inherits.

The module has a fixture `make_ends`, which makes two connected ends. How a pipe is full, is waited
for, and ends: contract_pipe_limits.

`make_ends` is a fixture for tests that every scheme is to pass; import it to use it.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from lookup_buffer.codec import Value
from lookup_buffer.errors import (
    CodecError,
    InvalidKey,
    LookupTimeout,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.pipes import ANY_KEY, KVPipe, PipeLimits, open_pipe
from lookup_buffer.protocol.header import DTYPES
from patience import scaled
from payloads import block
from store import EmbeddedServer

TOKEN = "that of both ends, and of no other"

SMALL, LARGE = 1000, 1 << 20
"""Bytes: sent with their offer, and sent on request, if a pipe distinguishes these."""
SOON_SECONDS = scaled(5.0)
"""Bound on what takes milliseconds on a machine that is not busy."""
SHORT_SECONDS = 0.05

Ends = tuple[KVPipe, KVPipe]
MakeEnds = Callable[..., Ends]


def same(a: Value, b: Value) -> bool:
    if a is None or b is None:
        return a is b
    a, b = a.resolve_conj().contiguous(), b.resolve_conj().contiguous()
    equal = torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    return a.dtype == b.dtype and a.shape == b.shape and equal


class Threads:
    """Calls on other threads, which the test waits for."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(16)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        future = self._pool.submit(function, *args, **kwargs)
        time.sleep(SHORT_SECONDS)
        return future

    def end(self) -> None:
        self._pool.shutdown(wait=True)


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.end()


class PipeContract:
    """Inherit it in a class `Test…` of a module with the fixture `make_ends`."""

    @pytest.fixture
    def ends(self, make_ends: MakeEnds) -> Ends:
        return make_ends()

    # -- the seeds' pipe: no key, first in, first out

    def test_code_for_vllms_pipe_runs(self, ends: Ends) -> None:
        a, b = ends
        for number in range(10):
            a.send_tensor(torch.full((3,), number))
        a.send_tensor(None)
        assert [int(b.recv_tensor()[0]) for _ in range(10)] == list(range(10))  # type: ignore[index]
        assert b.recv_tensor() is None
        b.send_tensor(torch.tensor([1.5]))
        assert same(a.recv_tensor(), torch.tensor([1.5]))

    @pytest.mark.parametrize("nbytes", [SMALL, LARGE])
    def test_the_tensor_may_be_changed_once_it_was_sent(self, ends: Ends, nbytes: int) -> None:
        a, b = ends
        tensor = block(nbytes)
        a.send_tensor(tensor)
        expected = tensor.clone()
        tensor.zero_()
        received = b.recv_tensor()
        assert same(received, expected)
        assert received is not None
        received.fill_(1)  # it is the receiver's own

    def test_large_and_small_tensors_keep_their_order(self, ends: Ends) -> None:
        a, b = ends
        sent = [block(nbytes, seed) for seed, nbytes in enumerate([LARGE, SMALL, 0, LARGE, 1] * 3)]
        for tensor in sent:
            a.send_tensor(tensor)
        assert all(same(b.recv_tensor(timeout=SOON_SECONDS), tensor) for tensor in sent)

    # -- keys

    @pytest.mark.parametrize("nbytes", [SMALL, LARGE])
    def test_keys_in_any_order(self, ends: Ends, nbytes: int) -> None:
        a, b = ends
        sent = {f"key-{n}": block(nbytes, n) for n in range(20)}
        for key, tensor in sent.items():
            a.send_tensor(tensor, key)
        for key in sorted(sent, key=lambda key: key[::-1], reverse=True):
            assert same(b.recv_tensor(key, timeout=SOON_SECONDS), sent[key])

    def test_a_key_matches_exactly(self, ends: Ends) -> None:
        a, b = ends
        a.send_tensor(block(10), "12345")
        for key in ("1234", "123456", "", " 12345", None):
            with pytest.raises(LookupTimeout):
                b.recv_tensor(key, timeout=SHORT_SECONDS)
        assert same(b.recv_tensor("12345", timeout=SOON_SECONDS), block(10))

    def test_a_key_may_be_a_tensor_key(self, ends: Ends) -> None:
        a, b = ends
        a.send_tensor(block(10, 1), TensorKey("hash", "request"))
        a.send_tensor(block(10, 2), TensorKey("hash"))
        assert same(b.recv_tensor(TensorKey("hash"), timeout=SOON_SECONDS), block(10, 2))
        assert same(b.recv_tensor("hash@request", timeout=SOON_SECONDS), block(10, 1))

    @pytest.mark.parametrize(
        "key", ["", "\0", "\udcff\ud800", "é" * 2048, "k" * 4096], ids=["empty", *"0sék"]
    )
    def test_any_text_up_to_the_bound_is_a_key(self, ends: Ends, key: str) -> None:
        a, b = ends
        a.send_tensor(block(10), key)
        assert same(b.recv_tensor(key, timeout=SOON_SECONDS), block(10))
        for operation in (lambda k: a.send_tensor(None, k), b.recv_tensor):
            with pytest.raises(InvalidKey):
                operation(key + "k" * 4097)

    def test_several_under_one_key_come_in_order(self, ends: Ends) -> None:
        a, b = ends
        for number in range(5):
            a.send_tensor(torch.tensor(number), "k")
            a.send_tensor(torch.tensor(-number), "other")
        got = [b.recv_tensor("k", timeout=SOON_SECONDS) for _ in range(5)]
        assert [int(t) for t in got if t is not None] == list(range(5))

    def test_any_key_is_the_oldest_of_those_that_have_one(
        self, ends: Ends, threads: Threads
    ) -> None:
        a, b = ends
        for number, key in enumerate(["x", None, "y", "x"]):
            a.send_tensor(torch.tensor(number), key)
        got = [b.recv_tensor(ANY_KEY, timeout=SOON_SECONDS) for _ in range(3)]
        assert [int(t) for t in got if t is not None] == [0, 2, 3]
        waiting = threads.call(b.recv_tensor, ANY_KEY, timeout=SOON_SECONDS)
        assert not waiting.done()
        a.send_tensor(block(LARGE), "z")
        assert same(waiting.result(SOON_SECONDS), block(LARGE))
        assert same(b.recv_tensor(timeout=SOON_SECONDS), torch.tensor(1))

    def test_a_receive_of_one_key_does_not_block_others(self, ends: Ends, threads: Threads) -> None:
        a, b = ends
        missed = threads.call(b.recv_tensor, "late", timeout=SOON_SECONDS)
        a.send_tensor(block(LARGE, 1), "early")
        assert same(b.recv_tensor("early", timeout=SOON_SECONDS), block(LARGE, 1))
        assert not missed.done()
        a.send_tensor(block(LARGE, 2), "late")
        assert same(missed.result(SOON_SECONDS), block(LARGE, 2))

    def test_a_none_under_a_key_ends_the_wait_for_it(self, ends: Ends, threads: Threads) -> None:
        a, b = ends
        waiting = threads.call(b.recv_tensor, "k", timeout=SOON_SECONDS)
        a.send_tensor(None, "k")
        assert waiting.result(SOON_SECONDS) is None

    def test_both_ways_at_once(self, ends: Ends, threads: Threads) -> None:
        calls = []
        for ours, theirs in (ends, ends[::-1]):
            for n in range(4):
                calls.append(threads.call(ours.send_tensor, block(LARGE, n), f"k{n}"))
                calls.append(threads.call(theirs.recv_tensor, f"k{n}", timeout=SOON_SECONDS))
        results = [call.result(SOON_SECONDS) for call in calls]
        assert sum(result is not None for result in results) == 8

    # -- into the caller's tensor

    @pytest.mark.parametrize("key", [None, "k"])
    def test_out_is_filled_and_returned(self, ends: Ends, key: str | None) -> None:
        a, b = ends
        tensors = [
            block(SMALL),
            block(3 * LARGE).view(3, LARGE).t(),
            block(LARGE).view(torch.bfloat16).view(2, -1),
            block(24).lt(128),
            torch.complex(torch.ones(3), torch.ones(3)).conj(),
            torch.tensor(3.5),
            torch.empty(0, 7),
        ]
        for tensor in tensors:
            a.send_tensor(tensor, key)
        for tensor in tensors:
            out = torch.zeros(tensor.shape, dtype=tensor.dtype)
            assert b.recv_tensor(key, timeout=SOON_SECONDS, out=out) is out
            assert same(out, tensor)
        a.send_tensor(None, key)
        out = block(SMALL)
        assert b.recv_tensor(key, timeout=SOON_SECONDS, out=out) is None
        assert same(out, block(SMALL))

    @pytest.mark.parametrize("nbytes", [SMALL, LARGE])
    def test_a_tensor_that_does_not_fit_out_is_not_lost(self, ends: Ends, nbytes: int) -> None:
        a, b = ends
        for number in range(2):
            a.send_tensor(block(2 * nbytes, number).view(2, nbytes), "k")
        wrong = [
            block(nbytes),
            block(2 * nbytes),
            block(2 * nbytes).view(torch.int8).view(2, nbytes),
            block(2 * nbytes).view(nbytes, 2).t(),
            block(nbytes).expand(2, nbytes),
            torch.empty(2, nbytes, dtype=torch.uint8, device="meta"),
        ]
        for out in wrong:
            for key in ("k", ANY_KEY):
                with pytest.raises(CodecError):
                    b.recv_tensor(key, timeout=SOON_SECONDS, out=out)
        for number in range(2):
            out = torch.empty(2, nbytes, dtype=torch.uint8)
            b.recv_tensor("k", timeout=SOON_SECONDS, out=out)
            assert same(out, block(2 * nbytes, number).view(2, nbytes))

    def test_out_is_unchanged_if_no_tensor_arrives(self, ends: Ends) -> None:
        a, b = ends
        out = torch.zeros(LARGE, dtype=torch.uint8)
        with pytest.raises(LookupTimeout):
            b.recv_tensor("k", timeout=SHORT_SECONDS, out=out)
        a.send_tensor(block(LARGE), "k")
        assert same(b.recv_tensor("k", timeout=SOON_SECONDS), block(LARGE))
        assert not out.any()

    # -- what travels

    @pytest.mark.parametrize("dtype", sorted(name for name in DTYPES if hasattr(torch, name)))
    def test_every_dtype_arrives_bit_for_bit(self, ends: Ends, dtype: str) -> None:
        a, b = ends
        width = DTYPES[dtype]
        tensor = block(24 * width).view(getattr(torch, dtype)).view(2, 3, 4)
        if dtype == "bool":
            tensor = block(24).lt(128).view(2, 3, 4)
        a.send_tensor(tensor)
        received = b.recv_tensor(timeout=SOON_SECONDS)
        assert received is not None
        assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
        raw = [t.contiguous().view(torch.uint8).flatten() for t in (received, tensor)]
        assert torch.equal(*raw)

    @pytest.mark.parametrize("key", [None, "k"])
    def test_shapes_and_strides_of_all_kinds(self, ends: Ends, key: str | None) -> None:
        a, b = ends
        base = torch.arange(60.0).view(3, 4, 5)
        tensors = [
            torch.tensor(3.5),
            torch.empty(0, 7),
            base.permute(2, 0, 1),
            base[:, ::2],
            base[0].expand(6, 4, 5),
            torch.complex(base, -base).conj(),
            torch.nn.Parameter(base),
            block(3 * LARGE).view(3, LARGE).t(),
        ]
        for tensor in tensors:
            a.send_tensor(tensor, key)
        for tensor in tensors:
            assert same(b.recv_tensor(key, timeout=SOON_SECONDS), tensor.detach())

    def test_a_value_of_an_unsupported_type_is_refused_without_side_effects(
        self, ends: Ends
    ) -> None:
        a, b = ends
        for wrong in (torch.eye(3).to_sparse(), torch.empty(3, device="meta"), "text"):
            with pytest.raises(CodecError):
                a.send_tensor(wrong)  # type: ignore[arg-type]
        for key in (5, "k" * 5000, b"bytes"):
            with pytest.raises(InvalidKey):
                a.send_tensor(block(1), key)  # type: ignore[arg-type]
            with pytest.raises(InvalidKey):
                b.recv_tensor(key)  # type: ignore[arg-type]
        a.send_tensor(block(SMALL))
        assert same(b.recv_tensor(timeout=SOON_SECONDS), block(SMALL))


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


SCHEMES = ("inproc", "shm", "tcp", "redis", "gloo")
_numbers = count()


@pytest.fixture(params=SCHEMES)
def make_ends(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    valkey_server: EmbeddedServer,
    closing: ExitStack,
) -> MakeEnds:
    def make(limits: PipeLimits | None = None) -> Ends:
        number = next(_numbers)
        uris = {
            "inproc": f"inproc://every-{number}",
            "shm": f"shm://{tmp_path}/{number}",
            "tcp": "tcp://127.0.0.1:0",
            "redis": f"{valkey_server.url}?pipe=every-{number}",
            "gloo": "gloo://127.0.0.1:0",
        }
        a = open_pipe(uris[request.param], listen=True, limits=limits)
        closing.callback(a.abort)
        b = open_pipe(a.uri, limits=limits)
        closing.callback(b.abort)
        return a, b

    return make


@pytest.fixture
def ends(make_ends: MakeEnds) -> Ends:
    return make_ends()
