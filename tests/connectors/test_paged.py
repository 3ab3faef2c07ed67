"""Gather and scatter against a plain loop, for every layout that vLLM keeps its cache in."""

from collections.abc import Sequence

import pytest
import torch

from connectors.paged import (
    gather_blocks,
    gather_slots,
    pages_of,
    scatter_blocks,
    scatter_slots,
    slots_of,
)

LAYERS, BLOCKS, SIZE, HEADS, HEAD = 3, 7, 4, 2, 8

# Shape in memory, how it is viewed, and the dimension of the blocks in the view.
LAYOUTS = {
    "cpu": ((BLOCKS, HEADS, SIZE, 2 * HEAD), (0, 1, 2, 3), 0),
    "gpu, tokens before heads": ((BLOCKS, SIZE, HEADS, 2 * HEAD), (0, 2, 1, 3), 0),
    "mla": ((BLOCKS, 1, SIZE, 24), (0, 1, 2, 3), 0),
    "flash attention, former": ((2, BLOCKS, SIZE, HEADS, HEAD), (0, 1, 2, 3, 4), 1),
    "flashinfer, former": ((BLOCKS, 2, SIZE, HEADS, HEAD), (0, 1, 2, 3, 4), 0),
    "the first releases": ((2, BLOCKS, SIZE * HEADS * HEAD), (0, 1, 2), 1),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
ORDERS: tuple[Sequence[int], ...] = ((2, 3, 4), (5, 0, 3), (6,), ())


def cache(layout: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Layers of one allocation, as vLLM's lie side by side within a block."""
    shape, view, _ = LAYOUTS[layout]
    count = torch.Size(shape).numel()
    values = torch.arange(LAYERS * count) % 120
    return [layer.view(shape).permute(view) for layer in torch.split(values.to(dtype), count)]


def pages(layers: Sequence[torch.Tensor], layout: str) -> list[torch.Tensor]:
    return [pages_of(layer, BLOCKS, LAYOUTS[layout][2]) for layer in layers]


def block(layer: torch.Tensor, layout: str, number: int) -> torch.Tensor:
    """By plain indexing, without what is under test."""
    dimension = LAYOUTS[layout][2]
    return layer[number] if dimension == 0 else layer[:, number]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_chunks_are_gathered_and_scattered_as_by_a_loop(
    layout: str, dtype: torch.dtype, order: Sequence[int]
) -> None:
    layers = cache(layout, dtype)
    chunk = gather_blocks(pages(layers, layout), order)

    assert chunk.is_contiguous()
    assert chunk.shape[:2] == (LAYERS, len(order))
    for index, layer in enumerate(layers):
        for place, number in enumerate(order):
            assert same(chunk[index, place], block(layer, layout, number))

    others = [torch.zeros_like(layer) for layer in layers]
    scatter_blocks(pages(others, layout), order, chunk)
    for layer, other in zip(layers, others, strict=True):
        for number in range(BLOCKS):
            expected = block(layer if number in order else torch.zeros_like(layer), layout, number)
            assert same(block(other, layout, number), expected)


def test_the_last_blocks_of_a_chunk_leave_those_before_alone() -> None:
    layers = cache("cpu")
    chunk = gather_blocks(layers, (1, 4, 2))
    others = [torch.zeros_like(layer) for layer in layers]
    scatter_blocks(others, (6, 0), chunk, first=1)
    for layer, other in zip(layers, others, strict=True):
        assert torch.equal(other[6], layer[4])
        assert torch.equal(other[0], layer[2])
        assert not other[1:6].any()


def test_kernel_blocks_of_one_block_of_the_manager_go_together() -> None:
    layers = cache("cpu")
    whole = [layer.view(BLOCKS, HEADS, 2, SIZE // 2, -1).movedim(2, 1) for layer in layers]
    kernel = [layer.reshape(2 * BLOCKS, HEADS, SIZE // 2, -1) for layer in whole]
    split = [pages_of(layer, BLOCKS) for layer in kernel]
    chunk = gather_blocks(split, (3, 1))
    for index, layer in enumerate(kernel):
        assert torch.equal(chunk[index, 0], layer[6:8])
        assert torch.equal(chunk[index, 1], layer[2:4])


def test_a_layer_without_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no 4 blocks"):
        pages_of(torch.zeros(7, 2), 4)


def test_it_gathers_into_memory_that_is_given() -> None:
    layers = cache("cpu")
    out = torch.zeros(LAYERS, 2, HEADS, SIZE, 2 * HEAD)
    assert gather_blocks(layers, (5, 2), out) is out
    assert torch.equal(out[1, 1], layers[1][2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["flash attention, former", "the first releases"])
def test_slots_are_gathered_and_scattered_as_by_a_loop(layout: str, dtype: torch.dtype) -> None:
    keys = [slots_of(layer[0], HEADS, HEAD) for layer in cache(layout, dtype)]
    slots = torch.tensor([9, 0, 26, 3])
    tokens = gather_slots(keys, slots)
    assert tokens.dtype == dtype
    for index, layer in enumerate(keys):
        for place, slot in enumerate(slots.tolist()):
            assert same(tokens[index, place], layer[slot])
    others = [torch.zeros_like(layer) for layer in keys]
    scatter_slots(others, slots, tokens)
    for layer, other in zip(keys, others, strict=True):
        for slot in range(BLOCKS * SIZE):
            expected = layer[slot] if slot in slots.tolist() else torch.zeros_like(layer[slot])
            assert same(other[slot], expected)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; torch compares no eight-bit floats."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
