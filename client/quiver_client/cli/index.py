"""``quiver index``."""

from __future__ import annotations

from typing import Any, get_args

import click

from quiver.layout import SHARD_BYTES_MAX, SHARD_BYTES_MIN
from quiver.sizes import format_size
from quiver_client.cli.options import Size, json_option, print_json
from quiver_client.cli.progress import byte_bar
from quiver_client.indexing import Report, index
from quiver_client.indexing.detect import Format
from quiver_client.indexing.run import LAYOUTS


class _Names(click.ParamType):  # type: ignore[type-arg]
    """Names separated by commas."""

    name = "names"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        return [name for name in value.split(",") if name]


def _within_limits(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    if value is not None and not SHARD_BYTES_MIN <= value <= SHARD_BYTES_MAX:
        low, high = format_size(SHARD_BYTES_MIN), format_size(SHARD_BYTES_MAX)
        raise click.BadParameter(f"a shard holds {low} to {high}, not {format_size(value)}", ctx, param)
    return value


@click.command(
    "index",
    epilog="Examples: quiver index /data/imagenet/train -o imagenet.quiver; "
    "quiver index 's3://bucket/train-{000..099}.tar' -o train.quiver",
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE")
@click.option("-o", "--output", required=True, metavar="M.quiver", help="Where to write the manifest.")
@click.option("--force", is_flag=True, help="Overwrite an older manifest of that name.")
@click.option(
    "--format",
    "form",
    envvar="QUIVER_INDEX_FORMAT",
    type=click.Choice(get_args(Format)),
    default="auto",
    show_default=True,
    help="The format of the source; auto detects it by the names.",
)
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    default="auto",
    show_default=True,
    help="mixed: every shard a random part of the data; sequential: the order of the source.",
)
@click.option(
    "--shard-size",
    type=Size(),
    default=None,
    show_default="a size that gives some hundred shards, 32MiB at most",
    callback=_within_limits,
    help="The maximum size of a shard.",
)
@click.option("--base", metavar="OLD.quiver", help="Keep the shards of this manifest whose samples are unchanged.")
@click.option("--fields", type=_Names(), metavar="NAME,…", help="Only these fields: columns, extensions.")
@click.option("--exclude", type=_Names(), metavar="NAME,…", help="Leave these fields out.")
@click.option("--name", default="", metavar="NAME", help="What people call the dataset; by default its file's name.")
@json_option
def command(sources: tuple[str, ...], *, form: Format, shard_size: int | None, as_json: bool, **given: Any) -> None:
    """Read SOURCE once, where it lies, and write its manifest.

    SOURCE is a path or a file://, s3://, gs://, az:// or http(s):// URL of a file or a folder, or a pattern such as
    train-{000..099}.tar; or several local files. Nothing is copied or converted.
    """
    size = "auto" if shard_size is None else shard_size
    given["exclude"] = given["exclude"] or ()
    with byte_bar("indexing") as progress:
        report = index(sources, format=form, shard_bytes=size, progress=progress, **given)
    for notice in report.warnings:
        click.echo(f"warning: {notice}", err=True)
    if as_json:
        print_json(report.as_json())
    else:
        click.echo(_line(report))


def _line(report: Report) -> str:
    equal = report.samples - report.distinct
    stored = f" ({equal} of them equal to others)" if equal else ""
    said = f"; see the warnings above ({len(report.warnings)})" if report.warnings else ""
    kept = f", {report.reused_shards} of them from the base" if report.reused_shards else ""
    held = f"{format_size(report.bytes)} in {report.shards} shards{kept}"
    return f"{report.manifest}: {report.samples} samples{stored}, {held} ({report.format}, {report.layout}){said}"
