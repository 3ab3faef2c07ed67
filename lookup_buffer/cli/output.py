"""What commands print: tables and fields for people, one JSON document for programs.

On a terminal a table fits the width. In a pipe nothing is cut, and there is neither colour nor
markup. Texts from the store are untrusted: control characters in them are shown as escapes, so no
key can control a terminal. Writes to stdout, on the main thread. It must not know what the texts
mean.
"""

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def print_json(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def print_json_list(
    name: str, items: Iterable[Mapping[str, Any]], rest: Callable[[], Mapping[str, Any]]
) -> None:
    """One document with a list of any length, written item by item; `rest` is called last."""
    print(f'{{\n  "{name}": [', end="")
    separator = "\n"
    for item in items:
        print(separator + textwrap.indent(json.dumps(item, indent=2), "    "), end="")
        separator = ",\n"
    print("\n  ]," if separator != "\n" else "],")
    print(json.dumps(rest(), indent=2).removeprefix("{\n"))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Sequence[str] = (),
    cut: Sequence[str] = (),
) -> None:
    """Print one TextTable with all its rows."""
    TextTable(columns, numeric=numeric, cut=cut).print(rows)


class TextTable:
    """A table without rules. The columns named in `numeric` are right-aligned.

    On a narrow terminal the columns named in `cut` end in …, and the others are wrapped. Rows may
    be printed in several calls: columns then keep at least their width.
    """

    def __init__(
        self, columns: Sequence[str], *, numeric: Sequence[str] = (), cut: Sequence[str] = ()
    ) -> None:
        self.columns = list(columns)
        self._numeric = numeric
        self._cut = cut
        self._widths = [0] * len(columns)
        self._header_printed = False

    def print(self, rows: Sequence[Sequence[str]]) -> None:
        lines = [[shown(cell) for cell in row] for row in rows]
        if sys.stdout.isatty():
            self._print_at_terminal(lines)
        else:
            self._print_plain(lines)
        self._header_printed = True
        sys.stdout.flush()

    def _print_plain(self, rows: list[list[str]]) -> None:
        from rich.cells import cell_len

        if not self._header_printed:
            rows = [self.columns, *rows]
        lengths = [[cell_len(cell) for cell in row] for row in rows]
        self._widths = [max(column) for column in zip(self._widths, *lengths, strict=True)]
        right = [name in self._numeric for name in self.columns]
        _replace_unencodable()
        for row, found in zip(rows, lengths, strict=True):
            cells = [
                " " * (width - length) + cell if at_right else cell + " " * (width - length)
                for cell, length, width, at_right in zip(
                    row, found, self._widths, right, strict=True
                )
            ]
            print("  ".join(cells).rstrip())

    def _print_at_terminal(self, rows: list[list[str]]) -> None:
        from rich.cells import cell_len
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=not self._header_printed
        )
        for name, width in zip(self.columns, self._widths, strict=True):
            # Numbers keep their width; of the other columns the widest shrinks first.
            table.add_column(
                name,
                justify="right" if name in self._numeric else "left",
                no_wrap=name in self._numeric,
                overflow="ellipsis" if name in (*self._cut, *self._numeric) else "fold",
                min_width=width if name in self._numeric else None,
            )
        for row in rows:
            table.add_row(*map(Text, row))
        lengths = [[cell_len(cell) for cell in row] for row in (self.columns, *rows)]
        self._widths = [max(column) for column in zip(self._widths, *lengths, strict=True)]
        _print(table)


def print_fields(fields: Mapping[str, str]) -> None:
    """One name and value per line; long values are wrapped, so that nothing is cut."""
    _print_grid([((shown(name), "bold"), shown(value)) for name, value in fields.items()])


def print_outline(rows: Sequence[tuple[tuple[str, str], str, str]]) -> None:
    """Rows of ((word, style), name, sentences); the sentences may be wrapped."""
    _print_grid(
        [
            (word, shown(name), "\n".join(map(shown, sentences.split("\n"))))
            for word, name, sentences in rows
        ]
    )


def print_line(text: str = "") -> None:
    """One line of text, as between tables."""
    _print_grid([(shown(text),)])


def _print_grid(rows: Sequence[Sequence[str | tuple[str, str]]]) -> None:
    """Aligned cells. The last cell of a row may have several lines; a terminal wraps it.

    A cell is a text, or a text and its style, and has no control characters (see `shown`).
    """
    lines = [[(cell, "") if isinstance(cell, str) else cell for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_grid_at_terminal(lines)
        return
    from rich.cells import cell_len

    widths = [max(cell_len(text) for text, _ in column) for column in zip(*lines, strict=True)]
    _replace_unencodable()
    for *row, (last, _) in lines:
        ahead = "".join(
            text + " " * (width - cell_len(text) + 2)
            for (text, _), width in zip(row, widths[:-1], strict=True)
        )
        print((ahead + last.replace("\n", "\n" + " " * len(ahead))).rstrip())


def _print_grid_at_terminal(rows: list[list[tuple[str, str]]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for _ in rows[0][:-1]:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(text, style=style) for text, style in row))
    _print(table)


def shown(text: str) -> str:
    """`text` with every unprintable character as an escape."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def _print(table: "Table") -> None:
    from rich.console import Console

    Console().print(table)


def _replace_unencodable() -> None:
    """Replace characters that the locale cannot encode, instead of raising."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
