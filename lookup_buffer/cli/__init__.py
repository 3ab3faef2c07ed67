"""Entry point of the command `lookup-buffer`; the commands are in `lookup_buffer.cli.commands`.

Runs on the main thread. Imports only the standard library before `main` has set its handler for
SIGINT.
"""

import os
import signal

INTERRUPTED = 130
"""Equals `ExitCode.INTERRUPTED`, which is not imported yet."""


def main() -> None:
    """Run the command that the arguments name.

    Importing its modules takes longer than many commands do. Ctrl-C during the imports ends the
    process at once and prints nothing: there is nothing to undo yet.
    """
    default = signal.default_int_handler
    # A SIGINT that is ignored, as in a background job of a shell, stays ignored.
    handles_sigint = signal.getsignal(signal.SIGINT) is default
    if handles_sigint:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from lookup_buffer.cli.commands import app

    if handles_sigint:
        signal.signal(signal.SIGINT, default)
    app()
