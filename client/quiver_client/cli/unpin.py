"""``quiver unpin``: let a dataset be evicted again."""

from __future__ import annotations

import click

from quiver_client.cli import pinning
from quiver_client.cli.operating import operator_options
from quiver_client.config import CacheConfig


@click.command("unpin", epilog="Example: quiver unpin imagenet --cache http://node1:7717")
@pinning.dataset_argument
@operator_options
def command(cache: CacheConfig | None, *, name: str, as_json: bool) -> int:
    """Let a dataset be evicted again when the room is wanted."""
    return pinning.unpin(cache, name, as_json=as_json)
