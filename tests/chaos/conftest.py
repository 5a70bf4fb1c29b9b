"""The seed of a chaos test, and a dataset that many share."""

from __future__ import annotations

import os

import pytest

from tests.chaos.rack import chaos_files
from tests.support.data import Files


@pytest.fixture
def seed() -> int:
    """Every choice of a run is drawn from it. pytest shows what it prints if the test fails."""
    chosen = int(os.environ.get("QUIVER_CHAOS_SEED", "1"))
    print(f"QUIVER_CHAOS_SEED={chosen} replays this run")
    return chosen


@pytest.fixture(scope="session")
def chaos_data(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """240 samples in about thirty shards. Tests must not change them."""
    return chaos_files(tmp_path_factory.mktemp("chaos"))
