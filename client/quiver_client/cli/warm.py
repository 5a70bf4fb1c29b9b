"""``quiver warm``: bring a dataset in before anybody waits for it."""

from __future__ import annotations

import click
import numpy as np

from quiver.errors import OverCapacity
from quiver.plan import plan_shards
from quiver.sizes import format_size
from quiver_client.cli.options import cache_option, json_option, print_json
from quiver_client.cli.progress import byte_bar
from quiver_client.config import CacheConfig
from quiver_client.fetched import open_manifest
from quiver_client.session import Session

SHARDS_AT_ONCE = 32  # enough for every daemon of a rack to be busy


@click.command("warm", epilog="Example: quiver warm imagenet.quiver --cache http://node1:7717")
@click.argument("manifest", metavar="M.quiver")
@cache_option()
@json_option
def command(manifest: str, cache: CacheConfig, *, as_json: bool) -> None:
    """Bring all shards of M.quiver into a cache. Exits with 1 if some could not be brought in."""
    opened = open_manifest(manifest)
    session = Session(opened, cache, "off", introduce=True)
    absent = 0
    try:
        with byte_bar("warming") as progress:
            if progress is not None:
                progress.start(int(opened.tables.shard_sizes.sum()))
            for first in range(0, opened.shard_count, SHARDS_AT_ONCE):
                shards = np.arange(first, min(first + SHARDS_AT_ONCE, opened.shard_count))
                absent += session.bring(plan_shards(opened, shards))
                if progress is not None:
                    progress.advance(int(opened.tables.shard_sizes[shards].sum()))
    finally:
        session.close()
    resident = opened.shard_count - absent
    if as_json:
        print_json({"shards": opened.shard_count, "resident": resident, "bytes": int(opened.tables.shard_sizes.sum())})
    else:
        click.echo(f"{resident} of {opened.shard_count} shards of {manifest} are in the cache")
    if absent:
        raise OverCapacity(
            f"{absent} of {opened.shard_count} shards could not be brought in: the cache has no room for"
            f" {format_size(int(opened.tables.shard_sizes.sum()))}, or {opened.header.base} lost samples of them"
            f" (`quiver verify {manifest}` names those)",
            0.0,
        )
