"""Exec another program that the kernel kills when the owner process ends.

`python -I -S run_with_owner.py OWNER_PID PROGRAM [ARGUMENT ...]`, started by EmbeddedServer. It
imports no other module of this project, so it starts in a few milliseconds.

The kernel sends the parent-death signal when the *thread* that started this process ends. The
setting survives exec. The signal is SIGKILL, because a frozen server ignores any other.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    owner_pid, program = int(sys.argv[1]), sys.argv[2]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != owner_pid:
        sys.exit("the owner ended before the server was started")
    try:
        os.execv(program, sys.argv[2:])
    except OSError as error:
        sys.exit(f"{program}: {error.strerror}")


if __name__ == "__main__":
    main()
