"""A sender that stops itself, or dies, once it has announced its bytes: `python gloo_child.py URI
SIGNAL`."""

import os
import signal
import sys

import torch

from lookup_buffer.pipes import open_pipe
from lookup_buffer.pipes.gloo import GlooCommunicator


def main() -> None:
    uri, name = sys.argv[1:]

    def end(self: GlooCommunicator, memory: memoryview, timeout: float) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    GlooCommunicator.send = end  # type: ignore[method-assign]
    with open_pipe(uri) as pipe:
        pipe.send_tensor(None, "there")
        pipe.send_tensor(torch.zeros(1 << 20, dtype=torch.uint8))
        pipe.recv_tensor()


if __name__ == "__main__":
    main()
