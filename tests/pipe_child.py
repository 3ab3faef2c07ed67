"""The other end of a pipe, as a process: `python pipe_child.py URI NAME`.

Sends back each message that it receives without a key, under the key NAME, until it gets None.
"""

import sys

from lookup_buffer.pipes import PipeLimits, open_pipe


def main() -> None:
    uri, name = sys.argv[1:]
    with open_pipe(uri, limits=PipeLimits(silence_seconds=60.0)) as pipe:
        pipe.send_tensor(None, f"{name} is there")
        while (tensor := pipe.recv_tensor()) is not None:
            pipe.send_tensor(tensor, name)


if __name__ == "__main__":
    main()
