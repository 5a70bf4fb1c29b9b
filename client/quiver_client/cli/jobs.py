"""``quiver jobs``: who reads what, how fast, and how long it waits."""

from __future__ import annotations

from dataclasses import asdict

import click

from quiver.peer import PeerClient
from quiver.sizes import format_rate, format_size
from quiver_client.cli.operating import ask_datasets, members, operator_options, say_left_out, say_problems
from quiver_client.cli.options import print_json
from quiver_client.cli.tables import print_table, share
from quiver_client.config import CacheConfig
from quiver_client.operating.merging import Job, merged_jobs
from quiver_client.operating.rack import ask_all


@click.command("jobs", epilog="Example: quiver jobs --cache http://node1:7717")
@operator_options
def command(cache: CacheConfig | None, *, as_json: bool) -> int:
    """Print the jobs that read from a rack.

    F* is what a job would read if it never waited, NOW what it reads, WAITS the share of its time that it waits for
    data, all over its ranks. A stock loader reports nothing: what the daemons see it read is shown.
    """
    to_ask = members(cache)
    asked = ask_all(to_ask, PeerClient.jobs)
    datasets, others = ask_datasets(to_ask)
    jobs = merged_jobs(asked.values, datasets)
    problems = {**others.problems, **asked.problems}
    if as_json:
        print_json({"rack": asked.rack, "jobs": [asdict(job) for job in jobs], "missing": problems})
        return 0
    resident = {it.id: it.resident_share for it in datasets}
    print_table(
        ("JOB", "GROUP", "TENANT", "DATASET", "RANKS", "F*", "NOW", "WAITS", "IN CACHE", "READ"),
        [_row(job, resident.get(job.dataset_id)) for job in jobs],
        right=range(4, 10),
    )
    if not jobs:
        click.echo("nobody reads from this rack now", err=True)
    say_left_out(max((view.left_out for view in asked.values), default=0), "job")
    say_problems(problems)
    return 0


def _row(job: Job, resident: float | None) -> tuple[str, ...]:
    return (
        job.shown + (" (stock)" if job.stock else ""),
        job.group,
        job.tenant,
        job.dataset,
        str(job.ranks),
        format_rate(job.rate) if job.rate else "?",
        format_rate(job.throughput) if job.throughput else "?",
        "?" if job.stock or not (job.throughput or job.waited) else share(job.waited),
        "?" if resident is None else share(resident),
        format_size(job.attained_bytes),
    )
