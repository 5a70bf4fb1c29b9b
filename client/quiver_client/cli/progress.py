"""A progress bar, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class ByteBar:
    """Shows bytes done and in all, the rate, and the time left. Safe from threads."""

    def __init__(self, bar: Progress, what: str) -> None:
        self._bar = bar
        self._task = bar.add_task(what, total=None)

    def start(self, total_bytes: int) -> None:
        self._bar.update(self._task, total=total_bytes)

    def advance(self, read_bytes: int) -> None:
        self._bar.advance(self._task, read_bytes)


@contextmanager
def byte_bar(what: str) -> Iterator[ByteBar | None]:
    """Show a bar on standard error while the block runs; yield None if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        yield ByteBar(bar, what)
