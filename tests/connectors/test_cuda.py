"""What the connectors ask of a GPU: pinned arenas, copies in order with the model's work, pages.

Skipped where there is none. `test_paged` and `test_ec_copies` run the same code on the host.
"""

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from connectors.ec.cuda import CudaDevice
from connectors.kv.worker import CudaPages, HostPages
from lookup_buffer.codec import tensor_over
from lookup_buffer.protocol.header import TensorHeader
from nodes import NodeProcess, StartNode
from test_paged import BLOCKS, DTYPES, LAYERS, LAYOUTS, cache, pages, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
GPU = "cuda:0"
CHUNK = (5, 0, 3)
_cuda: Any = torch.cuda  # much of it has no types
BUSY_CYCLES = 200_000_000
"""About 0.1 s of a kernel that only waits."""


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(GPU)


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    return start_node()


@pytest.fixture
def arena(node: NodeProcess) -> Iterator[memoryview]:
    with node.client("reader") as buffer:
        yield buffer.arena(buffer.boot)


def over(memory: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor_over(memory, TensorHeader.for_tensor(dtype, shape))


def test_an_arena_that_is_mapped_to_read_can_be_pinned(
    device: CudaDevice, arena: memoryview
) -> None:
    assert device.pin(arena)
    source = over(arena[: 1 << 20], "uint8", (1 << 20,))
    assert source.is_pinned(), "copies from it pass no memory of the driver"
    there = device.upload(source)
    device.uploaded().synchronize()
    assert torch.equal(there.cpu(), source)
    device.unpin(arena)
    assert not source.is_pinned()


def test_a_refused_pin_leaves_no_error_to_the_models_thread(
    device: CudaDevice, arena: memoryview
) -> None:
    """CUDA keeps each thread's last error, and torch raises it at that thread's next kernel."""
    assert device.pin(arena)
    with ThreadPoolExecutor(1) as thread:  # as `DeviceCopies` has one
        assert not thread.submit(device.pin, arena).result(), "it is pinned already"
        assert int(torch.ones(8, device=GPU).sum()) == 8
        thread.submit(device.upload, torch.ones(8)).result()
        thread.submit(device.uploaded().synchronize).result()
    device.unpin(arena)


def test_a_load_is_there_for_the_models_next_kernel(device: CudaDevice) -> None:
    source = torch.arange(1 << 22, dtype=torch.int32).pin_memory()
    for number in range(8):
        source.fill_(number)
        loaded = device.upload(source)
        twice = loaded * 2  # on the model's stream
        device.uploaded().synchronize()
        source.fill_(-1)  # the arena's bytes are another item's now
        assert bool((twice == 2 * number).all())


def test_a_load_waits_for_no_kernel_of_the_model(device: CudaDevice) -> None:
    source = torch.ones(1 << 10).pin_memory()
    device.upload(source)
    device.uploaded().synchronize()  # all that is made once was made
    _cuda._sleep(10 * BUSY_CYCLES)
    busy = torch.cuda.current_stream().record_event()
    device.upload(source)
    device.uploaded().synchronize()
    assert not busy.query(), "the copy ended before the kernel"
    busy.synchronize()


def test_an_output_is_stored_as_it_was_at_its_mark(device: CudaDevice) -> None:
    output = torch.zeros(1 << 22, device=GPU)
    for number in range(4):
        _cuda._sleep(BUSY_CYCLES)
        output.fill_(number)
        stored = device.download(output, device.mark())
        assert bool((stored == number).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [CHUNK, (1, 2, 3)], ids=str)
def test_chunks_of_a_gpu_are_those_of_the_host(
    layout: str, dtype: torch.dtype, blocks: tuple[int, ...]
) -> None:
    on_host = pages(cache(layout, dtype), layout)
    on_gpu = pages([layer.to(GPU) for layer in cache(layout, dtype)], layout)
    there = CudaPages(named(on_gpu), BLOCKS)
    expected = HostPages(named(on_host), BLOCKS).gather(blocks, None)

    chunk = there.gather(blocks, there.mark())
    assert same(chunk, expected)

    for layer in on_gpu:
        layer.zero_()
    there.scatter(blocks[1:], chunk, 1, there.mark())
    for index, layer in enumerate(on_gpu):
        for place, number in enumerate(blocks[1:], 1):
            assert same(layer[number].cpu(), expected[index, place])
        assert not layer[6].cpu().view(torch.uint8).any(), "a block that was not loaded"


def named(layers: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    assert len(layers) == LAYERS
    return {str(number): layer for number, layer in enumerate(layers)}


def test_pages_are_copied_behind_their_mark() -> None:
    layers = pages([layer.to(GPU) for layer in cache("cpu")], "cpu")
    there = CudaPages(named(layers), BLOCKS)
    for number in range(4):
        _cuda._sleep(BUSY_CYCLES)
        for layer in layers:
            layer.fill_(number)
        assert bool((there.gather(CHUNK, there.mark()) == number).all())


def test_a_load_comes_behind_what_the_model_still_reads() -> None:
    """The blocks of a load were another request's; its last kernels may still run."""
    layers = pages([layer.to(GPU) for layer in cache("cpu")], "cpu")
    there = CudaPages(named(layers), BLOCKS)
    before = [layer.clone() for layer in layers]
    _cuda._sleep(BUSY_CYCLES)
    read = [layer.clone() for layer in layers]
    chunk = torch.full((LAYERS, len(CHUNK), *layers[0].shape[1:]), -1.0)
    there.scatter(CHUNK, chunk, 0, there.mark())
    for seen, was in zip(read, before, strict=True):
        assert torch.equal(seen, was)
    for layer in layers:
        assert bool((layer[list(CHUNK)] == -1).all())


def test_a_window_of_an_arena_is_loaded_into_pages(arena: memoryview) -> None:
    """Also where it does not begin at a page of memory, and the arena is not pinned."""
    layers = pages([layer.to(GPU) for layer in cache("cpu")], "cpu")
    there = CudaPages(named(layers), BLOCKS)
    nbytes = there.chunk_bytes(len(CHUNK))
    window = arena[mmap.PAGESIZE + 256 :][:nbytes]
    shape = (LAYERS, len(CHUNK), *layers[0].shape[1:])
    chunk = over(window, "float32", shape)
    there.scatter(CHUNK, chunk, 0, there.mark())
    for index, layer in enumerate(layers):
        assert same(layer[list(CHUNK)].cpu(), chunk[index])
