"""`lookup-buffer demo`: becomes `python -m examples.demo`, which only a checkout holds."""

import os
import sys
from pathlib import Path

import click

from lookup_buffer.inspection.records import CommandError, ExitCode

_PACKAGES = Path(__file__).resolve().parent.parent.parent
_FILES_OF_A_CHECKOUT = ("pyproject.toml", "lookup_buffer/cli/demo.py", "examples/demo/__main__.py")


@click.command(
    add_help_option=False,  # the demo explains its own options
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@click.pass_context
def demo(context: click.Context) -> None:
    """Two real vLLM engines share encoder outputs (from a checkout).

    `demo --help` lists its options.
    """
    from lookup_buffer.environment import environment_importing_from

    # -P: a folder named `store` in the working directory must not shadow ours. This process is
    # replaced, so Ctrl-C, signals and exit codes are the demo's own. Every process of the demo gets
    # the checkout's root by the environment, also those that vLLM starts.
    command = [sys.executable, "-P", "-m", "examples.demo", *context.args]
    os.execve(command[0], command, environment_importing_from(_checkout()))


def _checkout() -> Path:
    """The root of the checkout that holds this package, as after `pip install -e`, else the working
    directory.

    Raises:
        CommandError: neither is the root of a checkout.
    """
    for folder in (_PACKAGES, Path()):
        if all((folder / name).is_file() for name in _FILES_OF_A_CHECKOUT):
            return folder.resolve()
    raise CommandError(
        "the demonstration is not in the installed package: clone the repository of Lookup Buffer "
        "and run `make demo` in its root",
        ExitCode.USAGE,
    )
