"""``quiver undrain``: have a drained daemon own shards again."""

from __future__ import annotations

import click
import msgspec

from quiver_client.cli.drain import daemon_named
from quiver_client.cli.options import cache_option, json_option, print_json
from quiver_client.config import CacheConfig


@click.command("undrain", epilog="Example: quiver undrain n3 --cache http://node1:7717")
@click.argument("node")
@cache_option()
@json_option
def command(node: str, cache: CacheConfig, *, as_json: bool) -> None:
    """Bring the daemon NODE back into placement after `quiver drain`. A handover under way ends.

    What it has handed over stays where it is, as a second copy, until the room is wanted.
    """
    with daemon_named(node, cache) as peer:
        status = peer.undrain()
    if as_json:
        print_json(msgspec.to_builtins(status))
    else:
        click.echo(f"{status.id} is {status.state}")
