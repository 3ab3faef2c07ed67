"""What commands print: tables and fields for people, one JSON document for programs.

At a terminal a table fits its width. In a pipe nothing is cut, and
there is neither colour nor markup. Texts from the store are not ours: control characters in them
are shown as escapes, so that no key can drive a terminal.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_PIPE_COLUMNS = 100_000
_AGES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


def print_json(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Sequence[str] = (),
    cut: Sequence[str] = (),
) -> None:
    """A table without lines. The columns named in `numeric` end at the right.

    Where a terminal is too narrow, the columns named in `cut` end in …; of the others, what is too
    long goes on below.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        # Numbers keep their width; of the other columns the widest gives way first.
        table.add_column(
            name,
            justify="right" if name in numeric else "left",
            no_wrap=name in numeric,
            overflow="ellipsis" if name in cut or name in numeric else "fold",
        )
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    _print(table)


def print_fields(fields: Mapping[str, str]) -> None:
    """One name and value a line; long values go on below, so that nothing is cut."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(Text(shown(name), style="bold"), Text(shown(value)))
    _print(table)


def print_outline(rows: Sequence[tuple[tuple[str, str], str, str]]) -> None:
    """Rows of (a word and its style, a name, sentences that may go on below)."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for (word, style), name, sentences in rows:
        lines = "\n".join(shown(line) for line in sentences.split("\n"))
        table.add_row(Text(word, style=style), Text(name), Text(lines))
    _print(table)


def print_line(text: str = "") -> None:
    """A sentence between tables."""
    from rich.text import Text

    _print(Text(shown(text)))


def shown(text: str) -> str:
    """`text` with everything that is not printable as an escape."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def size_text(nbytes: float) -> str:
    """`1.6 MiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1023.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def age_text(seconds: float) -> str:
    """`5 min`: the largest unit of which there is one, rounded down."""
    for unit_seconds, unit in _AGES:
        if seconds >= unit_seconds:
            return f"{int(seconds // unit_seconds)} {unit}"
    return "0 s"


def age_since(created: float) -> float:
    """Seconds since the wall clock of the first publisher said `created`; never negative."""
    return max(0.0, time.time() - created)


def _print(content: "Table | Text") -> None:
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(content)
        return
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # whatever the locale
    console = Console(width=_PIPE_COLUMNS, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(content)
    for line in capture.get().splitlines():
        print(line.rstrip())
