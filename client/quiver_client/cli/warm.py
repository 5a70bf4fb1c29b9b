"""``quiver warm``: fill a dataset, or what a saved job still needs of it, into a cache before a job waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quiver.errors import BadRequest, Changed, OverCapacity, QuiverError
from quiver.manifest import Manifest
from quiver.residency.messages import HOLD_SECONDS_MAX
from quiver.sizes import format_size
from quiver_client.cli.options import Duration, cache_option, json_option, print_json
from quiver_client.cli.progress import byte_bar
from quiver_client.config import CacheConfig
from quiver_client.loader.epoch import ShardLayout
from quiver_client.manifest_download import open_manifest
from quiver_client.migration.checkpoint import states_in
from quiver_client.migration.choice import chosen
from quiver_client.migration.remaining import Remaining, remaining
from quiver_client.migration.warming import Amount, Warmed, bring
from quiver_client.placement import Placement
from quiver_client.session import Session


@dataclass(frozen=True, slots=True)
class _Saved:
    """What was asked for with ``--state``: checkpoints, the keys of the state in them, and how the job will read."""

    checkpoints: tuple[Path, ...]
    key: str | None
    substitute: bool | None


@click.command("warm", epilog="Example: quiver warm imagenet.quiver --state checkpoint.pt --cache http://rack2:7717")
@click.argument("manifest", metavar="M.quiver")
@cache_option()
@click.option(
    "--state",
    "checkpoints",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="CKPT",
    help="Fill only what the job that saved this checkpoint still needs of its epoch, in that order. Give one of each"
    " rank unless it has the merged state of all.",
)
@click.option("--state-key", "key", metavar="KEY", help="Which state of a checkpoint that has several.")
@click.option("--no-substitute", is_flag=True, help="The job will be resumed with substitute=False.")
@click.option(
    "--keep",
    type=Duration(HOLD_SECONDS_MAX),
    default="10m",
    show_default=True,
    help="How long a rack keeps what was filled for a job that has not begun, at most 1h; 0: no longer than other"
    " files.",
)
@json_option
def command(  # noqa: PLR0913 - one per option
    manifest: str,
    cache: CacheConfig,
    checkpoints: tuple[Path, ...],
    key: str | None,
    keep: float,
    *,
    no_substitute: bool,
    as_json: bool,
) -> None:
    """Fill all shards of M.quiver into a cache, or those that a saved job still needs.

    A checkpoint is JSON, a file of torch.save, or a folder of Hugging Face's Trainer or of Accelerate; no code in it is
    run. Nothing that was filled is evicted for the rest: if there is no room for all, the last of the order are left
    out. Exit with 1 if some are missing at the end, and say why.

    If the origin does not answer, retry for 5 minutes, or $QUIVER_ORIGIN_PATIENCE.
    """
    saved = _Saved(checkpoints, key, False if no_substitute else None)
    if not checkpoints and (key or no_substitute):
        raise click.UsageError("--state-key and --no-substitute: they are about a checkpoint; give --state with them")
    opened = open_manifest(manifest)
    need = _need(opened, saved)
    session = Session(opened, cache, "off", introduce=True)
    try:
        with byte_bar("warming") as progress:
            if progress is not None:
                progress.start(int(opened.tables.shard_sizes[need.shards].sum()))
            advance = progress.advance if progress is not None else None
            warmed = bring([(opened, session)], need, keep_seconds=keep, progress=advance)
    finally:
        session.close()
    if as_json:
        print_json(_report(warmed, need if checkpoints else None))
    else:
        click.echo(_said(warmed, manifest, need if checkpoints else None))
    if warmed.errors:
        raise QuiverError(_described(warmed, opened, manifest))


@dataclass(frozen=True, slots=True)
class _Whole:
    """All of a manifest, as the only leaf of a dataset."""

    manifest: Manifest


def _need(opened: Manifest, saved: _Saved) -> Remaining:
    """Return what to bring. Raises ``BadRequest`` if the states are not of this dataset, or not of one job."""
    whole: Any = _Whole(opened)
    placement = Placement.of_leaf(whole)
    if not saved.checkpoints:
        return Remaining.all_of(ShardLayout.of(placement))
    identity = str(opened.digest)
    found = [each for checkpoint in saved.checkpoints for each in states_in(checkpoint)]
    try:
        states = [each.state for each in chosen(found, identity, saved.key)]
        return remaining(states, identity, placement, substitute=saved.substitute)
    except ValueError as error:
        raise BadRequest(f"{', '.join(map(str, saved.checkpoints))}: {error}") from error


def _report(warmed: Warmed, need: Remaining | None) -> dict[str, Any]:
    report: dict[str, Any] = {"shards": warmed.needed.shards, "bytes": warmed.needed.bytes}
    for name in ("resident", "there", "brought", "left_out", "failed"):
        amount: Amount = getattr(warmed, name)
        report |= {name if name == "resident" else f"{name}_shards": amount.shards, f"{name}_bytes": amount.bytes}
    report["kept_seconds"] = warmed.kept_seconds
    if need is not None:
        report |= {"epoch": need.epoch, "samples_left": need.samples, "in_order": need.in_order}
    return report


def _said(warmed: Warmed, manifest: str, need: Remaining | None) -> str:
    """Return a line: what is in the cache now, and for how long."""
    resident, needed = warmed.resident, warmed.needed
    whose = f"that the job still needs of epoch {need.epoch}" if need is not None else f"of {manifest}"
    sizes = f"{format_size(resident.bytes)} of {format_size(needed.bytes)}"
    line = f"{resident.shards} of {needed.shards} shards {whose} are in the cache ({sizes})"
    line += f": {warmed.there.shards} were there, {warmed.brought.shards} were filled"
    if warmed.left_out.shards:
        line += f", and {warmed.left_out.shards} do not fit ({format_size(warmed.left_out.bytes)})"
    if warmed.kept_seconds:
        line += f"; kept for {warmed.kept_seconds / 60:.3g} min"
    elif warmed.not_kept:
        line += f"; kept no longer than other files: {warmed.not_kept}"
    return line


def _described(warmed: Warmed, opened: Manifest, manifest: str) -> str:
    """Return a line per cause: how many shards were not fetched because of it, and what to do about it."""
    failed: Sequence[QuiverError] = list(warmed.errors.values())
    whole = warmed.left_out.shards == len(failed)
    what = "do not fit into the cache." if whole else "could not be fetched whole."
    causes = [f"{len(failed)} of {warmed.needed.shards} shards {what}"]
    total = format_size(warmed.needed.bytes)
    needs = "the dataset needs" if warmed.needed.shards == opened.shard_count else "they need"
    for kind in dict.fromkeys(map(type, failed)):
        errors = [error for error in failed if isinstance(error, kind)]
        advice = {
            OverCapacity: f"; {needs} {total}: give the cache more capacity.",
            Changed: f" `quiver verify {manifest}` names all samples that are lost.",
        }.get(kind, "")
        causes.append(f"{len(errors)} of them: {errors[0]}{advice}")
    return " ".join(causes)
