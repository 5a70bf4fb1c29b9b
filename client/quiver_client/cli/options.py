"""Options that several commands share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

import click

from quiver.errors import Misconfigured
from quiver.sizes import parse_size
from quiver_client.config import CacheConfig, parse_cache

_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}  # seconds


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.2 on
    """A size as people write it, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except Misconfigured as error:
            self.fail(str(error), param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A duration as people write it, ``90s`` or ``10m``, in seconds."""

    name = "duration"

    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smh]?)\s*", str(value))
        seconds = float(found[1]) * _UNITS[found[2]] if found else -1.0
        if not 0 <= seconds <= self._seconds_max:
            self.fail(f"{value!r}: write a duration of at most {self._seconds_max:g} seconds: 90s, 10m", param, ctx)
        return seconds


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def cache_option(default: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the parsed option ``--cache``; ``default`` describes the default; without one it is required."""
    what = "http://node:7717,… for a rack, file:///folder?capacity=200GiB for a folder of this machine."
    return click.option(
        "--cache",
        metavar="URL",
        envvar="QUIVER_CACHE",
        required=not default,
        show_envvar=not default,
        callback=_parsed_cache,
        help=f"{what} [default: {default}]" if default else what,
    )


def _parsed_cache(ctx: click.Context, param: click.Parameter, value: str | None) -> CacheConfig | None:
    """An invalid ``--cache`` is wrong usage, and so is an empty one, as of an unset variable, where one is required."""
    if param.required and not (value or "").strip():
        raise click.BadParameter("it is empty; write http://HOST:7717 or file:///FOLDER", ctx, param)
    try:
        return parse_cache(value) if value else None
    except Misconfigured as error:
        raise click.BadParameter(str(error), ctx, param) from error


def print_json(value: Any) -> None:
    """Print a report for programs."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))
