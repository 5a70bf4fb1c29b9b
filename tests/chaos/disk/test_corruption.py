"""Samples that are read while what the caches hold is corrupted: none is wrong, and what is lost is filled again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.corruption import measure


@pytest.mark.chaos
@pytest.mark.fault("C2", "C8", "N1", "S11")
def test_no_wrong_byte_is_handed_out_while_every_cache_is_corrupted(tmp_path: Path, seed: int) -> None:
    """``python -m tests.chaos.corruption`` is the same at length."""
    figures = measure(tmp_path, reads=20_000, corruptions=200, seed=seed)
    assert figures["reads"] >= 20_000
    assert figures["wrong"] == 0
    assert figures["corruptions"] >= 200
    assert figures["met by readers"] >= 100, "the faults really fired"
    assert figures["found by daemons"] > 0
    at_rest = {"bit flipped", "truncated", "other shard's bytes", "zeros", "file replaced"}
    assert figures["kinds"].keys() >= at_rest | {"bit flipped in flight", "forged"}
    for cache in figures["caches"].values():
        assert cache["met"] > 0
        assert cache["from host"] + cache["from rack"] > cache["from origin"], "it stays in use"
