"""Reports: for people a table on the terminal, for programs one JSON file per question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from bench.facts import facts
from bench.load import Load, Outcome
from bench.questions.base import Answer, Question, Setting


def write_json(question: Question, setting: Setting, answer: Answer, out: Path) -> dict[str, Any]:
    """Write ``out/<question>.json``; return what it holds."""
    told = {
        "question": question.name,
        "asks": question.asks,
        "facts": facts(),
        "configuration": {"quick": setting.quick, "rounds": setting.rounds, **answer.configuration},
        "ratios": [ratio.encode() for ratio in answer.ratios],
        "contenders": {name: result.encode() for name, result in answer.contenders.items()},
        "absent": answer.absent,
        **answer.more,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{question.name}.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    return told


def show(question: Question, answer: Answer, console: Console) -> None:
    console.print(f"\n[bold]{question.name}[/bold]: {question.asks}")
    if answer.contenders:
        console.print(_contenders(answer))
    if answer.ratios:
        console.print(_ratios(answer))
    for name, reason in answer.absent.items():
        console.print(f"absent: {name}: {reason}", markup=False, highlight=False)


def show_load(load: Load, outcome: Outcome, console: Console) -> None:
    rows = {
        "together": f"{outcome.bytes_a_second / 1e9:.2f} GB/s, {outcome.samples_a_second:,.0f} samples/s",
        "shares": f"{' '.join(f'{100 * share:.0f}%' for share in outcome.shares)} (slowest ÷ fastest"
        f" {outcome.evenness:.2f})",
        "wait for a batch": f"p50 {outcome.wait_p50_ms:.1f} ms, p99 {outcome.wait_p99_ms:.1f} ms",
        "accelerators busy": f"{100 * outcome.utilisation:.0f} %" if load.step_seconds else "there are none",
        "from": f"rack {outcome.stats.get('bytes_rack', 0) / 1e9:.2f} GB, this host"
        f" {outcome.stats.get('bytes_host', 0) / 1e9:.2f}, origin {outcome.stats.get('bytes_origin', 0) / 1e9:.2f}",
        "errors": str(outcome.errors),
    }
    table = Table(title=f"{load.readers} readers, {load.seconds:g} s, batches of {load.batch_size}", show_header=False)
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)


def _contenders(answer: Answer) -> Table:
    table = Table(Column("contender", overflow="fold"), Column("way", overflow="fold"))
    for name in ("GB/s", "of rounds", "wait p50 ms", "p99 ms", "CPU s/GB"):
        table.add_column(name, justify="right", overflow="fold")
    for name, result in sorted(
        answer.contenders.items(), key=lambda item: -item[1].median("bytes_a_second") if item[1].rounds else 0
    ):
        if not result.rounds:
            continue
        speeds = [one.bytes_a_second / 1e9 for one in result.rounds]
        cpu = result.median("cpu_seconds") / max(result.median("bytes"), 1) * 1e9
        own = "" if result.prepared.get("same_order", True) else " (order of its own)"
        table.add_row(
            name,
            result.prepared["way"] + own,
            f"{result.median('bytes_a_second') / 1e9:.2f}",
            f"{min(speeds):.2f}–{max(speeds):.2f}",
            f"{result.median('wait_p50_ms'):.1f}",
            f"{result.median('wait_p99_ms'):.1f}",
            f"{cpu:.2f}",
        )
    return table


def _ratios(answer: Answer) -> Table:
    table = Table("what")
    for name in ("figure", "of rounds", "reach", "met"):
        table.add_column(name, justify="right")
    for ratio in answer.ratios:
        spread = f"{min(ratio.each):.2f}–{max(ratio.each):.2f}" if ratio.each else ratio.note
        reach = f"{ratio.sense} {ratio.reach:g}" if ratio.reach is not None else ""
        met = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[ratio.met]
        table.add_row(ratio.name, f"{ratio.value:.2f}{' ' * bool(ratio.unit)}{ratio.unit}", spread, reach, met)
    return table
