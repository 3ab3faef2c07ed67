"""Copies between a paged KV cache and contiguous tensors. Torch only; any thread; no state.

The cache is addressed in two ways. By *blocks*: a chunk is `[layers, blocks, *page]`, one page for
each block and layer. The content of a page does not matter: keys and values side by side, one
latent vector for both, or a kernel's own packing. By *slots*: the positions of tokens in a slot
mapping.

A layer is a tensor with the blocks along one of its dimensions:

    [B, H, N, C]      vLLM 0.32 on CPU and GPU, C = 2 · D; MLA with H = 1; in memory also N before H
    [2, B, N, H, D]   keys and values of earlier releases (FlashAttention)
    [B, 2, N, H, D]   likewise (FlashInfer)
    [2, B, N · H · D] the first releases, whose cache a slot mapping addresses
"""

from collections.abc import Sequence

import torch

Layers = Sequence[torch.Tensor]


def pages_of(layer: torch.Tensor, num_blocks: int, block_dim: int = 0) -> torch.Tensor:
    """A view of `layer` with the manager's blocks along its first dimension.

    Kernels may divide a block of the manager into several consecutive blocks of their own.

    Raises:
        ValueError: the layer has no whole number of kernel blocks for each of `num_blocks`.
    """
    pages = layer.movedim(block_dim, 0)
    if num_blocks < 1 or pages.shape[0] % num_blocks:
        raise ValueError(f"{tuple(layer.shape)} has no {num_blocks} blocks along {block_dim}")
    split = pages.shape[0] // num_blocks
    if split == 1:
        return pages
    return pages.view(num_blocks, split, *pages.shape[1:])


def gather_blocks(
    pages: Layers, block_ids: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy blocks, in the order of `block_ids`, to a contiguous `[layers, blocks, *page]`: `out`,
    or a new tensor."""
    first = pages[0]
    if out is None:
        shape = (len(pages), len(block_ids), *first.shape[1:])
        out = torch.empty(shape, dtype=first.dtype, device=first.device)
    run = _run(block_ids)
    if run is not None:
        for layer, chunk in zip(pages, out, strict=True):
            chunk.copy_(layer[run])
        return out
    index = torch.tensor(block_ids, dtype=torch.int64, device=first.device)
    for layer, chunk in zip(pages, out, strict=True):
        torch.index_select(_plain(layer), 0, index, out=_plain(chunk))
    return out


def scatter_blocks(
    pages: Layers, block_ids: Sequence[int], chunk: torch.Tensor, first: int = 0
) -> None:
    """Copy the blocks of a chunk, from its block `first` on, to the blocks `block_ids`."""
    part = chunk[:, first : first + len(block_ids)]
    run = _run(block_ids)
    if run is not None:
        for layer, source in zip(pages, part, strict=True):
            layer[run].copy_(source)
        return
    index = torch.tensor(block_ids, dtype=torch.int64, device=pages[0].device)
    for layer, source in zip(pages, part, strict=True):
        _plain(layer).index_copy_(0, index, _plain(source))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; as bytes for eight-bit floats, which torch cannot index."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _run(block_ids: Sequence[int]) -> slice | None:
    """The blocks as a slice where they are consecutive, else None."""
    start = block_ids[0] if block_ids else 0
    if list(block_ids) == list(range(start, start + len(block_ids))):
        return slice(start, start + len(block_ids))
    return None


def slots_of(blocks: torch.Tensor, heads: int, head_size: int) -> torch.Tensor:
    """A view of the keys, or the values, of one layer as `[slots, heads, head_size]`. A token's
    slot is its block's number times the block size, plus its offset in the block.

    Raises:
        RuntimeError: the layout of the layer in memory allows no such view.
    """
    return blocks.view(-1, heads, head_size)


def gather_slots(layers: Layers, slots: torch.Tensor) -> torch.Tensor:
    """Copy the tokens in `slots` to `[layers, tokens, heads, head_size]`."""
    gathered = torch.stack([_plain(layer).index_select(0, slots) for layer in layers])
    return gathered.view(layers[0].dtype)


def scatter_slots(layers: Layers, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Copy `[layers, tokens, ...]`, of the layers' dtype and on any device, to `slots`."""
    for layer, source in zip(layers, tokens, strict=True):
        _plain(layer).index_copy_(0, slots, _plain(source.to(layer.device)))
