"""``quiver datasets``: what a rack holds of each dataset, and who reads it."""

from __future__ import annotations

from dataclasses import asdict

import click

from quiver.sizes import format_size
from quiver_client.cli.operating import ask_datasets, members, operator_options, say_left_out, say_problems
from quiver_client.cli.options import print_json
from quiver_client.cli.tables import print_table, share
from quiver_client.config import CacheConfig
from quiver_client.operating.merging import Dataset

READERS_SHOWN_MAX = 3


@click.command("datasets", epilog="Example: quiver datasets --cache http://node1:7717")
@click.option("--all", "every", is_flag=True, help="Also those of which nothing is held and that nobody reads.")
@operator_options
def command(cache: CacheConfig | None, *, every: bool, as_json: bool) -> int:
    """Print the datasets that a rack knows.

    SAVED is what the resident part would take besides if equal samples, and shards that several datasets have in
    common, were stored each time. FROM ORIGIN is what the daemons read of it since they started.
    """
    datasets, asked = ask_datasets(members(cache))
    if as_json:
        rows = [asdict(it) | {"resident_share": it.resident_share} for it in datasets]
        capacity = sum(view.capacity_bytes for view in asked.values)
        print_json({"rack": asked.rack, "capacity_bytes": capacity, "datasets": rows, "missing": asked.problems})
        return 0
    shown = [it for it in datasets if every or it.resident_bytes or it.reader_count or it.pinned_at]
    print_table(
        ("DATASET", "SIZE", "RESIDENT", "%", "SAVED", "FROM ORIGIN", "PINNED", "READ BY"),
        [_row(it, len(asked.answers)) for it in shown],
        right=range(1, 6),
    )
    if not shown:
        others = f"; it knows {len(datasets)} that --all shows" if datasets else ""
        click.echo(f"this rack holds no dataset, and nobody reads one{others}", err=True)
    say_left_out(max((view.left_out for view in asked.values), default=0), "dataset")
    say_problems(asked.problems)
    return 0


def _row(it: Dataset, daemons: int) -> tuple[str, ...]:
    pinned = "" if not it.pinned_at else "yes" if it.pinned_at == daemons else f"{it.pinned_at} of {daemons}"
    readers = ", ".join(name or "(unnamed)" for name in it.readers[:READERS_SHOWN_MAX])
    more = it.reader_count - min(len(it.readers), READERS_SHOWN_MAX)
    return (
        it.name,
        format_size(it.size_bytes) if it.size_bytes else "?",
        format_size(it.resident_bytes),
        share(it.resident_share),
        format_size(it.saved_bytes),
        format_size(it.read.get("origin", 0)),
        pinned,
        f"{readers} and {more} more" if more > 0 else readers,
    )
