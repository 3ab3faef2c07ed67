"""The commands, one module each, joined here.

Starting must cost nothing: modules of this package import at their top only what `--help` needs.
What a command needs for its work (pydantic, rich, and the driver behind `store`) it imports inside.
"""

import click

from lookup_buffer.cli.bench import bench
from lookup_buffer.cli.completion import completion_options
from lookup_buffer.cli.demo import demo
from lookup_buffer.cli.doctor import doctor
from lookup_buffer.cli.exits import Commands
from lookup_buffer.cli.invalidate import invalidate
from lookup_buffer.cli.ls import ls
from lookup_buffer.cli.nodes import nodes
from lookup_buffer.cli.serve import serve
from lookup_buffer.cli.show import show
from lookup_buffer.cli.stats import stats
from lookup_buffer.cli.top import top
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
  130  ended by Ctrl-C
  141  whoever read the output has left
"""


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from lookup_buffer.node.identity import distribution_version

        click.echo(f"lookup-buffer {distribution_version()}")
        context.exit()


@click.group("lookup-buffer", cls=Commands, help=_HELP)
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


for _command in (serve, demo, ls, show, why, stats, top, nodes, doctor, bench, invalidate):
    app.add_command(_command)
