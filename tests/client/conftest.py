"""Datasets through every kind of cache, closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quiver_client import Dataset


@pytest.fixture
def dataset() -> Iterator[Callable[..., Dataset]]:
    """Make datasets that are closed when the test ends."""
    made: list[Dataset] = []

    def make(*args: Any, **named: Any) -> Dataset:
        made.append(Dataset(*args, **named))
        return made[-1]

    yield make
    for each in made:
        each.close()
