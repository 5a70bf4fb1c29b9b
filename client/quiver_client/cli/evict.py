"""``quiver evict``: remove a dataset from the cache."""

from __future__ import annotations

import click

from quiver_client.cli import pinning
from quiver_client.cli.operating import operator_options
from quiver_client.config import CacheConfig


@click.command("evict", epilog="Example: quiver evict imagenet --cache http://node1:7717")
@pinning.dataset_argument
@click.option("--yes", is_flag=True, help="Do not ask, also if jobs read it.")
@operator_options
def command(cache: CacheConfig | None, *, name: str, yes: bool, as_json: bool) -> int:
    """Remove a dataset from the cache: what no other dataset in use shares with it.

    A job that reads it does not fail: it reads from the origin again, and the cache fills again.
    """
    return pinning.evict(cache, name, yes=yes, as_json=as_json)
