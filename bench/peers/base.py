"""What a contender is: it makes its own form of the data, and hands out batches in the order that all are given."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bench.data import Data
from bench.measure import Batch
from bench.servers import CannotRun, program


@dataclass(frozen=True)
class Work:
    """What a contender is handed: the data, how much of it makes a batch, a folder of its own, and its options."""

    data: Data
    batch_size: int
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)


class Peer:
    """One contender. Construct it, ``prepare``, take ``batches`` as often as wanted, ``close``.

    ``batches`` is one pass: every sample once, in ``work.data.order`` unless the way that is taken cannot do that. A
    batch is a sequence of buffers, of one sample each or of several back to back.

    ``ways``: settings between which only a trial on this machine can decide (which client library, how many workers).
    Each is tried before anything is measured, and the fastest is what is measured.
    """

    name: ClassVar[str]
    extra: ClassVar[str] = ""  # what to install for its packages
    packages: ClassVar[tuple[str, ...]] = ()
    programs: ClassVar[tuple[str, ...]] = ()
    ways: ClassVar[tuple[str, ...]] = ("",)
    settings: ClassVar[str] = ""  # what else is set, and why: for the report

    def __init__(self, work: Work) -> None:
        self.work = work
        self.data = work.data
        self.closing = contextlib.ExitStack()

    def check(self) -> None:
        """Raise ``CannotRun`` with the reason if this machine lacks something."""
        for package in self.packages:
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise CannotRun(f"{error}; install quiver-cache[{self.extra}]") from error
        for name in self.programs:
            program(name)

    def prepare(self) -> None:
        """Make its form of the data and start its servers: not measured."""

    def before_round(self) -> None:
        """Make it again as it was before the first round: not measured."""

    def batches(self, way: str) -> Iterable[Batch]:
        """Return one pass over the data."""
        raise NotImplementedError

    def server_pids(self) -> list[int]:
        """Return its servers' processes."""
        return []

    def close(self) -> None:
        self.closing.close()
