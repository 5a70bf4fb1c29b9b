"""``quiver verify``: read everything, hash everything, and name what is wrong."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from quiver.errors import Changed
from quiver.manifest import Manifest
from quiver.plan import plan_blobs
from quiver.sizes import format_size
from quiver_client.batch import Batch, Positions
from quiver_client.cli.decoding import DecodeFunction, Decoding, Undecodable, undecodable
from quiver_client.cli.options import cache_option, json_option, print_json
from quiver_client.cli.progress import byte_bar
from quiver_client.config import CacheConfig
from quiver_client.manifest_download import open_manifest
from quiver_client.session import Session

GROUP_BYTES = 64 << 20  # read at once: held in memory, and spread over several daemons
NAMED_MAX = 1000  # in --json
SHOWN_MAX = 50

Rows = npt.NDArray[np.intp]


@click.command("verify", epilog="Example: quiver verify imagenet.quiver --cache http://node1:7717")
@click.argument("manifest", metavar="M.quiver")
@cache_option("the origin itself")
@click.option(
    "--decode",
    type=DecodeFunction(),
    metavar="MODULE:FUNCTION",
    help="Apply this function to every sample, as a transform would be, and name those for which it raises.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes that decode. [default: one per CPU]")
@json_option
def command(manifest: str, cache: CacheConfig | None, decode: str | None, workers: int | None, *, as_json: bool) -> int:
    """Read every sample of M.quiver through a cache, compare it with its BLAKE3 digest, and name what is wrong.

    M.quiver itself is checked against its own checksums first. Wrong bytes in a cache are replaced. The exit
    status is 1 if anything was wrong, replaced or lost.

    With --decode every sample is then read again and decoded, in several processes: a sample that a training run could
    not decode is named with its index, its key and the error, and the exit status is 1. The function may be in a module
    of the current directory.
    """
    if workers is not None and decode is None:
        raise click.UsageError("--workers: it is how many processes decode; give --decode with it")
    opened = open_manifest(manifest)
    check = _Check(opened, cache)
    try:
        with byte_bar("verifying") as progress:
            if progress is not None:
                progress.start(opened.total_bytes)
            for rows in _groups(opened):
                check.read(rows)
                if progress is not None:
                    progress.advance(int(opened.blob_sizes(rows).sum()))
    finally:
        check.session.close()
    if decode is not None:
        check.decode(Decoding(opened.path, opened.digest, cache, decode), workers or os.cpu_count() or 1)
    if as_json:
        print_json(check.report())
    else:
        click.echo("\n".join(check.lines()))
    return 0 if check.is_right else 1


class _Check:
    """The findings so far."""

    def __init__(self, manifest: Manifest, cache: CacheConfig | None) -> None:
        self.manifest = manifest
        self.lost: list[dict[str, str]] = []
        self.replaced: list[dict[str, str]] = []
        self.function: str | None = None  # that decodes
        self.undecodable: list[Undecodable] = []
        self.session = Session(manifest, cache, "full", introduce=True, on_wrong=self._wrong)

    def read(self, rows: Rows) -> None:
        """Read distinct samples; if some are lost, bisect the group until each is named.

        An origin that does not answer at all ends the command instead.
        """
        try:
            self.session.read(plan_blobs(self.manifest, rows))
        except Changed as error:
            if len(rows) == 1:
                reason = f"{error.url} {error.why}"
                self.lost += [{"key": key, "reason": reason} for key in self.manifest.keys_of_blobs(rows)]
                return
            middle = len(rows) // 2
            self.read(rows[:middle])
            self.read(rows[middle:])

    def decode(self, decoding: Decoding, workers: int) -> None:
        """Apply a function to every sample."""
        self.function = decoding.function
        sizes = self.manifest.blob_sizes(self.manifest.tables.blob_of.astype(np.int64))
        with byte_bar("decoding") as progress:
            if progress is not None:
                progress.start(int(sizes.sum()))

            def done(rows: Rows) -> None:
                if progress is not None:
                    progress.advance(int(sizes[rows].sum()))

            self.undecodable = undecodable(decoding, self.manifest, workers, done)

    @property
    def is_right(self) -> bool:
        return not self.lost and not self.replaced and not self.undecodable

    def report(self) -> dict[str, Any]:
        stats = self.session.stats.snapshot()
        failures = [asdict(each) for each in self.undecodable[:NAMED_MAX]]
        decoded = {"function": self.function, "failed": len(self.undecodable), "failures": failures}
        return {
            "ok": self.is_right,
            "samples": len(self.manifest),
            "distinct": len(self.manifest.tables.offsets),
            "bytes": self.manifest.total_bytes,
            "checksums": self.manifest.has_checksums,
            "lost": self.lost[:NAMED_MAX],
            "replaced": self.replaced[:NAMED_MAX],
            "bytes_by_tier": {tier: stats[f"bytes_{tier}"] for tier in ("host", "rack", "origin")},
            **({"decode": decoded} if self.function is not None else {}),
        }

    def lines(self) -> Iterator[str]:
        for entry in self.lost[:SHOWN_MAX]:
            yield f"lost: {entry['key']}: {entry['reason']}"
        for entry in self.replaced[:SHOWN_MAX]:
            yield f"replaced: {entry['key']}: wrong bytes in the {entry['tier']}"
        for failed in self.undecodable[:SHOWN_MAX]:
            yield f"not decoded: {failed.index} {failed.key}: {failed.error}"
        if not self.manifest.has_checksums:
            yield (
                f"note: {self.manifest.path} was written by an older version and has no checksums: its labels and keys"
                " could not be verified; index again"
            )
        distinct = len(self.manifest.tables.offsets)
        what = f"{distinct} distinct samples, {format_size(self.manifest.total_bytes)}"
        if self.is_right:
            yield f"{self.manifest.path}: all right ({what})"
            return
        if max(len(self.lost), len(self.replaced), len(self.undecodable)) > SHOWN_MAX:
            yield f"… (the first {SHOWN_MAX} of each; --json names {NAMED_MAX})"
        decoded = f", {len(self.undecodable)} not decoded" if self.function is not None else ""
        yield f"{self.manifest.path}: {len(self.lost)} lost, {len(self.replaced)} replaced{decoded} ({what})"

    def _wrong(self, tier: str, batch: Batch, bad: Positions) -> None:
        if tier != "origin":  # a sample that is wrong there is lost, and named as such
            keys = self.manifest.keys_of_blobs(batch.plan.blobs[bad])
            self.replaced += [{"key": key, "tier": tier} for key in keys]


def _groups(manifest: Manifest) -> Iterator[Rows]:
    """Yield all distinct samples in shard order, about ``GROUP_BYTES`` at a time."""
    ends = np.cumsum(manifest.blob_sizes(slice(None)), dtype=np.int64)
    cuts = np.searchsorted(ends, np.arange(GROUP_BYTES, int(ends[-1]), GROUP_BYTES), "right")
    bounds = np.unique(np.concatenate([[0], cuts, [len(ends)]])).tolist()
    for first, last in itertools.pairwise(bounds):
        yield np.arange(first, last)
