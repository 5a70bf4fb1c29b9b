"""Whether batches still look like a uniform shuffle's, by their labels; a warning if they do not.

Pearson's chi-squared of a batch's label counts against those of the whole dataset has, for uniform batches, a mean of
(classes − 1) with the correction for drawing without replacement, and about twice that as variance. The mean over many
batches is held against it. ``docs/substitution.md`` has the distributions.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from quiver.substitution import Ints
from quiver_client.dataset import Dataset

log = logging.getLogger("quiver_client")

BATCHES: Final = 50  # that make a verdict
SIGMAS: Final = 8.0
DEPARTURE: Final = 1.5  # of the mean chi-squared from the uniform one that matters in practice
CLASSES_MAX: Final = 65_536


class LabelWatch:
    """Hears of every batch, and warns once a run."""

    def __init__(self, dataset: Dataset) -> None:
        self._labels, self._shares = _labels_of(dataset)
        self._reset()
        self._warned = False

    def seen(self, rows: Ints) -> None:
        """A batch of these samples was handed out ``(batch,)``."""
        if len(self._shares) < 2 or self._warned:
            return
        expected = self._shares * len(rows)
        counts = np.bincount(self._labels[rows], minlength=len(self._shares))
        self._sum += float(((counts - expected) ** 2 / expected).sum())
        self._batches += 1
        if self._batches == BATCHES:
            self._judge(self._sum / BATCHES)
            self._reset()

    def _judge(self, mean: float) -> None:
        uniform = len(self._shares) - 1.0
        spread = (2.0 * uniform / BATCHES) ** 0.5
        if mean > max(DEPARTURE * uniform, uniform + SIGMAS * spread):
            self._warned = True
            log.warning(
                "labels: the last %d batches are further from a uniform shuffle than chance allows (chi-squared"
                " %.0f where %.0f is usual). Samples that are stored together are read together: index with"
                " `--layout mixed`, give the cache more room, or use substitute=False (docs/substitution.md)",
                BATCHES,
                mean,
                uniform,
            )

    def _reset(self) -> None:
        self._sum, self._batches = 0.0, 0


def _labels_of(
    dataset: Dataset,
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return a label by sample, numbered from 0, and each label's share; nothing if there is no integer label."""
    manifest = dataset.manifest
    names = [field.name for field in manifest.header.scalars if field.classes or field.name in ("label", "cls")]
    nothing = np.zeros(0, np.int32), np.zeros(0)
    if not names:
        return nothing
    values = manifest.tables.scalars[names[0]].to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "iu":
        return nothing
    _, labels, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(counts) > CLASSES_MAX:
        return nothing
    return labels.astype(np.int32), counts / counts.sum()
