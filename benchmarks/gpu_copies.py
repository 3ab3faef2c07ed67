"""Copies between an arena and a GPU, as the connectors make them, beside bare copies of torch's.

Starts a Valkey and a node; this process maps the node's arena. In interleaved rounds, medians:

- `load`: an item from the pinned arena to the GPU (`CudaDevice.upload`) until it is there; `issue`
  is what of it the model's thread spends. `unpinned` is the same from an arena that is not pinned.
  `bare` is one copy from pinned memory into memory of the GPU that exists already;
- `store`: an output to pinned host memory (`CudaDevice.download`), beside one bare copy;
- `kv_load`, `kv_store`: a chunk of 256 tokens of a model with 32 layers and 128 KiB a token (32
  MiB), from the arena into vLLM's blocks and back, beside one bare copy of its bytes. The blocks
  are consecutive, or not.

`pin_seconds` is how long pinning the arena takes, which happens once, in the background.

    python -m benchmarks.gpu_copies [--rounds 15]
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gauge import emit, machine, paired_ratio, seconds_of
from connectors.ec.cuda import CudaDevice
from connectors.kv.worker import CudaPages
from lookup_buffer import BufferConfig, LookupBuffer
from lookup_buffer.codec import tensor_over
from lookup_buffer.protocol.header import TensorHeader
from store import EmbeddedServer

SIZES: Final = (256 << 10, 1 << 20, 8 << 20, 32 << 20, 128 << 20)
CAPACITY_BYTES: Final = 2 << 30
GPU: Final = "cuda:0"
LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, HEAD = 32, 512, 16, 8, 256
CHUNK_BLOCKS: Final = 16

Ways = dict[str, Callable[[], object]]


def rounds_of(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, by turns, after one turn that does not count."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, action in ways.items() if number % 2 else reversed(ways.items()):
            torch.cuda.synchronize()
            seconds = seconds_of(action)
            if number:
                taken[way].append(seconds)
    return taken


def figures(nbytes: int, ways: Ways, rounds: int) -> dict[str, Any]:
    """The first way beside the others: milliseconds, and the ratio of each to it."""
    taken = rounds_of(ways, rounds)
    first = next(iter(ways))
    return {
        "bytes": nbytes,
        **{f"{way}_ms": round(statistics.median(of) * 1e3, 3) for way, of in taken.items()},
        "bare_gb_per_s": round(nbytes / statistics.median(taken["bare"]) / 1e9, 1),
        **{
            f"{first}_time_over_{way}": paired_ratio(taken[first], taken[way])
            for way in ways
            if way != first
        },
    }


class Copied:
    """An arena, the GPU, and memory for bare copies."""

    def __init__(self, arena: memoryview, rounds: int) -> None:
        self.device = CudaDevice(GPU)
        header = TensorHeader.for_tensor("uint8", (arena.nbytes,))
        self._arena = tensor_over(arena, header)
        self._unpinned = torch.zeros(max(SIZES), dtype=torch.uint8)
        self._pinned = torch.zeros(max(SIZES), dtype=torch.uint8).pin_memory()
        self._there = torch.zeros(max(SIZES), dtype=torch.uint8, device=GPU)
        self._rounds = rounds

    def _bare_load(self, nbytes: int) -> None:
        self._there[:nbytes].copy_(self._pinned[:nbytes], non_blocking=True)
        torch.cuda.synchronize()

    def _bare_store(self, nbytes: int) -> None:
        self._pinned[:nbytes].copy_(self._there[:nbytes], non_blocking=True)
        torch.cuda.synchronize()

    def _load(self, source: torch.Tensor) -> torch.Tensor:
        loaded = self.device.upload(source)
        self.device.uploaded().synchronize()
        return loaded

    def load(self, nbytes: int) -> dict[str, Any]:
        issues: list[float] = []
        source = self._arena[:nbytes]

        def load() -> None:
            start = time.perf_counter()
            self.device.upload(source)
            issues.append(time.perf_counter() - start)
            self.device.uploaded().synchronize()

        ways: Ways = {
            "load": load,
            "unpinned": lambda: self._load(self._unpinned[:nbytes]),
            "bare": lambda: self._bare_load(nbytes),
        }
        found = figures(nbytes, ways, self._rounds)
        return found | {"issue_us": round(statistics.median(issues) * 1e6, 1)}

    def store(self, nbytes: int) -> dict[str, Any]:
        output = self._there[:nbytes]
        ways: Ways = {
            "store": lambda: self.device.download(output, self.device.mark()),
            "bare": lambda: self._bare_store(nbytes),
        }
        return figures(nbytes, ways, self._rounds)

    def kv(self, blocks: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        layers = {
            str(number): torch.zeros(
                (BLOCKS, HEADS, BLOCK_TOKENS, HEAD), dtype=torch.bfloat16, device=GPU
            )
            for number in range(LAYERS)
        }
        pages = CudaPages(layers, BLOCKS)
        nbytes = pages.chunk_bytes(len(blocks))
        shape = (LAYERS, len(blocks), HEADS, BLOCK_TOKENS, HEAD)
        pinned = self._arena[:nbytes].view(torch.bfloat16).view(shape)
        unpinned = self._unpinned[:nbytes].view(torch.bfloat16).view(shape)
        loads: Ways = {
            "kv_load": lambda: pages.scatter(blocks, pinned, 0, pages.mark()),
            "unpinned": lambda: pages.scatter(blocks, unpinned, 0, pages.mark()),
            "bare": lambda: self._bare_load(nbytes),
        }
        stores: Ways = {
            "kv_store": lambda: pages.gather(blocks, pages.mark()),
            "bare": lambda: self._bare_store(nbytes),
        }
        return figures(nbytes, loads, self._rounds), figures(nbytes, stores, self._rounds)


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    with EmbeddedServer.start(directory / "valkey", timeout_seconds=10.0) as server:
        config = BufferConfig(
            directory=directory / "node",
            node_id="node",
            capacity_bytes=CAPACITY_BYTES,
            store_url=server.url,
            idle_exit_seconds=2.0,
        )
        with LookupBuffer(config) as buffer:
            time.sleep(2.0)  # until the arena is faulted in
            arena = buffer.arena(buffer.boot)
            copied = Copied(arena, rounds)
            start = time.perf_counter()
            pinned = copied.device.pin(arena)
            pin_seconds = time.perf_counter() - start
            consecutive = list(range(CHUNK_BLOCKS))
            scattered = random.Random(0).sample(range(BLOCKS), CHUNK_BLOCKS)
            kv = {"consecutive": copied.kv(consecutive), "scattered": copied.kv(scattered)}
            report = {
                "arena_bytes": arena.nbytes,
                "pinned": pinned,
                "pin_seconds": round(pin_seconds, 3),
                "load": [copied.load(nbytes) for nbytes in SIZES],
                "store": [copied.store(nbytes) for nbytes in SIZES],
                "kv_load": {blocks: load for blocks, (load, _) in kv.items()},
                "kv_store": {blocks: store for blocks, (_, store) in kv.items()},
            }
            if pinned:
                copied.device.unpin(arena)
            return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        print("gpu_copies: not run, torch finds no GPU here", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(prefix="lb-") as name:
        report = measure(Path(name), rounds)
    emit(
        {
            "benchmark": "gpu_copies",
            "rounds": rounds,
            "gpu": torch.cuda.get_device_name(GPU),
            "torch": torch.__version__,
            **machine(),
            **report,
        }
    )


if __name__ == "__main__":
    main()
