"""``quiver plan``: capacity planning, by simulation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click

from quiver.allocation import Policy
from quiver.sizes import format_decimal, format_rate
from quiver_client.cli.options import json_option, print_json
from quiver_client.planning import Fleet, Outcome, read_fleet, simulate

NOTE: Final = "Simulation: the policies decide as in a daemon, but nothing is read (see docs/planning.md)"


@click.command("plan", epilog="Example: quiver plan fleet.toml --policy max-min --policy throughput")
@click.argument("fleet", metavar="FLEET.toml", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice([policy.value for policy in Policy]),
    help="Simulate this policy; may be given several times. [default: all]",
)
@click.option("--jobs", "with_jobs", is_flag=True, help="Print a line for each job as well.")
@json_option
def command(fleet: Path, *, policies: tuple[str, ...], with_jobs: bool, as_json: bool) -> None:
    """Predict throughput, waiting and origin bytes of the jobs in FLEET.toml, for each policy.

    A simulation for capacity planning: it asks no daemon and reads no data.
    """
    plan = read_fleet(fleet)
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    outcomes = [_simulated(plan, Policy(policy)) for policy in policies or [policy.value for policy in Policy]]
    if as_json:
        print_json(describe(plan, outcomes))
        return
    _print(plan, outcomes)
    if with_jobs:
        for outcome in outcomes:
            _print_jobs(outcome)


def describe(plan: Fleet, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return what ``--json`` prints: bytes, seconds, bytes per second, and parts of 1."""
    return {
        "simulation": True,
        "racks": len(plan.racks),
        "capacity_bytes": sum(rack.capacity_bytes for rack in plan.racks),
        "notes": list(plan.notes),
        "policies": {str(outcome.policy): {**outcome.totals(), "by_job": outcome.jobs()} for outcome in outcomes},
    }


def _simulated(plan: Fleet, policy: Policy) -> Outcome:
    if not sys.stderr.isatty():
        return simulate(plan, policy)
    with click.progressbar(length=len(plan.racks), label=f"{policy:10}", file=sys.stderr) as bar:
        return simulate(plan, policy, lambda: bar.update(1))


def _print(plan: Fleet, outcomes: list[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    click.echo(f"{len(plan.racks)} rack(s), {len(plan.jobs)} job(s), {len(plan.datasets)} dataset(s)")
    table = Table(box=None, pad_edge=False)
    for column in ("policy", "per job", "of full speed", "waiting", "worst job", "from origins", "all done after"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for outcome in outcomes:
        totals = outcome.totals()
        part = totals["throughput"] / totals["full_speed"] if totals["full_speed"] else 0.0
        table.add_row(
            str(outcome.policy),
            format_rate(totals["throughput"]),
            f"{part:.1%}",
            f"{totals['waiting']:.1%}",
            f"{totals['waiting_worst']:.1%}",
            format_decimal(totals["origin_bytes"]),
            _time(totals["end_seconds"]) if not totals["never_end"] else f"{totals['never_end']} never end",
        )
    Console(width=max(100, Console().width)).print(table)
    click.echo(NOTE)


def _print_jobs(outcome: Outcome) -> None:
    click.echo(f"\n{outcome.policy}")
    for job in outcome.jobs():
        speed = f"{format_rate(job['throughput'])} of {format_rate(job['full_speed'])}"
        end = "never ends" if job["end_seconds"] is None else f"ends after {_time(job['end_seconds'])}"
        origin = f"{format_decimal(job['origin_bytes'])} from the origin"
        click.echo(f"{job['name']:24} {job['rack']:12} {speed:24} waits {job['waiting']:6.1%}  {origin:24} {end}")


def _time(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
