"""`lookup-buffer demo`: replaces this process by `python -m examples.demo`.

Only a checkout has that package; the installed wheel does not.
"""

import os
import sys
from pathlib import Path

import click

from lookup_buffer.inspection.access import CommandError, ExitCode

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

    # -P: a folder named `store` in the working directory must not shadow our package. This process
    # is replaced, so the demo itself handles signals and sets the exit code. The environment passes
    # the checkout's root to every process of the demo, also to those that vLLM starts.
    command = [sys.executable, "-P", "-m", "examples.demo", *context.args]
    os.execve(command[0], command, environment_importing_from(_checkout()))


def _checkout() -> Path:
    """The root of the checkout that holds this package, as after `pip install -e`; otherwise the
    working directory.

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
