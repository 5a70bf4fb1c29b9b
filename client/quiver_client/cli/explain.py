"""``quiver explain``: why a job is as fast as it is, and what more or less cache would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from quiver.errors import QuiverError
from quiver.location import shown
from quiver.overview import AllocationView
from quiver.peer import PeerClient
from quiver.sizes import format_size
from quiver_client.cli.operating import Members, ask_datasets, members, operator_options, say_problems
from quiver_client.cli.options import print_json
from quiver_client.config import CacheConfig
from quiver_client.operating.explaining import Explained, explain_dataset, explain_job, in_words
from quiver_client.operating.finding import subject_called
from quiver_client.operating.merging import Dataset, best_allocation, merged_jobs
from quiver_client.operating.rack import ask_all

LINE_CHARS_MAX = 800


@click.command("explain", epilog="Example: quiver explain imagenet --cache http://node1:7717")
@click.argument("name", metavar="JOB|DATASET")
@click.option("--tenant", help="Of the job, where several tenants have one of this name.")
@operator_options
def command(cache: CacheConfig | None, *, name: str, tenant: str | None, as_json: bool) -> int:
    """Say why a job, or each reader of a dataset, is as fast as it is.

    f* is what it would read without waiting, b what its origin gives its dataset, c how much of that is in the cache.
    Then: what it is predicted to read, what it reads, and what a terabyte of cache more or less would change.
    """
    to_ask = members(cache)
    datasets, asked = ask_datasets(to_ask)
    told = ask_all(to_ask, PeerClient.jobs)
    jobs = merged_jobs(told.values, datasets)
    found = subject_called(name, jobs, datasets, tenant)
    view, problem = _allocation(to_ask)
    problems = {**asked.problems, **told.problems, **problem}
    dataset = found if isinstance(found, Dataset) else None
    explained = explain_job(found, datasets, view) if isinstance(found, list) else explain_dataset(found, jobs, view)
    if as_json:
        print_json(_report(dataset, explained, view) | {"missing": problems})
        return 0
    for line in _about(dataset) + _lines(explained, view):
        click.echo(shown(line, LINE_CHARS_MAX))
    say_problems(problems)
    return 0


def _allocation(to_ask: Members) -> tuple[AllocationView | None, dict[str, str]]:
    """Return the rack's allocation, and who did not tell; daemons that know of none are no error."""
    try:
        asked = ask_all(to_ask, PeerClient.allocation)
    except QuiverError as error:
        return None, {"the allocation": str(error)}
    return best_allocation(asked.values), asked.problems


def _report(dataset: Dataset | None, explained: Sequence[Explained], view: AllocationView | None) -> dict[str, Any]:
    about = {"dataset": asdict(dataset) | {"resident_share": dataset.resident_share}} if dataset is not None else {}
    words = [in_words(it, allocates=view is not None) for it in explained]
    readers = [it.as_json() | {"words": lines} for it, lines in zip(explained, words, strict=True)]
    return {**about, "policy": view.policy if view is not None else "", "readers": readers}


def _about(dataset: Dataset | None) -> list[str]:
    if dataset is None:
        return []
    held = f"{format_size(dataset.resident_bytes)} are in the cache"
    if dataset.resident_bytes > dataset.size_bytes:
        held += ", copies included"
    else:
        held += f" ({dataset.resident_share:.0%})"
    pinned = "; it is pinned" if dataset.pinned_at else ""
    saved = f", and sharing saves {format_size(dataset.saved_bytes)}" if dataset.saved_bytes else ""
    lines = [f"{dataset.name} has {format_size(dataset.size_bytes)}; {held}{saved}{pinned}."]
    if not dataset.reader_count:
        lines.append("Nobody reads it: what is resident is kept until the room is wanted.")
    return lines


def _lines(explained: Sequence[Explained], view: AllocationView | None) -> list[str]:
    return [line for it in explained for line in ["", *in_words(it, allocates=view is not None)]][1:]
