"""Two processes and a pipe: `python examples/pipe.py [URI]`.

The URI selects the transport; nothing else depends on it.
"""

import multiprocessing
import sys

import torch

from lookup_buffer.pipes import open_pipe


def produce(uri: str) -> None:
    with open_pipe(uri) as pipe:  # waits until the other end listens
        for layer in range(4):
            pipe.send_tensor(torch.full((1024, 1024), float(layer)), f"layer-{layer}")
        pipe.send_tensor(None)  # without a key: first in, first out
    # What was sent is received before `close` returns, within `PipeLimits.linger_seconds`.


def main(uri: str) -> None:
    with open_pipe(uri, listen=True) as pipe:
        producer = multiprocessing.get_context("spawn").Process(target=produce, args=(pipe.uri,))
        producer.start()
        for layer in (3, 0, 2, 1):  # by key, in any order
            tensor = pipe.recv_tensor(f"layer-{layer}", timeout=60.0)
            assert tensor is not None
            print(f"layer-{layer}: {tuple(tensor.shape)} of {tensor.mean():g}")
        assert pipe.recv_tensor(timeout=60.0) is None
        producer.join()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "shm:///tmp/lookup-buffer-example")
