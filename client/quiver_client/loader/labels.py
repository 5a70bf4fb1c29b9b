"""Whether the labels of batches still look like those of a uniform shuffle; a warning if they do not.

Pearson's chi-squared of a batch's label counts against those of the whole dataset has, for uniform batches, a mean of
(classes − 1), and a variance of twice that plus a term that grows with rare classes: for a class of one sample in ten
thousand it is forty times as large. The mean over many batches is compared with these. Drawing without replacement
makes both a little smaller, which is neglected. ``docs/substitution.md`` has the distributions and the error rates.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from quiver.manifest import Manifest
from quiver.substitution import Ints
from quiver_client.placement import Placement

log = logging.getLogger("quiver_client")

BATCHES: Final = 50  # that are tested together
SIGMAS: Final = 8.0
DEPARTURE: Final = 1.5  # ratio of the mean chi-squared to the uniform one that matters in practice
CLASSES_MAX: Final = 65_536


ADVICE: Final = (
    "index with `--layout mixed`, give the cache more capacity, or use substitute=False (docs/substitution.md)"
)
ADVICE_ON_BLOCKS: Final = "index with `--layout mixed`, give a larger block_shards=, or shuffle=True (docs/shuffles.md)"


class LabelWatch:
    """Sees every batch, and warns once per run."""

    def __init__(self, labels: Ints, advice: str = ADVICE) -> None:
        """``labels`` ``(samples,)``: the label of each sample of the dataset; empty: never warn."""
        self._advice = advice
        _, numbered, counts = np.unique(labels, return_inverse=True, return_counts=True)
        if len(counts) > CLASSES_MAX:
            numbered, counts = numbered[:0], counts[:0]
        self._labels = numbered.astype(np.int32)
        self._shares = counts / max(len(numbered), 1)
        classes = len(counts)
        self._rareness = float((1 / self._shares).sum()) - classes**2 - 2 * classes + 2
        self.has_warned = False
        self._reset()

    @classmethod
    def of(cls, placement: Placement, advice: str = ADVICE) -> LabelWatch:
        return cls(_labels_of(placement), advice)

    @property
    def is_idle(self) -> bool:
        """Whether there are no labels to look at, or a warning was logged."""
        return len(self._shares) < 2 or self.has_warned

    def foresee(self, order: Ints, batch_size: int) -> None:
        """Judge a fixed order ``(samples,)`` before it is read, by batches from its middle."""
        middle = max(len(order) - BATCHES * batch_size, 0) // 2
        for begin in range(middle, len(order) - batch_size + 1, batch_size)[:BATCHES]:
            self.seen(order[begin : begin + batch_size])
        if self._batches:  # fewer than are judged together otherwise
            self._judge_seen()

    def seen(self, rows: Ints) -> None:
        """Count a batch of these samples ``(batch,)`` that was handed out; none if it repeats others alone."""
        if self.is_idle or not len(rows):
            return
        expected = self._shares * len(rows)
        counts = np.bincount(self._labels[rows], minlength=len(self._shares))
        self._sum += float(((counts - expected) ** 2 / expected).sum())
        # The variance of Pearson's statistic of a multinomial sample (Haldane, Biometrika 1937).
        self._variance += 2.0 * (len(self._shares) - 1.0) + self._rareness / len(rows)
        self._batches += 1
        if self._batches == BATCHES:
            self._judge_seen()

    def _judge_seen(self) -> None:
        self._judge(self._sum / self._batches, max(self._variance, 0.0) ** 0.5 / self._batches)
        self._reset()

    def _judge(self, mean: float, spread: float) -> None:
        """``mean`` of chi-squared over the last batches, and its standard deviation by chance."""
        uniform = len(self._shares) - 1.0
        if mean > max(DEPARTURE * uniform, uniform + SIGMAS * spread):
            self.has_warned = True
            log.warning(
                "labels: %d batches are further from a uniform shuffle than chance explains (chi-squared %.0f where"
                " %.0f is usual). Samples that are stored together are read together; %s",
                self._batches,
                mean,
                uniform,
                self._advice,
            )

    def _reset(self) -> None:
        self._sum, self._variance, self._batches = 0.0, 0.0, 0


def _labels_of(placement: Placement) -> Ints:
    """Return the label of each sample, or an empty array if a manifest among them has no integer label."""
    labels = [_labels_in(leaf.manifest) for leaf in placement.leaves]
    if not all(len(each) for each in labels):
        return np.zeros(0, np.int64)
    found: Ints = np.concatenate(labels)[placement.rows]
    return found


def _labels_in(manifest: Manifest) -> Ints:
    names = [field.name for field in manifest.header.scalars if field.classes or field.name in ("label", "cls")]
    nothing = np.zeros(0, np.int64)
    if not names:
        return nothing
    values = manifest.tables.scalars[names[0]].to_numpy(zero_copy_only=False)
    return values if values.dtype.kind in "iu" else nothing
