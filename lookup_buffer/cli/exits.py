"""How a command ends: an expected error becomes one line on stderr and an exit code.

Defines the click group of all commands, and maps error classes to exit codes and advice. Runs on
the main thread. It must not depend on single commands.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from lookup_buffer.cli.output import shown
from lookup_buffer.errors import ConfigError, InvalidKey, LookupBufferError
from lookup_buffer.inspection.access import CommandError, ExitCode
from store import (
    StoreCorrupt,
    StoreError,
    StoreNotBrowsable,
    StoreRefused,
    StoreUnavailable,
    StoreUrlError,
)

_HELP_INSTEAD = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What click 8.2 and newer raises to print the help of a call without arguments."""


class Commands(click.Group):
    """Turns an expected error of a command into one line and an exit code, without a traceback."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the options. Options that print something and end (--help, --version) act here."""
        with _errors_as_one_line(), _usage_before_its_error():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_as_one_line(), _usage_before_its_error():
            if sys.stdout is None:
                raise CommandError("the output is closed", ExitCode.FOUND)
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # now, while a failure can still be reported


@contextmanager
def _errors_as_one_line() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _discard_output()
        raise click.exceptions.Exit(ExitCode.OUTPUT_CLOSED) from None
    except OSError as error:
        if error.filename is not None:
            _end(f"{error.filename}: {error.strerror}", ExitCode.USAGE)
        _discard_output()
        _end(f"the output cannot be written: {error.strerror or error}", ExitCode.FOUND)
    except KeyboardInterrupt:
        _end("interrupted", ExitCode.INTERRUPTED)
    except CommandError as error:
        _end(str(error), error.code)
    except (ConfigError, InvalidKey, StoreUrlError) as error:
        _end(str(error), ExitCode.USAGE)
    except StoreNotBrowsable as error:
        _end(f"{error}; docs/stores.md says which commands need what", ExitCode.USAGE)
    except StoreCorrupt as error:
        advice = "`lookup-buffer doctor` shows what the server lacks"
        if error.wrong_type:
            advice = "another program wrote keys `lb:*`: remove them"
        _end(f"{error}; {advice}", ExitCode.FOUND)
    except StoreUnavailable as error:
        advice = (
            "start the server, or correct its URL, password or certificates (--store-url, "
            "LOOKUP_BUFFER_STORE_URL)"
        )
        if isinstance(error, StoreRefused) and error.forbidden:
            advice = "give the user the rights in docs/redis-keys.md, or choose another user"
        _end(f"{str(error).rstrip('.')}; {advice}", ExitCode.UNREACHABLE)
    except (StoreError, LookupBufferError) as error:
        _end(str(error), ExitCode.UNREACHABLE)


@contextmanager
def _usage_before_its_error() -> Iterator[None]:
    """Print how a command is called, as click does; the error is a line like any other then."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, _HELP_INSTEAD):
            raise
        command = "lookup-buffer"
        if error.ctx is not None:  # click does not say where an option lacks its value
            command = error.ctx.command_path
            click.echo(error.ctx.get_usage(), err=True)
        sentence = f"{error.format_message().rstrip('.')}; `{command} --help` lists what is allowed"
        raise CommandError(sentence, ExitCode.USAGE) from error


def _discard_output() -> None:
    """Point stdout at /dev/null: Python flushes it again at exit and would repeat the error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(sentence: str, code: ExitCode) -> NoReturn:
    # One line, also if the message of a server or of the system has several.
    click.echo(f"lookup-buffer: {shown(' '.join(sentence.split()))}", err=True)
    raise click.exceptions.Exit(code)
