"""``python -m bench.allocation``; see the package."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import signal
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

import bench.allocation
from bench.allocation.cases import CASES, Case
from bench.allocation.fleet import NO_POLICY, daemon_flags
from bench.allocation.plots import draw
from bench.allocation.report import Row, show, show_story, write
from bench.allocation.sources import origin, prepare
from bench.allocation.steady import run
from bench.allocation.stories import STORIES, Stage

OUT = Path(__file__).parents[1] / "results"


def chosen_stories(names: tuple[str, ...]) -> list[str]:
    return [it for it in STORIES if not names or it in names]


def chosen(names: tuple[str, ...]) -> list[Case]:
    """Return the cases with these names, or of these rows of the table."""
    known = {it.name for it in CASES} | {it.row for it in CASES} | set(STORIES)
    for name in names:
        if name not in known:
            raise click.BadParameter(f"no case {name!r}; there are {', '.join(sorted(known))}", param_hint="--case")
    return [it for it in CASES if not names or it.name in names or it.row in names]


def import_before_forks() -> None:
    """Import what ranks need, once: some twenty forked processes share it, and start in a moment."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        importlib.import_module("pandas")  # pyarrow imports it where it is installed
    import quiver
    import quiver_client

    for package in (quiver, quiver_client):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not {"cli", "integrations"}.intersection(found.name.split(".")):
                with contextlib.suppress(ImportError):  # of what an extra installs, or of native code
                    importlib.import_module(found.name)


@click.command(help=bench.allocation.__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--case", "names", multiple=True, metavar="NAME", help="Only this case, or row of the table; repeatable.")
@click.option("--policy", "policies", multiple=True, help="Only this policy; repeatable. [default: those of the case]")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Policies take turns in each.")
@click.option("--pace", type=click.FloatRange(0.1, 20), default=1.0, show_default=True, help="How much faster.")
@click.option("--quick", is_flag=True, help="Small data and short windows, to check that it runs.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=OUT, show_default="bench/results")
def main(names: tuple[str, ...], policies: tuple[str, ...], rounds: int, pace: float, quick: bool, out: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds the stack, which ends servers and removes folders
    import_before_forks()
    console = Console(width=120)
    cases = [it.quick() if quick else it.at_pace(pace) for it in chosen(names)]
    with tempfile.TemporaryDirectory(prefix="quiver-allocation-") as folder, origin(Path(folder)) as served:
        for case in cases:
            indexed = prepare(case.sources, Path(folder), served)
            asked = [it for it in policies or case.policies if it == NO_POLICY or "--policy" in daemon_flags()]
            runs = [
                (policy, run(case, policy, indexed, served, Path(folder))) for _ in range(rounds) for policy in asked
            ]
            rows = [Row(case, policy, tuple(it for name, it in runs if name == policy)) for policy in asked]
            for row in rows:
                show(row, console)
            write(rows, (), out, {"rounds": rounds, "pace": pace, "quick": quick})
        for name in chosen_stories(names):
            story = STORIES[name](Stage(served, Path(folder), quick))
            show_story(story, console)
            write((), (story,), out, {"quick": quick})
    with contextlib.suppress(ImportError):  # matplotlib is in the extra bench
        for path in draw(out):
            console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    main()
