"""``quiver place``: which of several racks should run which job."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

import click

from quiver.errors import Misconfigured, QuiverError, Unavailable
from quiver.overview import dataset_id
from quiver.sizes import format_size, parse_size
from quiver_client.cli.options import json_option, print_json
from quiver_client.cli.tables import print_table, share
from quiver_client.config import RackCache, parse_cache
from quiver_client.manifest_download import open_manifest
from quiver_client.migration.placing import EPOCHS, Placement, Prediction, Rack, place_jobs
from quiver_client.migration.racks import Seen, Wanted, jobs_of, look

FAILED: Final = 1
RACKS_MAX: Final = 256
_RATED: Final = re.compile(r"(.+)@(\d[\d.]*\s*[KMGTP]?i?B?(?:/s)?)", re.IGNORECASE)


class Rate(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Bytes per second as people write them: ``200MB/s``."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(parse_size(str(value).removesuffix("/s")))
        except Misconfigured as error:
            self.fail(f"{error}, or with /s", param, ctx)


class Manifests(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """``M.quiver`` or ``M.quiver@RATE``."""

    name = "manifest"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        rated = _RATED.fullmatch(value)
        manifest, at, rate = value.rpartition("@")
        if rated is None and at and manifest.endswith(".quiver"):
            self.fail(f"{value}: {rate!r} is no rate; write one like {manifest}@800MB/s", param, ctx)
        return (rated[1], Rate().convert(rated[2], param, ctx)) if rated else (value, 0.0)


def _rack_urls(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    urls = [url.strip() for url in value.split(",") if url.strip()]
    if not urls or len(urls) > RACKS_MAX:
        raise click.BadParameter(f"name 1 to {RACKS_MAX} racks, each by the URL of one of its daemons", ctx, param)
    for url in urls:
        try:
            config = parse_cache(url)
        except Misconfigured as error:
            raise click.BadParameter(str(error), ctx, param) from error
        if not isinstance(config, RackCache):
            raise click.BadParameter(f"{url} is a folder; name racks, as http://node:7717", ctx, param)
    return tuple(dict.fromkeys(urls))


@click.command(
    "place",
    epilog="Example: quiver place imagenet.quiver@800MB/s laion.quiver --racks http://a1:7717,http://b1:7717",
)
@click.argument("manifests", metavar="M.quiver[@RATE]...", nargs=-1, required=True, type=Manifests())
@click.option("--racks", required=True, metavar="URL,URL", callback=_rack_urls, help="One daemon of each rack.")
@click.option(
    "--rate", type=Rate(), metavar="RATE", help="What each job reads if it never waits. [default: all it can get]"
)
@click.option(
    "--origin-rate", type=Rate(), metavar="RATE", help="What the origin delivers to each rack. [default: as measured]"
)
@click.option("--epochs", type=click.IntRange(1), default=EPOCHS, show_default=True, help="How long the jobs run.")
@json_option
def command(
    manifests: tuple[tuple[str, float], ...],
    racks: tuple[str, ...],
    rate: float | None,
    origin_rate: float | None,
    epochs: int,
    *,
    as_json: bool,
) -> int:
    """Say which rack should run which job, so that all of them together wait least.

    A job is a manifest, and the same one twice is two jobs. For each rack it is asked what it holds of the job's
    dataset, how much room and bandwidth it has, and who reads there; with the job added, its own allocation is solved
    again. TURN says which to start first in a rack. Nothing is reserved or moved.

    Exits 1 if a rack could not be asked; the answer is without it.
    """
    wanted = [Wanted(name, open_manifest(name), its or rate or 0.0) for name, its in manifests]
    seen = look(racks, wanted, origin_rate or 0.0)
    if not seen.racks:
        first = next(iter(seen.away.values()))
        raise first if len(seen.away) == 1 else Unavailable(", ".join(racks), f"no rack answers: {first}")
    try:
        placed = place_jobs(jobs_of(wanted), seen.racks, epochs)
    except ValueError as error:
        raise QuiverError(str(error)) from error
    if as_json:
        print_json(_report(placed, seen, wanted, epochs))
    else:
        _print(placed, seen.racks, epochs)
        for note in seen.notes:
            click.echo(note, err=True)
    for url, why in seen.away.items():
        click.echo(f"{url}: left out, since it could not be asked: {why}", err=True)
    return FAILED if seen.away else 0


def _print(placed: Sequence[Placement], racks: Sequence[Rack], epochs: int) -> None:
    rows = []
    for it in sorted(placed, key=lambda it: (it.rack, it.after)):
        found = it.prediction
        rows.append(
            (
                it.job.name + (f" ({it.job.count} jobs)" if it.job.count > 1 else ""),
                racks[it.rack].name,
                str(it.after + 1),
                share(found.resident_bytes / it.job.size_bytes),
                format_size(found.missing_bytes),
                format_size(found.later_bytes) if epochs > 1 else "",
                _duration(found.first_epoch_seconds) if _is_timed(found, racks) else "?",
                it.reason,
            )
        )
    headings = ("JOB", "RACK", "TURN", "THERE", "TO FETCH", "EACH LATER EPOCH", "FIRST EPOCH", "WHY")
    print_table(headings, rows, right=range(2, 7))


def _report(placed: Sequence[Placement], seen: Seen, wanted: Sequence[Wanted], epochs: int) -> dict[str, Any]:
    by_dataset = {it.job.dataset: it for it in placed}
    placements = []
    for job in wanted:
        it = by_dataset[dataset_id(job.manifest.digest)]
        rack = seen.racks[it.rack]
        placements.append(
            {"manifest": job.name, "rack": rack.name, "url": rack.url, "turn": it.after + 1}
            | _prediction(it.prediction, seen.racks, epochs)
            | {
                "reason": it.reason,
                "racks": {
                    rack.url: _prediction(each, seen.racks, epochs)
                    for rack, each in zip(seen.racks, it.predictions, strict=True)
                    if each.is_possible
                },
            }
        )
    racks = [
        {
            "rack": rack.name,
            "url": rack.url,
            "capacity_bytes": int(rack.capacity_bytes),
            "free_bytes": int(rack.free_bytes),
            "origin_rate": rack.origin_rate,
            "jobs": sum(len(it.readers) for it in rack.problem.datasets) if rack.problem is not None else None,
        }
        for rack in seen.racks
    ]
    away = {url: str(error) for url, error in seen.away.items()}
    return {"epochs": epochs, "placements": placements, "racks": racks, "away": away, "notes": list(seen.notes)}


def _is_timed(it: Prediction, racks: Sequence[Rack]) -> bool:
    """Whether the time of the first epoch follows from anything that is known, be it of another rack's origin."""
    return any(rack.origin_rate for rack in racks) if it.missing_bytes else math.isfinite(it.rate)


def _prediction(it: Prediction, racks: Sequence[Rack], epochs: int) -> dict[str, Any]:
    return {
        "resident_bytes": int(it.resident_bytes),
        "cache_bytes": int(it.cache_bytes),
        "first_epoch_origin_bytes": int(it.missing_bytes),
        "later_epoch_origin_bytes": int(it.later_bytes),
        "origin_bytes": int(it.origin_bytes(epochs)),
        "first_epoch_seconds": it.first_epoch_seconds if _is_timed(it, racks) else None,
        "throughput": it.rate if math.isfinite(it.rate) else None,
        "slows_others": it.slowed,
    }


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
