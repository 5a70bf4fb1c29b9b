"""The fault matrix: what can go wrong, and what a user must see. ``rows.toml`` is the one place that has its rows.

A test that is evidence for a row has the mark ``fault`` with the row's name. ``python -m tests.chaos.rows`` finds the
marks in the sources of the tests and writes the table of docs/reliability.md. A test checks that the table is up to
date, and that no row is without evidence.
"""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = ROOT / "docs" / "reliability.md"
BEGIN: Final = "<!-- The table is written by python -m tests.chaos.rows -->"
END: Final = "<!-- The table ends here -->"


class Row(NamedTuple):
    name: str
    fault: str
    sees: str
    argued: str = ""  # why there is no test


_MATRIX: Final = tomllib.loads((Path(__file__).parent / "rows.toml").read_text())
GROUPS: Final[Mapping[str, str]] = _MATRIX["groups"]
ROWS: Final = tuple(Row(name, **row) for name, row in _MATRIX["rows"].items())


@functools.cache
def marks(tests: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Return for each row the tests that are its evidence, as ``path::name`` below the folder of the tests."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(tests.rglob("test_*.py")):
        if "mark.fault" not in (text := file.read_text()):
            continue
        for name, node in _tests(ast.parse(text)):
            for row in _rows(node):
                found[row].append(f"{file.relative_to(tests)}::{name}")
    return dict(found)


def _tests(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield test functions with their names, and what marks a whole module or class with ``""`` or the class's name."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in module.body:
        if isinstance(node, functions) and node.name.startswith("test_"):
            yield node.name, ast.Module([ast.Expr(each) for each in node.decorator_list], [])
        elif isinstance(node, ast.ClassDef):
            yield node.name, ast.Module([ast.Expr(each) for each in node.decorator_list], [])
            for inner in node.body:
                if isinstance(inner, functions):
                    yield f"{node.name}::{inner.name}", ast.Module([ast.Expr(e) for e in inner.decorator_list], [])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield "", node


def _rows(node: ast.AST) -> Iterator[str]:
    """Yield the rows of all ``pytest.mark.fault(...)`` within."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "fault":
            yield from (argument.value for argument in call.args if isinstance(argument, ast.Constant))


def table(found: Mapping[str, list[str]]) -> str:
    """Return the table of the document."""
    lines = []
    for letter, group in GROUPS.items():
        lines += ["", f"### {letter}: {group}", "", "| | fault | what a user sees | evidence |", "|---|---|---|---|"]
        for row in ROWS:
            if row.name[0] == letter:
                lines.append(f"| {row.name} | {row.fault} | {row.sees} | {_evidence(row, found)} |")
    return "\n".join(lines).strip()


def _evidence(row: Row, found: Mapping[str, list[str]]) -> str:
    files = sorted({test.partition("::")[0] for test in found.get(row.name, [])})
    named = ", ".join(f"`{file}`" for file in files)
    return " ".join(part for part in (named, row.argued) if part)


def written(document: str) -> str:
    """Return the document with its table up to date."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(marks())}\n\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
    sys.stdout.write(f"{sum(map(len, marks().values()))} marks of {len(marks())} rows of {len(ROWS)}\n")
