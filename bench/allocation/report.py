"""What runs came to: a table of asked, predicted and measured, JSON, plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.allocation.cases import Case
from bench.allocation.model import Expected, equal_split, optimum, predicted
from bench.allocation.steady import Run
from bench.facts import facts


@dataclass(frozen=True)
class Row:
    """A case under a policy: medians over its rounds. Rates in bytes per second."""

    case: Case
    policy: str
    runs: tuple[Run, ...]

    @property
    def expected(self) -> Expected | None:
        return predicted(self.case, self.policy)

    def rate(self, job: str) -> float:
        return median(it.jobs[job].bytes_per_second for it in self.runs)

    def idle(self, job: str) -> float:
        return median(it.jobs[job].idle for it in self.runs)

    @property
    def total(self) -> float:
        return median(it.total for it in self.runs)

    def encode(self) -> dict[str, Any]:
        case, expected = self.case, self.expected
        names = [job.name for job in case.jobs]
        best, even = optimum(case), equal_split(case)
        return {
            "case": case.name,
            "row": case.row,
            "policy": self.policy,
            "rounds": len(self.runs),
            "origin_bytes_per_second": case.origin_rate,
            "capacity_bytes": case.capacity_bytes,
            "need": {job.name: case.need(job) for job in case.jobs},
            "predicted": dict(expected.rates) if expected else None,
            "predicted_cache": dict(expected.cache) if expected else None,
            "equal_split": dict(even.rates),
            "optimum_total": best.total,
            "measured": {name: self.rate(name) for name in names},
            "idle": {name: self.idle(name) for name in names},
            "total": self.total,
            "each": [asdict(it) | {"total": it.total} for it in self.runs],
        }


def show(row: Row, console: Console) -> None:
    """Print one row: predicted and measured megabytes per second of each job and of all."""
    case, expected = row.case, row.expected
    load = "; ".join(f"load {it.load_average:.1f}, machine busy {it.machine_busy:.0%}" for it in row.runs)
    table = Table(title=f"{case.name}, {row.policy}, {len(row.runs)} rounds ({load})", title_justify="left")
    for name in ("job", "f* MB/s", "equal split", "optimum", "predicted", "measured", "÷ predicted", "idle",
                 "samples/s"):  # fmt: skip
        table.add_column(name, justify="left" if name == "job" else "right")
    even, best = equal_split(case), optimum(case)
    for job in case.jobs:
        told = expected.rates[job.name] if expected else None
        reached, samples = row.rate(job.name), median(it.jobs[job.name].samples_per_second for it in row.runs)
        table.add_row(
            job.name, _mb(case.need(job)), _mb(even.rates[job.name]), _mb(best.rates[job.name]), _mb(told),
            _mb(reached), _ratio(reached, told), f"{row.idle(job.name):.1%}", f"{samples:.1f}",
        )  # fmt: skip
    total = expected.total if expected else None
    table.add_row("all", _mb(sum(map(case.need, case.jobs))), _mb(even.total), _mb(best.total), _mb(total),
                  _mb(row.total), _ratio(row.total, total), "", "")  # fmt: skip
    console.print(table)
    cores = ", ".join(f"{name} {median(it.cores[name] for it in row.runs):.2f}" for name in row.runs[0].cores)
    console.print(f"  cores: {cores}", highlight=False)
    for name in row.runs[0].cache:
        told = f", predicted {expected.cache[name]:.0%}" if expected else ""
        held, read = (median(getattr(it, what)[name] for it in row.runs) for what in ("cache", "origin"))
        console.print(f"  {name}: {held:.0%} resident{told}; {read / 1e6:.2f} MB/s from the origin", highlight=False)


def show_story(story: dict[str, Any], console: Console) -> None:
    """Print what a story was asked and came to."""
    table = Table(title=story["case"], title_justify="left")
    for name in ("what", "asked", "measured", "met"):
        table.add_column(name)
    for it in story["rows"]:
        table.add_row(it["what"], it["asked"], f"{it['measured']:.3f}", "yes" if it["met"] else "no")
    console.print(table)


def _mb(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e6:.2f}"


def _ratio(rate: float, of: float | None) -> str:
    return f"{rate / of:.3f}" if of else ""


def write(rows: Sequence[Row], stories: Sequence[dict[str, Any]], out: Path, configuration: dict[str, Any]) -> Path:
    """Write ``out/allocation.json``: a later call replaces the rows of the same case and policy."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "allocation.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "stories": []}
    told = [{"facts": facts() | {"packages": None}, "configuration": configuration} | row.encode() for row in rows]
    new = {(it["case"], it["policy"]) for it in told}
    kept = [it for it in before["rows"] if (it["case"], it["policy"]) not in new]
    names = {it["case"] for it in stories}
    told_stories = [{"facts": facts() | {"packages": None}, "configuration": configuration} | it for it in stories]
    before["stories"] = [it for it in before["stories"] if it["case"] not in names] + told_stories
    path.write_text(json.dumps({"rows": kept + told, "stories": before["stories"]}, indent=1) + "\n")
    return path
