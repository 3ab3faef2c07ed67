"""`lookup-buffer demo`: becomes `python -m examples.demo`, which nothing here may import."""

import os
import sys

import click


@click.command(
    add_help_option=False,  # the demo explains its own options
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@click.pass_context
def demo(context: click.Context) -> None:
    """Two real vLLM engines share encoder outputs.

    `demo --help` lists its options.
    """
    # -P: a folder named `store` in the working directory must not shadow ours. This process is
    # replaced, so Ctrl-C, signals and exit codes are the demo's own.
    command = [sys.executable, "-P", "-m", "examples.demo", *context.args]
    os.execv(command[0], command)
