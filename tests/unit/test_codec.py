"""The codec: every dtype and every unusual tensor is restored bit for bit."""

import ctypes
import gc
import mmap
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from lookup_buffer.codec import (
    check_out,
    contiguous_bytes,
    copy_into,
    copy_of,
    empty_tensor,
    header_of,
    tensor_over,
)
from lookup_buffer.errors import CodecError
from lookup_buffer.protocol.header import DTYPES, TensorHeader
from patience import scaled

HERE = [name for name in DTYPES if hasattr(torch, name)]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The value's bytes by another route than the codec's."""
    owner, address, nbytes = contiguous_bytes(tensor)
    data = ctypes.string_at(address, nbytes)
    del owner
    return data


def pattern(dtype_name: str, count: int) -> torch.Tensor:
    """All bit patterns in turn, NaNs and denormals included (but for bool: 0 and 1)."""
    dtype = getattr(torch, dtype_name)
    values = torch.arange(count * dtype.itemsize, dtype=torch.int64).mul_(37).to(torch.uint8)
    if dtype_name == "bool":
        values &= 1
    return values.view(dtype)


def test_the_table_has_the_widths_that_torch_has() -> None:
    assert {name: getattr(torch, name).itemsize for name in HERE} == {
        name: DTYPES[name] for name in HERE
    }
    required = {"bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "complex128", "uint16"}
    assert required <= set(HERE)


def test_every_dtype_with_plain_bytes_is_in_the_table() -> None:
    all_dtypes = {str(d)[6:] for d in vars(torch).values() if isinstance(d, torch.dtype)}
    unsupported = {n for n in all_dtypes - set(DTYPES) if not n.startswith(("q", "bits"))}
    assert unsupported - {"bit"} == set()


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 1, 6), (), (0,), (3, 0, 2)])
def test_round_trip_is_bit_exact(name: str, shape: tuple[int, ...]) -> None:
    count = 1
    for size in shape:
        count *= size
    tensor = pattern(name, count).view(shape)
    header = header_of(tensor)
    header.validate()
    owner, address, nbytes = contiguous_bytes(tensor)
    assert (header.dtype, header.shape, nbytes) == (name, shape, header.nbytes)

    out = empty_tensor(header)
    check_out(out, header)
    copy_into(out, address, nbytes)
    seen = tensor_over(raw_bytes(tensor), header)
    for copy in (out, seen):
        assert copy.dtype is tensor.dtype
        assert copy.shape == tensor.shape
        assert raw_bytes(copy) == raw_bytes(tensor)
    del owner


@pytest.mark.parametrize("name", HERE)
def test_non_contiguous_tensors_travel_in_row_major_order(name: str) -> None:
    itemsize = DTYPES[name]
    tensor = pattern(name, 24).view(4, 6)
    data = raw_bytes(tensor)
    rows = [[data[(r * 6 + c) * itemsize :][:itemsize] for c in range(6)] for r in range(4)]
    transposed = b"".join(rows[r][c] for c in range(6) for r in range(4))
    every_other = b"".join(rows[r][c] for r in range(4) for c in range(0, 6, 2))
    expanded = b"".join(b"".join(rows[0]) for _ in range(3))
    assert raw_bytes(tensor.t()) == transposed
    assert raw_bytes(tensor[:, ::2]) == every_other
    assert raw_bytes(tensor[:1].expand(3, 6)) == expanded


@pytest.mark.parametrize("name", HERE)
def test_copy_into_a_non_contiguous_destination(name: str) -> None:
    source = pattern(name, 12).view(3, 4)
    backing = pattern(name, 24).view(3, 8)
    untouched = raw_bytes(backing[:, 1::2])
    owner, address, nbytes = contiguous_bytes(source)
    copy_into(backing[:, ::2], address, nbytes)
    assert raw_bytes(backing[:, ::2]) == raw_bytes(source)
    assert raw_bytes(backing[:, 1::2]) == untouched
    del owner


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugated_and_negated_tensors_are_resolved(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 3, dtype=dtype)
    conjugated, negated = tensor.conj(), tensor.conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    for lazy in (conjugated, negated):
        resolved = lazy.resolve_conj().resolve_neg()
        assert raw_bytes(lazy) == raw_bytes(resolved.clone())
        out = empty_tensor(header_of(lazy))
        owner, address, nbytes = contiguous_bytes(lazy)
        copy_into(out, address, nbytes)
        assert torch.equal(out, lazy)
        del owner


def test_a_lazily_conjugated_destination_gets_the_value() -> None:
    source = torch.randn(4, dtype=torch.complex64)
    backing = torch.zeros(4, dtype=torch.complex64)
    owner, address, nbytes = contiguous_bytes(source)
    copy_into(backing.conj(), address, nbytes)
    assert torch.equal(backing.conj().resolve_conj(), source)
    del owner


def test_a_gradient_is_not_carried() -> None:
    tensor = torch.nn.Parameter(torch.randn(3))
    owner, address, nbytes = contiguous_bytes(tensor)
    assert not owner.requires_grad
    out = torch.zeros(3, requires_grad=True)
    check_out(out, header_of(tensor))
    copy_into(out, address, nbytes)
    assert torch.equal(out, tensor)
    assert out.grad_fn is None


def test_contiguous_cpu_tensors_are_not_copied() -> None:
    tensor = torch.randn(64, 64, requires_grad=True)
    owner, address, nbytes = contiguous_bytes(tensor)
    assert address == tensor.data_ptr()
    assert nbytes == 64 * 64 * 4
    assert owner.data_ptr() == tensor.data_ptr()
    row = tensor[3]
    assert contiguous_bytes(row)[1] == row.data_ptr() == tensor.data_ptr() + 3 * 64 * 4


def test_channels_last_is_not_mistaken_for_row_major() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert raw_bytes(tensor) == raw_bytes(tensor.clone(memory_format=torch.contiguous_format))


def test_none_is_a_value_without_a_tensor() -> None:
    header = header_of(None)
    header.validate()
    assert header == TensorHeader("", (), 0, "none")
    with pytest.raises(CodecError, match="None"):
        empty_tensor(header)
    with pytest.raises(CodecError, match="None"):
        tensor_over(b"", header)


def test_tensor_over_read_only_memory_shares_it_without_a_warning() -> None:
    with mmap.mmap(-1, 4096) as mapped:
        mapped[:8] = bytes(range(8))
        header = TensorHeader.for_tensor("uint8", (8,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = tensor_over(memoryview(mapped)[:8].toreadonly(), header)
        assert tensor.tolist() == list(range(8))
        mapped[0] = 99
        assert tensor[0] == 99
        del tensor


def test_tensor_over_keeps_its_buffer_exported_until_the_last_view_dies() -> None:
    mapped = mmap.mmap(-1, 4096)
    tensor = tensor_over(memoryview(mapped)[64:128], TensorHeader.for_tensor("int32", (4, 4)))
    part = tensor[1:, 2]
    del tensor
    gc.collect()
    with pytest.raises(BufferError):
        mapped.close()
    del part
    gc.collect()
    mapped.close()


def test_tensor_over_does_not_release_the_callers_view() -> None:
    view = memoryview(bytearray(range(16)))
    del_me = tensor_over(view, TensorHeader.for_tensor("uint8", (16,)))
    del del_me
    gc.collect()
    assert view[3] == 3


@pytest.mark.parametrize("nbytes", [0, 15, 17])
def test_tensor_over_refuses_another_length(nbytes: int) -> None:
    with pytest.raises(CodecError):
        tensor_over(bytearray(nbytes), TensorHeader.for_tensor("float32", (4,)))


def test_tensor_over_refuses_a_strided_buffer() -> None:
    with pytest.raises(CodecError):
        tensor_over(memoryview(bytearray(32))[::2], TensorHeader.for_tensor("uint8", (16,)))


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(4, 3),
        torch.zeros(12),
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(3, 4, dtype=torch.int32),
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(3, 4, device="meta"),
        torch.zeros(3, 4).to_sparse(),
    ],
)
def test_check_out_refuses_a_destination_that_does_not_fit(out: torch.Tensor) -> None:
    with pytest.raises(CodecError):
        check_out(out, TensorHeader.for_tensor("float32", (3, 4)))


def test_copy_into_refuses_another_size_before_touching_memory() -> None:
    source = torch.ones(8)
    with pytest.raises(CodecError):
        copy_into(torch.zeros(4), source.data_ptr(), 32)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros((1,) * 17),
    ],
)
def test_kinds_that_are_not_carried(tensor: torch.Tensor) -> None:
    with pytest.raises(CodecError):
        contiguous_bytes(tensor)
    with pytest.raises(CodecError):
        header_of(tensor)


@pytest.mark.parametrize("left", [0, 4 * 39])
@pytest.mark.parametrize("view", [slice(None), slice(None, None, 3)])
def test_a_tensor_without_its_storage_is_refused(left: int, view: slice) -> None:
    """What sharded training leaves of a parameter; its address is 0."""
    tensor = torch.ones(40)[view]
    tensor.untyped_storage().resize_(left)
    for use in (copy_of, contiguous_bytes, header_of):
        with pytest.raises(CodecError, match="was freed"):
            use(tensor)
    tensor.untyped_storage().resize_(4 * 40)
    assert copy_of(tensor) is not None


@pytest.fixture(scope="module")
def fake_mode() -> Any:
    """Made here, since torch imports for seconds where it is made first."""
    return pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode()


def test_fake_and_foreign_values_are_not_carried(fake_mode: Any) -> None:
    with fake_mode:
        fake = torch.empty(3)
    with pytest.raises(CodecError):
        contiguous_bytes(fake)
    with pytest.raises(CodecError):
        header_of([1, 2, 3])  # type: ignore[arg-type]


def test_unknown_dtype_of_a_newer_peer_is_a_codec_error() -> None:
    with pytest.raises(CodecError, match="float3"):
        empty_tensor(TensorHeader("float3", (1,), 1))


def test_large_copies_let_other_threads_run() -> None:
    source = torch.ones(64 << 20, dtype=torch.uint8)
    out = torch.zeros_like(source)
    copying, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        copying.wait(10)
        while copying.is_set():
            ticks += 1
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(10)  # so that only a released GIL lets the other thread run
    try:
        copying.set()
        for _ in range(10):
            copy_into(out, source.data_ptr(), source.nbytes)
    finally:
        sys.setswitchinterval(before)
        copying.clear()
        thread.join(10)
    assert ticks > 0
    assert torch.equal(out, source)


@pytest.mark.processes
def test_the_header_needs_no_torch() -> None:
    code = (
        "import sys, lookup_buffer.protocol.header, lookup_buffer.protocol.stream;"
        "sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=scaled(60), check=False).returncode
        == 0
    )


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(HERE),
    shape=st.lists(st.integers(0, 4), max_size=5),
    data=st.data(),
)
def test_any_permuted_and_sliced_tensor(name: str, shape: list[int], data: st.DataObject) -> None:
    count = 1
    for size in shape:
        count *= size
    tensor = pattern(name, count).view(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for dim, size in enumerate(tensor.shape):
        if size:
            tensor = tensor.narrow(dim, start := data.draw(st.integers(0, size - 1)), size - start)
    header = header_of(tensor)
    owner, address, nbytes = contiguous_bytes(tensor)
    out = empty_tensor(header)
    copy_into(out, address, nbytes)
    assert raw_bytes(out) == raw_bytes(tensor)
    assert tuple(out.shape) == tuple(tensor.shape)
    del owner
