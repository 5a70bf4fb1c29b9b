"""The needs of one consumer that reads several manifests, reported to the cache of each and answered as one.

The loader numbers the shards of all manifests one after another; a cache knows one manifest at a time. So each report
is divided: every cache gets its own shards, under a name of its own, since a cache keeps one report per name. What was
measured and what is left to read are divided by bytes, so that a part of which little is left claims little of the
cache. What was attained so far is divided by size: it must not become less as an epoch goes on, or ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import blake3
import numpy as np
import numpy.typing as npt

from quiver.residency import CONSUMER_BYTES, ConsumerReport
from quiver.substitution import Ints
from quiver_client.needs_reporter import NeedsChannel
from quiver_client.placement import Leaf

FULL: Final = 255  # of a report: all of a shard
HERE: Final = 1  # of an answer: resident, and needed by nobody else
U8 = npt.NDArray[np.uint8]


def needs_of(leaves: Sequence[Leaf]) -> NeedsChannel | None:
    """Return a channel that reports what is needed of all leaves; ``None`` if none of them has a cache."""
    channels = [leaf.needs() for leaf in leaves]
    if len(channels) == 1:
        return channels[0]
    if all(channel is None for channel in channels):
        return None
    return SeveralNeeds(channels, [leaf.manifest.tables.shard_sizes.astype(np.float64) for leaf in leaves])


class SeveralNeeds:
    """``NeedsChannel`` over the channels of several manifests. A manifest without a cache counts as resident."""

    def __init__(self, channels: Sequence[NeedsChannel | None], shard_bytes: Sequence[npt.NDArray[np.float64]]) -> None:
        """``shard_bytes``: by manifest, the size of each shard ``(shards,)``."""
        self._channels = list(channels)
        self._shard_bytes = np.concatenate(shard_bytes)
        ends = np.cumsum([len(each) for each in shard_bytes])
        self._spans = [slice(int(end) - len(each), int(end)) for end, each in zip(ends, shard_bytes, strict=True)]
        self._seen = np.zeros(len(self._shard_bytes), np.uint8)
        self._order = b""  # the identifier of the uses that were divided last,
        self._uses: list[tuple[Ints, npt.NDArray[np.int32]]] = []  # and by manifest the positions and shards of its own
        self.orphaned: npt.NDArray[np.bool_] | None = None

    def report(self, report: ConsumerReport, *, leaving: bool = False) -> U8:
        """Report to the cache of each manifest; return the answers, one manifest after another.

        If one of them raises, the others are reported all the same.
        """
        seen = np.full(len(self._shard_bytes), HERE, np.uint8)
        orphaned = np.zeros(len(seen), bool)
        parts = self._divided(report)
        with ExitStack() as each_one:
            for channel, part, span in zip(self._channels, parts, self._spans, strict=True):
                if channel is not None:
                    each_one.callback(_report, channel, part, leaving, seen[span], orphaned[span])
        self._seen = seen
        self.orphaned = orphaned if orphaned.any() else None
        return seen

    @property
    def probe_wanted(self) -> bool:
        """Whether one of the caches asks for a series of probes."""
        return any(channel.probe_wanted for channel in self._channels if channel is not None)

    def close(self) -> None:
        with ExitStack() as each_one:
            for channel in self._channels:
                if channel is not None:
                    each_one.callback(channel.close)

    def _divided(self, report: ConsumerReport) -> list[ConsumerReport]:
        """Return the report of each manifest's part."""
        left = report.left / FULL * self._shard_bytes
        total = float(left.sum())
        here = np.where(self._seen > 0, left, 0.0)
        share_ahead = report.ahead_bytes / max(float(here.sum()), 1.0)
        parts = []
        self._divide_uses(report)
        size = float(self._shard_bytes.sum())
        for number, span in enumerate(self._spans):
            own, of_all = left[span], float(self._shard_bytes[span].sum()) / max(size, 1.0)
            share, measured = (float(own.sum()) / total if total else 0.0), report.measured
            parts.append(
                replace(
                    report,
                    consumer=part_name(report.consumer, number),
                    left=report.left[span],
                    rate=report.rate * share,
                    measured=replace(
                        measured,
                        throughput=measured.throughput * share,
                        attained_bytes=measured.attained_bytes * of_all,
                        probed_hits=measured.probed_hits * share,
                        probed_misses=measured.probed_misses * share,
                    ),
                    ahead_bytes=float(here[span].sum()) * share_ahead,
                    soon=tuple(shard - span.start for shard in report.soon if span.start <= shard < span.stop),
                    **self._uses_of(report, number),
                )
            )
        return parts

    def _divide_uses(self, report: ConsumerReport) -> None:
        """Divide a list of uses to come, once."""
        if report.uses is None or report.order == self._order:
            return
        self._order, self._uses = report.order, []
        for span in self._spans:
            at = np.flatnonzero((report.uses >= span.start) & (report.uses < span.stop))
            self._uses.append((at, (report.uses[at] - span.start).astype(np.int32)))

    def _uses_of(self, report: ConsumerReport, number: int) -> dict[str, Any]:
        """Return what a report says of uses to come, for the manifest of this number."""
        if not report.order or report.order != self._order:
            return {"order": b"", "order_at": 0, "uses": None}
        positions, shards = self._uses[number]
        identifier = blake3.blake3(report.order + number.to_bytes(4, "big")).digest(len(report.order))
        done = int(np.searchsorted(positions, report.order_at))
        return {"order": identifier, "order_at": done, "uses": shards}


def part_name(consumer: bytes, number: int) -> bytes:
    """Return the name under which a consumer reports on the manifest of this number."""
    return consumer if not number else blake3.blake3(consumer + number.to_bytes(4, "big")).digest(CONSUMER_BYTES)


def _report(
    channel: NeedsChannel, part: ConsumerReport, leaving: bool, seen: U8, orphaned: npt.NDArray[np.bool_]
) -> None:
    """Report one part, and write its answer into ``seen`` and ``orphaned``."""
    seen[:] = 0
    seen[:] = channel.report(part, leaving=leaving)
    if channel.orphaned is not None:
        orphaned[:] = channel.orphaned
