"""``quiver warm``: bring a dataset in before anybody waits for it."""

from __future__ import annotations

import click
import numpy as np

from quiver.errors import Changed, OverCapacity, QuiverError
from quiver.manifest import Manifest
from quiver.plan import plan_shards
from quiver.sizes import format_size
from quiver_client.cli.options import cache_option, json_option, print_json
from quiver_client.cli.progress import byte_bar
from quiver_client.config import CacheConfig
from quiver_client.manifest_download import open_manifest
from quiver_client.session import Session

SHARDS_AT_ONCE = 32  # enough for every daemon of a rack to be busy


@click.command("warm", epilog="Example: quiver warm imagenet.quiver --cache http://node1:7717")
@click.argument("manifest", metavar="M.quiver")
@cache_option()
@json_option
def command(manifest: str, cache: CacheConfig, *, as_json: bool) -> None:
    """Fetch all shards of M.quiver into a cache. Exits with 1 if some could not be fetched, and says why.

    An origin that does not answer is waited for: 5 minutes, or $QUIVER_ORIGIN_PATIENCE.
    """
    opened = open_manifest(manifest)
    session = Session(opened, cache, "off", introduce=True)
    failed: dict[int, QuiverError] = {}
    try:
        with byte_bar("warming") as progress:
            if progress is not None:
                progress.start(int(opened.tables.shard_sizes.sum()))
            for first in range(0, opened.shard_count, SHARDS_AT_ONCE):
                shards = np.arange(first, min(first + SHARDS_AT_ONCE, opened.shard_count))
                failed |= session.bring(plan_shards(opened, shards))
                if progress is not None:
                    progress.advance(int(opened.tables.shard_sizes[shards].sum()))
    finally:
        session.close()
    resident = opened.shard_count - len(failed)
    if as_json:
        print_json({"shards": opened.shard_count, "resident": resident, "bytes": int(opened.tables.shard_sizes.sum())})
    else:
        click.echo(f"{resident} of {opened.shard_count} shards of {manifest} are in the cache")
    if failed:
        raise QuiverError(_described(failed, opened, manifest))


def _described(failed: dict[int, QuiverError], opened: Manifest, manifest: str) -> str:
    """Return what kept how many shards out, each cause by itself, and what to do about it."""
    causes = [f"{len(failed)} of {opened.shard_count} shards could not be fetched whole."]
    total = format_size(int(opened.tables.shard_sizes.sum()))
    for kind in dict.fromkeys(map(type, failed.values())):
        errors = [error for error in failed.values() if isinstance(error, kind)]
        advice = {
            OverCapacity: f"; the dataset needs {total}: give the cache more capacity.",
            Changed: f" `quiver verify {manifest}` names all samples that are lost.",
        }.get(kind, "")
        causes.append(f"{len(errors)} of them: {errors[0]}{advice}")
    return " ".join(causes)
