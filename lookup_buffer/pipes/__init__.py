"""Pipes: tensors from one end to the other, in order or by key.

    with open_pipe("tcp://10.0.0.1:5600") as pipe:
        pipe.send_tensor(tensor)               # received in the order of sending
        pipe.send_tensor(other, "layer-7")     # or under a key, received in any order

The scheme selects the pipe's module, which is imported on first use. `pipe.KVPipe` is the contract.
"""

from lookup_buffer.pipes.pipe import ANY_KEY, SCHEMES, KVPipe, PipeLimits, open_pipe

__all__ = ["ANY_KEY", "SCHEMES", "KVPipe", "PipeLimits", "open_pipe"]
