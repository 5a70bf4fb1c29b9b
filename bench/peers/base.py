"""The interface of a contender: it converts the data to its own format, and hands out batches in the given order."""

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
    """The task of a contender: the data, the batch size, a folder of its own, and its options."""

    data: Data
    batch_size: int
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)


class Peer:
    """One contender. Construct it, ``prepare``, take ``batches`` as often as wanted, ``close``.

    ``batches`` is one pass: every sample once, in ``work.data.order`` unless the way cannot do that. A
    batch is a sequence of buffers, each of one sample or of several back to back.

    ``ways``: settings whose speed depends on the machine (which client library, how many workers). Each is tried before
    the measurement, and the fastest is measured.
    """

    name: ClassVar[str]
    extra: ClassVar[str] = ""  # the extra that installs its packages
    packages: ClassVar[tuple[str, ...]] = ()
    programs: ClassVar[tuple[str, ...]] = ()
    ways: ClassVar[tuple[str, ...]] = ("",)
    settings: ClassVar[str] = ""  # other settings, for the report

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
        """Convert the data and start the servers; not measured."""

    def before_round(self) -> None:
        """Restore the state from before the first round; not measured."""

    def batches(self, way: str) -> Iterable[Batch]:
        """Return one pass over the data."""
        raise NotImplementedError

    def server_pids(self) -> list[int]:
        """Return the process ids of its servers."""
        return []

    def close(self) -> None:
        self.closing.close()
