"""``quiver verify``: read everything, hash everything, and name what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from quiver.errors import Changed
from quiver.manifest import Manifest
from quiver.plan import plan_blobs
from quiver.sizes import format_size
from quiver_client.batch import Batch, Positions
from quiver_client.cli.options import cache_option, json_option, print_json
from quiver_client.cli.progress import byte_bar
from quiver_client.config import CacheConfig
from quiver_client.manifest_download import open_manifest
from quiver_client.session import Session

GROUP_BYTES = 64 << 20  # read at once: held in memory, and over which several daemons work at the same time
NAMED_MAX = 1000  # in --json
SHOWN_MAX = 50

Rows = npt.NDArray[np.intp]


@click.command("verify", epilog="Example: quiver verify imagenet.quiver --cache http://node1:7717")
@click.argument("manifest", metavar="M.quiver")
@cache_option("the origin itself")
@json_option
def command(manifest: str, cache: CacheConfig | None, *, as_json: bool) -> int:
    """Read every sample of M.quiver through a cache, compare it with its BLAKE3 digest, and name what is wrong.

    M.quiver itself is checked against its own checksums first. Wrong bytes in a cache are replaced on the way. Exits
    with 1 if anything was wrong, replaced or lost.
    """
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
    if as_json:
        print_json(check.report())
    else:
        click.echo("\n".join(check.lines()))
    return 1 if check.lost or check.replaced else 0


class _Check:
    """What was found so far."""

    def __init__(self, manifest: Manifest, cache: CacheConfig | None) -> None:
        self.manifest = manifest
        self.lost: list[dict[str, str]] = []
        self.replaced: list[dict[str, str]] = []
        self.session = Session(manifest, cache, "full", introduce=True, on_wrong=self._wrong)

    def read(self, rows: Rows) -> None:
        """Read distinct samples; where some are lost, halve the group until each is named.

        An origin that does not answer at all is another matter, and ends the command.
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

    def report(self) -> dict[str, Any]:
        stats = self.session.stats.snapshot()
        return {
            "ok": not self.lost and not self.replaced,
            "samples": len(self.manifest),
            "distinct": len(self.manifest.tables.offsets),
            "bytes": self.manifest.total_bytes,
            "checksums": self.manifest.has_checksums,
            "lost": self.lost[:NAMED_MAX],
            "replaced": self.replaced[:NAMED_MAX],
            "bytes_by_tier": {tier: stats[f"bytes_{tier}"] for tier in ("host", "rack", "origin")},
        }

    def lines(self) -> Iterator[str]:
        for entry in self.lost[:SHOWN_MAX]:
            yield f"lost: {entry['key']}: {entry['reason']}"
        for entry in self.replaced[:SHOWN_MAX]:
            yield f"replaced: {entry['key']}: wrong bytes in the {entry['tier']}"
        if not self.manifest.has_checksums:
            yield (
                f"note: {self.manifest.path} was written by an older version and has no checksums: its labels and keys"
                " could not be verified; index again"
            )
        distinct = len(self.manifest.tables.offsets)
        what = f"{distinct} distinct samples, {format_size(self.manifest.total_bytes)}"
        if not self.lost and not self.replaced:
            yield f"{self.manifest.path}: all right ({what})"
            return
        if max(len(self.lost), len(self.replaced)) > SHOWN_MAX:
            yield f"… (the first {SHOWN_MAX} of each; --json names {NAMED_MAX})"
        yield f"{self.manifest.path}: {len(self.lost)} lost, {len(self.replaced)} replaced ({what})"

    def _wrong(self, tier: str, batch: Batch, bad: Positions) -> None:
        if tier != "origin":  # wrong there is lost, and named as such
            keys = self.manifest.keys_of_blobs(batch.plan.blobs[bad])
            self.replaced += [{"key": key, "tier": tier} for key in keys]


def _groups(manifest: Manifest) -> Iterator[Rows]:
    """Yield all distinct samples in shard order, about ``GROUP_BYTES`` at a time."""
    ends = np.cumsum(manifest.blob_sizes(slice(None)), dtype=np.int64)
    cuts = np.searchsorted(ends, np.arange(GROUP_BYTES, int(ends[-1]), GROUP_BYTES), "right")
    bounds = np.unique(np.concatenate([[0], cuts, [len(ends)]])).tolist()
    for first, last in itertools.pairwise(bounds):
        yield np.arange(first, last)
