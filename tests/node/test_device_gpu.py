"""The pool's place on a GPU. Skipped where there is none."""

import pytest
import torch

from lookup_buffer.device.memory import CudaPoolMemory, HostPoolMemory
from lookup_buffer.protocol.header import TensorHeader

a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.gpu
@a_gpu
def test_a_kept_tensor_has_its_value_at_that_point_of_the_callers_stream() -> None:
    place = CudaPoolMemory("cuda:0")
    tensor = torch.zeros(1 << 24, device="cuda:0")
    for number in range(8):
        tensor.fill_(number)
        kept, ready = place.keep(tensor, immutable=False)
        tensor.fill_(-1)  # behind the copy, by the caller's stream
        there = place.on_caller_stream(kept, ready)
        assert bool((there == number).all())


@pytest.mark.gpu
@a_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "float8_e4m3fn"])
def test_room_is_made_for_any_dtype(dtype: str) -> None:
    header = TensorHeader.for_tensor(dtype, (3, 5))
    room = CudaPoolMemory("cuda:0").empty(header)
    assert (str(room.dtype), tuple(room.shape)) == (f"torch.{dtype}", (3, 5))


@pytest.mark.gpu
@a_gpu
def test_device_memory_has_torchs_device_name_and_copies_host_tensors() -> None:
    place = CudaPoolMemory("cuda")
    assert place.device == torch.zeros(1, device="cuda").device
    kept, ready = place.keep(torch.arange(12), immutable=False)
    assert torch.equal(place.on_caller_stream(kept, ready).cpu(), torch.arange(12))


def test_a_tensor_that_shares_its_storage_is_copied_on_the_host() -> None:
    place = HostPoolMemory()
    batch = torch.arange(12).reshape(3, 4)
    alone, _ = place.keep(batch, immutable=True)
    assert alone.data_ptr() == batch.data_ptr()
    for part, immutable in ((batch[1], True), (batch, False), (batch.t(), True)):
        kept, _ = place.keep(part, immutable=immutable)
        assert kept.data_ptr() != part.data_ptr()
        assert torch.equal(kept, part)
