"""Two programs that reach one database, and a pipe through it. Start both, in any order:

python examples/pipe_redis.py receive 'redis://db.example:6379/0?pipe=layers'
python examples/pipe_redis.py send 'redis://db.example:6379/0?pipe=layers'
"""

import sys

import torch

from lookup_buffer.pipes import open_pipe


def send(uri: str) -> None:
    with open_pipe(uri) as pipe:  # waits until the other end listens
        for layer in range(4):
            pipe.send_tensor(torch.full((1024, 1024), float(layer)), f"layer-{layer}")
        pipe.send_tensor(None)  # without a key: first in, first out
    # What was sent is received before `close` returns, within `PipeLimits.linger_seconds`.


def receive(uri: str) -> None:
    with open_pipe(uri, listen=True) as pipe:
        for layer in (3, 0, 2, 1):  # by key, in any order
            tensor = pipe.recv_tensor(f"layer-{layer}", timeout=60.0)
            assert tensor is not None
            print(f"layer-{layer}: {tuple(tensor.shape)} of {tensor.mean():g}")
        assert pipe.recv_tensor(timeout=60.0) is None


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](sys.argv[2])
