"""Tables on standard output: drawn on a terminal, plain aligned columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiver.location import shown

CELL_CHARS_MAX = 200


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print rows under headings. ``right``: columns of figures. What does not print in a cell is escaped."""
    cells = [[shown(cell, CELL_CHARS_MAX) for cell in row] for row in rows]
    if sys.stdout.isatty():
        table = Table(box=None, pad_edge=False, header_style="bold")
        for at, heading in enumerate(headings):
            table.add_column(heading, justify="right" if at in right else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    for row in [list(headings), *cells]:
        line = (
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join(line).rstrip())


def share(value: float) -> str:
    """Return a share of 1 in percent."""
    return f"{value:.0%}"
