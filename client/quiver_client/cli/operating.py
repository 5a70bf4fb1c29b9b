"""What the commands for operators share: which daemons to ask, and what is said of those that do not answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from quiver.peer import PeerClient
from quiver.ring import Member
from quiver_client.cli.options import cache_option, json_option
from quiver_client.config import CacheConfig, RackCache, parse_cache
from quiver_client.operating.merging import Dataset, merged_datasets
from quiver_client.operating.rack import Asked, ask_all, members_of

Members = tuple[str, Sequence[Member]]


def operator_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--cache`` and ``--json``."""
    return cache_option("$QUIVER_CACHE")(json_option(command))


def members(cache: CacheConfig | None) -> Members:
    """Return the daemons to ask. A folder has none, and is wrong usage."""
    config = cache or parse_cache(None)
    if not isinstance(config, RackCache):
        raise click.UsageError(
            f"{config.root} is a folder, and no daemon runs there that could answer; name a rack:"
            " --cache http://node:7717, or set QUIVER_CACHE"
        )
    return members_of(config.urls)


def ask_datasets(to_ask: Members) -> tuple[list[Dataset], Asked[Any]]:
    """Return the datasets of the rack, and who answered."""
    asked = ask_all(to_ask, PeerClient.datasets)
    return merged_datasets(asked.values), asked


def say_problems(problems: Mapping[str, str]) -> None:
    """Say on standard error which daemons did not answer: the figures are without them."""
    for member, why in problems.items():
        click.echo(f"{member}: {why}", err=True)


def say_left_out(count: int, what: str) -> None:
    if count:
        click.echo(f"and {count} more {what}{'s' * (count != 1)}, which the daemons left out", err=True)
