"""The other end of a pipe, as a process.

`python pipe_child.py echo URI NAME` sends back each message that it receives without a key, under
the key NAME, until it gets None; NCCL takes it for a process of a host of that name, and so lets it
share a GPU. `python pipe_child.py end URI SIGNAL` is a `gloo` sender that
stops itself, or dies, once it has announced its bytes.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import fork_server
from lookup_buffer.pipes import PipeLimits, open_pipe

Child = subprocess.Popen[bytes] | fork_server.Forked


def launch_child(folder: Path, *arguments: str) -> Child:
    """Start it, as a fork of a process that has imported torch; its log is in `folder`."""
    log = folder / f"{arguments[-1]}.log"
    environment = os.environ | {"NCCL_HOSTID": arguments[-1]}
    return fork_server.launch(
        "pipe_child", arguments, log=log, environment=environment, preloaded="pipe_child"
    )


def echo(uri: str, name: str) -> None:
    with open_pipe(uri, limits=PipeLimits(silence_seconds=60.0)) as pipe:
        pipe.send_tensor(None, f"{name} is there")
        while (tensor := pipe.recv_tensor()) is not None:
            pipe.send_tensor(tensor, name)


def end(uri: str, name: str) -> None:
    import torch

    from lookup_buffer.pipes.gloo import GlooCommunicator

    def end_process(self: GlooCommunicator, memory: memoryview, timeout: float) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    GlooCommunicator.send = end_process  # type: ignore[method-assign]
    with open_pipe(uri) as pipe:
        pipe.send_tensor(None, "there")
        pipe.send_tensor(torch.zeros(1 << 20, dtype=torch.uint8))
        pipe.recv_tensor()


if __name__ == "__main__":
    {"echo": echo, "end": end}[sys.argv[1]](*sys.argv[2:])
