"""The command `lookup-buffer`: one module per command, joined here.

Starting must cost nothing: modules of this package import at their top only what `--help` needs.
What a command needs for its work (pydantic, rich, and redis behind `store`) it imports inside.
"""

import typer

from lookup_buffer.cli.demo import demo
from lookup_buffer.cli.doctor import doctor
from lookup_buffer.cli.exits import Commands
from lookup_buffer.cli.invalidate import invalidate
from lookup_buffer.cli.ls import ls
from lookup_buffer.cli.nodes import nodes
from lookup_buffer.cli.serve import serve
from lookup_buffer.cli.show import show
from lookup_buffer.cli.stats import stats
from lookup_buffer.cli.why import why

__all__ = ["app"]

_HELP = """Put a tensor under a key on any host, get it by that key from any other.

Settings come from options, else from variables LOOKUP_BUFFER_<NAME>, for instance
LOOKUP_BUFFER_STORE_URL. Secrets come from variables or files, never from an option.

\b
Exit codes:
  0  all is well
  1  something wrong was found, or the key is not there
  2  wrong usage or configuration
  3  the store or the node is not reachable
"""

app = typer.Typer(
    name="lookup-buffer",
    help=_HELP,
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help by rich takes 0.1 s and more
    # Only faults of ours get this far, and the variables of a frame may be secrets.
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from lookup_buffer.node.identity import distribution_version

        print(f"lookup-buffer {distribution_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    del version


app.command()(serve)
app.command(
    add_help_option=False,  # the demo explains its own options
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(demo)
for _inspect in (ls, show, why, stats, nodes, doctor, invalidate):
    app.command()(_inspect)
