"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from quiver.errors import Misconfigured
from quiver.sizes import parse_size
from quiver_client.config import CacheConfig, parse_cache


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.2 on
    """A size as people write it, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except Misconfigured as error:
            self.fail(str(error), param, ctx)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def cache_option(default: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the parsed option ``--cache``; ``default`` describes the default; without one it is required."""
    what = "http://node:7717,… for a rack, file:///folder?capacity=200GiB for a folder of this machine."
    return click.option(
        "--cache",
        metavar="URL",
        envvar="QUIVER_CACHE",
        required=not default,
        callback=_parsed_cache,
        help=f"{what} [default: {default}]" if default else what,
    )


def _parsed_cache(ctx: click.Context, param: click.Parameter, value: str | None) -> CacheConfig | None:
    """An invalid ``--cache`` is wrong usage."""
    try:
        return parse_cache(value) if value else None
    except Misconfigured as error:
        raise click.BadParameter(str(error), ctx, param) from error


def print_json(value: Any) -> None:
    """Print a report for programs."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))
