"""Draws which part of the code imports which, and how many lines each part has.

    python -m bench.imports [--root CHECKOUT] [--svg FILE]         or: make imports

A *room* is a package, or a module that stands directly in one of the three top packages. Rooms stand on floors: each
above all that it imports, so arrows run down. Modules that import one another in a *circle* are listed, and counted
are imports under ``TYPE_CHECKING`` as well, which import-linter can be told to pass over. The picture shows an arrow
only where no longer way leads to the same room.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

TOPS: Final = ("quiver", "quiver_client", "quiver_cacheserver")
SOURCES: Final = (".", "client", "cacheserver")  # of a checkout, where the three stand
COLORS: Final = {"quiver": "#dbe9f6", "quiver_client": "#e3f2dd", "quiver_cacheserver": "#fbe6cf"}
WIDTH: Final = 1500
BOX_HEIGHT: Final = 34
FLOOR_HEIGHT: Final = 84
CHARACTER_WIDTH: Final = 6.4  # of 11 px sans-serif, about


class House(NamedTuple):
    """The rooms, what imports what (with how many imports between modules), and the circles of modules."""

    lines: dict[str, int]
    arrows: Counter[tuple[str, str]]
    circles: list[list[str]]

    def floors(self) -> list[list[str]]:
        """Return the rooms by floor, the ground first; rooms of a circle share the floor of its highest."""
        below: dict[str, set[str]] = {room: set() for room in self.lines}
        for above, under in self.arrows:
            below[above].add(under)
        floors = dict.fromkeys(self.lines, 0)
        for _ in self.lines:  # longest paths; a circle of rooms would not settle, so the rounds are bounded
            changed = False
            for room, under in below.items():
                floor = max((floors[each] + 1 for each in under if room not in below[each]), default=0)
                changed, floors[room] = changed or floor != floors[room], floor
            if not changed:
                break
        return [sorted(room for room, at in floors.items() if at == floor) for floor in range(max(floors.values()) + 1)]

    def needed_arrows(self) -> list[tuple[str, str]]:
        """Return the arrows without those for which a longer way exists."""
        below: dict[str, set[str]] = {room: set() for room in self.lines}
        for above, under in self.arrows:
            below[above].add(under)
        reached: dict[str, set[str]] = {}

        def reach(room: str, path: tuple[str, ...] = ()) -> set[str]:
            if room not in reached and room not in path:
                found = set(below[room])
                for under in below[room]:
                    found |= reach(under, (*path, room))
                reached[room] = found
            return reached.get(room, set())

        return [
            (above, under)
            for above, under in sorted(self.arrows)
            if not any(under in reach(other) for other in below[above] - {under})
        ]


def survey(root: Path) -> House:
    """Read the imports and the lines of a checkout. It must be the first one on ``sys.path``."""
    import grimp

    graph = grimp.build_graph(*TOPS, cache_dir=None, exclude_type_checking_imports=False)
    packages = {module for module in graph.modules if graph.find_children(module)}
    lines: Counter[str] = Counter()
    imports: dict[str, set[str]] = {}
    arrows: Counter[tuple[str, str]] = Counter()
    for module in sorted(graph.modules):
        lines[_room(module, packages)] += len(_file(root, module).read_text("utf-8").splitlines())
        imports[module] = set(graph.find_modules_directly_imported_by(module))
        for imported in imports[module]:
            above, under = _room(module, packages), _room(imported, packages)
            if above != under:
                arrows[above, under] += 1
    return House(dict(lines), arrows, _circles(imports))


def _room(module: str, packages: set[str]) -> str:
    """Return the package that a module stands in; the module itself if that is one of the three top packages."""
    parent = module.rpartition(".")[0]
    if module in packages or not parent or parent in TOPS:
        return module
    return _room(parent, packages)


def _file(root: Path, module: str) -> Path:
    source = root / SOURCES[TOPS.index(module.split(".", maxsplit=1)[0])]
    path = source.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules of which each imports, over others or itself, all of its set."""
    reached = {module: set(under) for module, under in imports.items()}
    changed = True
    while changed:
        changed = False
        for module, under in reached.items():
            more = under.union(*(reached[each] for each in under))
            if len(more) > len(under):
                reached[module], changed = more, True
    circles = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in reached
        if module in reached[module]
    }
    return sorted(map(list, circles))


def told(house: House) -> str:
    """Return the picture in words."""
    count = Counter(above for above, _ in house.arrows)
    text = [f"{len(house.lines)} rooms, {len(house.arrows)} arrows, {len(house.circles)} circles of modules"]
    for floor, rooms in reversed(list(enumerate(house.floors()))):
        text.append(f"floor {floor}")
        text += [f"    {room:52} {house.lines[room]:6} lines, imports {count[room]} rooms" for room in rooms]
    text += [f"circle: {' <-> '.join(circle)}" for circle in house.circles]
    text.append("lines")
    for top in TOPS:
        of = {room: lines for room, lines in house.lines.items() if room.split(".")[0] == top}
        text.append(f"    {top:52} {sum(of.values()):6} lines in {len(of)} rooms")
    return "\n".join(text) + "\n"


def drawn(house: House) -> str:
    """Return the picture as SVG."""
    floors = house.floors()
    rows: list[list[list[str]]] = [_rows(rooms) for rooms in floors]
    height = FLOOR_HEIGHT * sum(map(len, rows)) + 40
    places: dict[str, tuple[float, float, float]] = {}  # left, top, width
    y = height - FLOOR_HEIGHT
    for of_floor in rows:
        for row in of_floor:
            widths = [_width(room) for room in row]
            gap = (WIDTH - sum(widths)) / (len(row) + 1)
            x = gap
            for room, width in zip(row, widths, strict=True):
                places[room] = (x, y, width)
                x += width + gap
            y -= FLOOR_HEIGHT
    shapes = []
    for above, under in house.needed_arrows():
        x1, y1, w1 = places[above]
        x2, y2, w2 = places[under]
        shapes.append(
            f'<line x1="{x1 + w1 / 2:.0f}" y1="{y1 + BOX_HEIGHT:.0f}" x2="{x2 + w2 / 2:.0f}" y2="{y2:.0f}" '
            f'stroke="#888" stroke-width="0.8"/>'
        )
    for room, (left, top, width) in places.items():
        color = COLORS[room.split(".")[0]]
        middle = f'x="{left + width / 2:.0f}" text-anchor="middle"'
        box = f'x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}"'
        shapes += [
            f'<rect {box} fill="{color}" stroke="gray"/>',
            f'<text {middle} y="{top + 14:.0f}">{escape(_label(room))}</text>',
            f'<text {middle} y="{top + 27:.0f}" fill="#666">{house.lines[room]}</text>',
        ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
    return head + 'font-size="11">\n' + "\n".join(shapes) + "\n</svg>\n"


def _label(room: str) -> str:
    top, _, name = room.partition(".")
    return name or top


def _width(room: str) -> float:
    return CHARACTER_WIDTH * len(_label(room)) + 16


def _rows(rooms: list[str]) -> list[list[str]]:
    """Break a floor that is too wide for the picture into rows."""
    rows: list[list[str]] = [[]]
    for room in rooms:
        if rows[-1] and sum(_width(each) + 12 for each in [*rows[-1], room]) > WIDTH:
            rows.append([])
        rows[-1].append(room)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.imports", description="Draw what imports what.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="a checkout (default: this one)")
    parser.add_argument("--svg", type=Path, help="draw the picture into this file as well")
    given: Any = parser.parse_args(arguments)
    sys.path[:0] = [str(given.root / source) for source in SOURCES]
    house = survey(given.root)
    sys.stdout.write(told(house))
    if given.svg is not None:
        given.svg.write_text(drawn(house), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
