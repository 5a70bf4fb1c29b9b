"""Draws which part of the code imports which, and how many lines each part has.

    python -m bench.imports [--root CHECKOUT] [--svg FILE]         or: make imports

A *component* is a package, or a module directly in one of the three top packages. Components are in layers: each
above all that it imports, so arrows point down. Modules that import one another in a *cycle* are listed. Imports under
``TYPE_CHECKING`` count, although import-linter can be told to ignore them. The picture omits an arrow if a longer path
leads to the same component.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

TOPS: Final = ("quiver", "quiver_client", "quiver_cacheserver")
SOURCES: Final = (".", "client", "cacheserver")  # the folders of a checkout that contain them
COLORS: Final = {"quiver": "#dbe9f6", "quiver_client": "#e3f2dd", "quiver_cacheserver": "#fbe6cf"}
WIDTH: Final = 1500
BOX_HEIGHT: Final = 34
LAYER_HEIGHT: Final = 84
CHARACTER_WIDTH: Final = 6.4  # about that of 11 px sans-serif


class ImportGraph(NamedTuple):
    """The components' lines, the imports between components (with their number), and the cycles of modules."""

    lines: dict[str, int]
    arrows: Counter[tuple[str, str]]
    cycles: list[list[str]]

    def layers(self) -> list[list[str]]:
        """Return the components by layer, the lowest first; components of a cycle share the layer of its highest."""
        below: dict[str, set[str]] = {component: set() for component in self.lines}
        for above, under in self.arrows:
            below[above].add(under)
        layers = dict.fromkeys(self.lines, 0)
        for _ in self.lines:  # longest paths; a cycle of components would not converge, so the rounds are bounded
            changed = False
            for component, under in below.items():
                layer = max((layers[each] + 1 for each in under if component not in below[each]), default=0)
                changed, layers[component] = changed or layer != layers[component], layer
            if not changed:
                break
        return [
            sorted(component for component, at in layers.items() if at == layer)
            for layer in range(max(layers.values()) + 1)
        ]

    def needed_arrows(self) -> list[tuple[str, str]]:
        """Return the arrows without those for which a longer path exists."""
        below: dict[str, set[str]] = {component: set() for component in self.lines}
        for above, under in self.arrows:
            below[above].add(under)
        reached: dict[str, set[str]] = {}

        def reach(component: str, path: tuple[str, ...] = ()) -> set[str]:
            if component not in reached and component not in path:
                found = set(below[component])
                for under in below[component]:
                    found |= reach(under, (*path, component))
                reached[component] = found
            return reached.get(component, set())

        return [
            (above, under)
            for above, under in sorted(self.arrows)
            if not any(under in reach(other) for other in below[above] - {under})
        ]


def read_graph(root: Path) -> ImportGraph:
    """Read the imports and the lines of a checkout. It must be the first one on ``sys.path``."""
    import grimp

    graph = grimp.build_graph(*TOPS, cache_dir=None, exclude_type_checking_imports=False)
    packages = {module for module in graph.modules if graph.find_children(module)}
    lines: Counter[str] = Counter()
    imports: dict[str, set[str]] = {}
    arrows: Counter[tuple[str, str]] = Counter()
    for module in sorted(graph.modules):
        lines[_component(module, packages)] += len(_file(root, module).read_text("utf-8").splitlines())
        imports[module] = set(graph.find_modules_directly_imported_by(module))
        for imported in imports[module]:
            above, under = _component(module, packages), _component(imported, packages)
            if above != under:
                arrows[above, under] += 1
    return ImportGraph(dict(lines), arrows, _cycles(imports))


def _component(module: str, packages: set[str]) -> str:
    """Return the package of a module; the module itself if that is one of the three top packages."""
    parent = module.rpartition(".")[0]
    if module in packages or not parent or parent in TOPS:
        return module
    return _component(parent, packages)


def _file(root: Path, module: str) -> Path:
    source = root / SOURCES[TOPS.index(module.split(".", maxsplit=1)[0])]
    path = source.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules in which each imports, directly or indirectly, all of the set."""
    reached = {module: set(under) for module, under in imports.items()}
    changed = True
    while changed:
        changed = False
        for module, under in reached.items():
            more = under.union(*(reached[each] for each in under))
            if len(more) > len(under):
                reached[module], changed = more, True
    cycles = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in reached
        if module in reached[module]
    }
    return sorted(map(list, cycles))


def as_text(graph: ImportGraph) -> str:
    """Return the graph as text."""
    count = Counter(above for above, _ in graph.arrows)
    text = [f"{len(graph.lines)} components, {len(graph.arrows)} arrows, {len(graph.cycles)} cycles of modules"]
    for layer, components in reversed(list(enumerate(graph.layers()))):
        text.append(f"layer {layer}")
        text += [
            f"    {component:52} {graph.lines[component]:6} lines, imports {count[component]} components"
            for component in components
        ]
    text += [f"cycle: {' <-> '.join(cycle)}" for cycle in graph.cycles]
    text.append("lines")
    for top in TOPS:
        of = {component: lines for component, lines in graph.lines.items() if component.split(".")[0] == top}
        text.append(f"    {top:52} {sum(of.values()):6} lines in {len(of)} components")
    return "\n".join(text) + "\n"


def as_svg(graph: ImportGraph) -> str:
    """Return the graph as SVG."""
    layers = graph.layers()
    rows: list[list[list[str]]] = [_rows(components) for components in layers]
    height = LAYER_HEIGHT * sum(map(len, rows)) + 40
    places: dict[str, tuple[float, float, float]] = {}  # left, top, width
    y = height - LAYER_HEIGHT
    for of_layer in rows:
        for row in of_layer:
            widths = [_width(component) for component in row]
            gap = (WIDTH - sum(widths)) / (len(row) + 1)
            x = gap
            for component, width in zip(row, widths, strict=True):
                places[component] = (x, y, width)
                x += width + gap
            y -= LAYER_HEIGHT
    shapes = []
    for above, under in graph.needed_arrows():
        x1, y1, w1 = places[above]
        x2, y2, w2 = places[under]
        shapes.append(
            f'<line x1="{x1 + w1 / 2:.0f}" y1="{y1 + BOX_HEIGHT:.0f}" x2="{x2 + w2 / 2:.0f}" y2="{y2:.0f}" '
            f'stroke="#888" stroke-width="0.8"/>'
        )
    for component, (left, top, width) in places.items():
        color = COLORS[component.split(".")[0]]
        middle = f'x="{left + width / 2:.0f}" text-anchor="middle"'
        box = f'x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}"'
        shapes += [
            f'<rect {box} fill="{color}" stroke="gray"/>',
            f'<text {middle} y="{top + 14:.0f}">{escape(_label(component))}</text>',
            f'<text {middle} y="{top + 27:.0f}" fill="#666">{graph.lines[component]}</text>',
        ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
    return head + 'font-size="11">\n' + "\n".join(shapes) + "\n</svg>\n"


def _label(component: str) -> str:
    top, _, name = component.partition(".")
    return name or top


def _width(component: str) -> float:
    return CHARACTER_WIDTH * len(_label(component)) + 16


def _rows(components: list[str]) -> list[list[str]]:
    """Break a layer that is too wide for the picture into rows."""
    rows: list[list[str]] = [[]]
    for component in components:
        if rows[-1] and sum(_width(each) + 12 for each in [*rows[-1], component]) > WIDTH:
            rows.append([])
        rows[-1].append(component)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.imports", description="Draw what imports what.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="a checkout (default: this one)")
    parser.add_argument("--svg", type=Path, help="also draw the graph to this file")
    given: Any = parser.parse_args(arguments)
    sys.path[:0] = [str(given.root / source) for source in SOURCES]
    graph = read_graph(given.root)
    sys.stdout.write(as_text(graph))
    if given.svg is not None:
        given.svg.write_text(as_svg(graph), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
