"""Two minutes of the soak, and the proof that it can fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.soak import soak
from tests.chaos.validators import Violation

pytestmark = pytest.mark.soak
SECONDS = float(os.environ.get("QUIVER_SOAK_SECONDS", "120"))


@pytest.mark.timeout(SECONDS * 3 + 300)
def test_everything_fails_at_random_and_every_epoch_is_exact(tmp_path: Path, seed: int) -> None:
    summary = soak(SECONDS, seed, tmp_path, print)
    print(summary)
    assert summary.rounds > 0
    assert summary.epochs >= 3 * summary.rounds
    assert len(summary.mishaps) >= 5, "several kinds of mishaps struck"
    assert summary.fired, "and toxics fired"


@pytest.mark.timeout(600)
def test_a_soak_fails_if_wrong_bytes_are_handed_out(tmp_path: Path, seed: int) -> None:
    """Jobs that do not verify: the wrong bytes of toxics and of flipped files reach them, and the validators see it."""
    with pytest.raises(Violation, match="wrong samples"):
        soak(600, seed, tmp_path, print, verify="off")
