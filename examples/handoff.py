"""Two processes and a hand-off: `python examples/handoff.py [DIRECTORY]`.

On one host, with its own node and store. On two hosts, set `store_url` and `listen` on both.
"""

import multiprocessing
import sys

import torch

from lookup_buffer import BufferConfig, LookupBuffer, Namespace, TensorKey


def open_buffer(directory: str) -> LookupBuffer:
    config = BufferConfig(directory=directory, capacity_bytes=64 << 20, idle_exit_seconds=1.0)
    return LookupBuffer(config, Namespace.named("example"))


def key_of(layer: int) -> TensorKey:
    return TensorKey("an-image", request_id="request-7", part=f"layer-{layer}")


def produce(directory: str) -> None:
    with open_buffer(directory) as buffer:
        for layer in range(3):
            buffer.insert(key_of(layer), torch.full((1024, 1024), float(layer)))


def main(directory: str) -> None:
    with open_buffer(directory) as buffer:
        producer = multiprocessing.get_context("spawn").Process(target=produce, args=(directory,))
        producer.start()
        for layer in (2, 0, 1):  # waits until the item is present, and removes it
            tensor = buffer.drop_select(key_of(layer), timeout=60.0)
            assert tensor is not None
            print(f"layer-{layer}: {tuple(tensor.shape)} of {tensor.mean():g}")
        producer.join()
        print("still present:", buffer.has_caches([key_of(layer) for layer in range(3)]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "/tmp/lookup-buffer-example-node")
