"""Entry point of the command `lookup-buffer`; the commands are in `lookup_buffer.cli.commands`.

Runs on the main thread. Imports only the standard library before `main` has set its handler for
SIGINT.
"""

import os
import signal

INTERRUPTED = 130
"""Equal to `ExitCode.INTERRUPTED`, which is not imported yet."""


def main() -> None:
    """Run the command that the arguments name.

    Importing its modules takes longer than many commands do. Ctrl-C during the imports ends the
    process at once and prints nothing: there is nothing to undo yet.
    """
    ours = signal.default_int_handler
    # A SIGINT that is ignored, as in a background job of a shell, stays ignored.
    listens = signal.getsignal(signal.SIGINT) is ours
    if listens:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from lookup_buffer.cli.commands import app

    if listens:
        signal.signal(signal.SIGINT, ours)
    app()
