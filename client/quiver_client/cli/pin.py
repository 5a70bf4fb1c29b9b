"""``quiver pin``: keep a dataset in the cache."""

from __future__ import annotations

import click

from quiver_client.cli import pinning
from quiver_client.cli.operating import operator_options
from quiver_client.config import CacheConfig


@click.command("pin", epilog="Example: quiver pin imagenet --cache http://node1:7717")
@pinning.dataset_argument
@operator_options
def command(cache: CacheConfig | None, *, name: str, as_json: bool) -> int:
    """Keep what is resident of a dataset in the cache, whoever needs the room.

    A pin survives a restart of the daemons. Pins may take nine tenths of the capacity, and of a tenant its quota. A pin
    fetches nothing: `quiver warm` does.
    """
    return pinning.pin(cache, name, as_json=as_json)
