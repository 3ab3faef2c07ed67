"""Chunks of KV on their way out of vLLM's blocks.

The model's thread only says which blocks to store. They are copied by the thread of the
`SaveQueue`; where vLLM is about to give a block other content before, by the model's thread, then.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lookup_buffer.errors import BufferFull

if TYPE_CHECKING:
    import torch

    from connectors.kv.pages import Pages


class PagedChunk:
    """A chunk that still lies in vLLM's blocks, or was copied out of them."""

    def __init__(self, pages: "Pages", blocks: Sequence[int], after: Any) -> None:
        self._pages = pages
        self._after = after
        self.blocks = blocks
        self.nbytes = pages.chunk_bytes(len(blocks))
        self._lock = threading.Lock()
        self._copy: torch.Tensor | None = None
        self._done = False

    @property
    def is_out(self) -> bool:
        """Whether the blocks are no longer needed for it."""
        return self._done or self._copy is not None

    def copy_out(self) -> "torch.Tensor":
        """Its bytes, copied once, by whoever asks first; not to be asked for after `let_go`.

        Raises:
            BufferFull: its blocks got other content before there was memory for a copy.
        """
        with self._lock:
            if self._done:
                raise BufferFull("there was no memory for a copy of what its blocks held")
            if self._copy is None:
                self._copy = self._pages.gather(self.blocks, self._after)
            return self._copy

    def secure(self) -> None:
        """Its blocks get other content: what is still needed of them is copied."""
        with self._lock:
            if not self.is_out:
                self._copy = self._pages.gather(self.blocks, self._after)

    def let_go(self) -> None:
        """Nobody will ask for it any more: it was stored, or will not be."""
        with self._lock:
            self._done, self._copy = True, None


class BlocksInUse:
    """Which blocks hold chunks that are still to be copied. The model's thread only.

    A block may belong to several: prompts that begin alike share vLLM's blocks up to there, within
    a chunk, and each may be handed over.
    """

    def __init__(self) -> None:
        self._chunks: list[PagedChunk] = []

    def add(self, chunk: PagedChunk) -> None:
        self._chunks.append(chunk)

    def give_way(self, written: Iterable[int]) -> int:
        """Blocks that get other content now: what is in them is copied first, or given up where
        there is no memory for that. How many chunks."""
        if not self._chunks:
            return 0
        self._chunks = [chunk for chunk in self._chunks if not chunk.is_out]
        blocks = set(written)
        due = [chunk for chunk in self._chunks if not blocks.isdisjoint(chunk.blocks)]
        for chunk in due:
            try:
                chunk.secure()
            except Exception:  # noqa: BLE001 -- in the model's thread: vLLM goes on without it
                chunk.let_go()
        return len(due)
