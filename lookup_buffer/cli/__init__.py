"""The command `lookup-buffer`: where it begins. What there is to command: `commands`."""

import os
import signal

INTERRUPTED = 130
"""As `exits.ExitCode` has it, which is still to be imported."""


def main() -> None:
    """Run the command that the arguments name. Ctrl-C while its modules are imported, which takes
    longer than much of what they do, ends it without a word: there is nothing to undo yet."""
    ours = signal.default_int_handler
    # Else it is ignored, as in what a shell has put into the background.
    listens = signal.getsignal(signal.SIGINT) is ours
    if listens:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from lookup_buffer.cli.commands import app

    if listens:
        signal.signal(signal.SIGINT, ours)
    app()
