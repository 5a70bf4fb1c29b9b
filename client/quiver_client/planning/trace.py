"""Jobs in a CSV file: a header that names the columns, and a row for each job."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quiver.errors import Misconfigured

JOB_FIELDS: Final = (
    "name", "dataset", "size", "origin", "rate", "ranks", "start", "duration", "epochs", "tenant", "group", "ordered",
    "rack",
)  # fmt: skip
LINE_CHARACTERS_MAX: Final = 1 << 20
_NEEDED: Final = ("name", "dataset", "rate")


def read_trace(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each row and where it is, for messages. Raises ``Misconfigured`` and ``OSError``."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        # A line is cut where no row goes on, so that /dev/zero ends: a value of so many characters is an error.
        rows = csv.reader(iter(lambda: file.readline(LINE_CHARACTERS_MAX), ""), strict=True)
        try:
            yield from _rows(path, rows)
        except csv.Error as error:
            raise Misconfigured(f"{path}, row {rows.line_num}: {error}") from error
        except UnicodeDecodeError as error:
            raise Misconfigured(f"{path}, after row {rows.line_num}: not UTF-8 ({error.reason})") from error


def _rows(path: Path, rows: Iterator[list[str]]) -> Iterator[tuple[str, dict[str, str]]]:
    header = [column.strip() for column in next(rows, [])]
    unknown = [column for column in header if column not in JOB_FIELDS]
    missing = [column for column in _NEEDED if column not in header]
    if missing:
        raise Misconfigured(f"{path}, row 1: no column {missing[0]!r}; the first row names the columns")
    if unknown:
        raise Misconfigured(f"{path}, row 1: column {unknown[0]!r} is not known; known are {', '.join(JOB_FIELDS)}")
    if len(set(header)) < len(header):
        raise Misconfigured(f"{path}, row 1: a column is there twice")
    for row in rows:
        where = f"{path}, row {rows.line_num}"  # type: ignore[attr-defined]
        if not any(cell.strip() for cell in row):
            raise Misconfigured(f"{where}: the row is empty; remove it, or complete it")
        if len(row) != len(header):
            raise Misconfigured(f"{where}: {len(row)} values for {len(header)} columns")
        # A name keeps its spaces: one that begins with a space is said to be wrong, not silently another.
        yield (
            where,
            {column: cell if column == "name" else cell.strip() for column, cell in zip(header, row, strict=True)},
        )
