"""The group of all commands, one module each; `demo`; the options for shell completion.

The start must be cheap: only the module of the command that runs is imported, and at its top it
imports only what `--help` needs. It imports the rest (pydantic, rich, and the driver behind
`store`) inside its function.

Shell completion: the script for a shell is printed, or written to where the shell finds it. The
script runs the command itself for proposals, controlled by environment variables: see click.

`demo` replaces this process by `python -m examples.demo`. Only a checkout has that package; the
installed wheel does not.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from lookup_buffer.cli.exits import Commands
from lookup_buffer.inspection.access import CommandError, ExitCode

__all__ = ["app"]

_HELP = """Put a tensor under a key on any host, get it by that key from any other.

Settings come from options, else from variables LOOKUP_BUFFER_<NAME>, for instance
LOOKUP_BUFFER_STORE_URL. Secrets come from variables or files, never from an option.

\b
Exit codes:
  0  all is well
  1  a problem was found, or the key is absent
  2  wrong usage or configuration
  3  the store or the node is not reachable
  130  ended by Ctrl-C (`serve` and the live `top`: 0)
  141  the reader of the output closed it
"""
_PACKAGES: Final = Path(__file__).resolve().parent.parent.parent
_FILES_OF_A_CHECKOUT: Final = (
    "pyproject.toml", "lookup_buffer/cli/commands.py", "examples/demo/__main__.py",
)  # fmt: skip
SCRIPT_PATHS: Final = {
    "bash": ".local/share/bash-completion/completions/lookup-buffer",
    "zsh": ".zfunc/_lookup-buffer",
    "fish": ".config/fish/completions/lookup-buffer.fish",
}
"""Path of the completion script below the home directory, by shell."""
_NEXT_STEP: Final = {
    "bash": "new shells load it if the package bash-completion is installed; if not, add to "
    "~/.bashrc: source {path}",
    "zsh": "add to ~/.zshrc, unless it is there: fpath+=~/.zfunc; "
    "autoload -Uz compinit && compinit",
    "fish": "new shells load it",
}


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


def completion_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options `--install-completion SHELL` and `--show-completion SHELL`."""
    for name, callback, text in (
        ("--show-completion", _show, "Print the completion script for a shell, and exit."),
        ("--install-completion", _install, "Install it where the shell finds it, and exit."),
    ):
        command = click.option(
            name,
            type=click.Choice(list(SCRIPT_PATHS)),
            callback=callback,
            is_eager=True,
            expose_value=False,
            help=text,
        )(command)
    return command


def _show(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is not None:
        click.echo(_script(context, shell), nl=False)
        context.exit()


def _install(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is None:
        return
    try:
        path = Path.home() / SCRIPT_PATHS[shell]
    except RuntimeError as error:  # no passwd entry, as in containers, and no HOME
        raise CommandError("the home directory is unknown: set HOME", ExitCode.FOUND) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_script(context, shell), encoding="utf-8")
    except OSError as error:
        sentence = f"{path} cannot be written: {error.strerror}"
        raise CommandError(sentence, ExitCode.FOUND) from error
    click.echo(f"{path} is written; {_NEXT_STEP[shell].format(path=path)}")
    context.exit()


def _script(context: click.Context, shell: str) -> str:
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # one of SCRIPT_PATHS
    return kind(context.command, {}, "lookup-buffer", "_LOOKUP_BUFFER_COMPLETE").source()


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from lookup_buffer.environment import distribution_version

        click.echo(f"lookup-buffer {distribution_version()}")
        context.exit()


class _CommandsByName(Commands):
    """Imports the module of a command when it is needed; a module has the name of its command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _NAMES and cmd_name not in self.commands:
            module = importlib.import_module(f"lookup_buffer.cli.{cmd_name}")
            self.add_command(getattr(module, cmd_name))
        return super().get_command(ctx, cmd_name)


_NAMES: Final = (
    "serve", "demo", "ls", "show", "why", "stats", "top", "nodes", "doctor", "bench", "invalidate",
    "certificates",
)  # fmt: skip


@click.group("lookup-buffer", cls=_CommandsByName, help=_HELP)
@click.option(
    "--version",
    is_flag=True,
    callback=_version,
    is_eager=True,
    expose_value=False,
    help="Print the version and exit.",
)
@completion_options
def app() -> None:
    pass


app.add_command(demo)
