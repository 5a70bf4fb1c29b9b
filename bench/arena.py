"""Runs contenders side by side: each in a process of its own, in rounds of A, B, C, A, B, C …

So a change of the machine's speed affects all of them alike. While one runs, the others wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Final, Self

from bench.data import Data
from bench.measure import Round, digests_of
from bench.servers import CannotRun

ROOT: Final = Path(__file__).parents[1]
PREPARE_SECONDS_MAX: Final = 300.0
ROUND_SECONDS_MAX: Final = 300.0
END_SECONDS_MAX: Final = 30.0


@dataclass(frozen=True)
class Entry:
    """A contender: a peer with its options, and its name in the report."""

    peer: str
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        return self.name or self.peer


@dataclass
class Result:
    """The rounds of one contender."""

    prepared: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)

    def median(self, figure: str) -> float:
        return float(median(getattr(one, figure) for one in self.rounds))

    def encode(self) -> dict[str, Any]:
        figures = [*Round.__dataclass_fields__, "bytes_a_second"]
        medians = {figure: self.median(figure) for figure in figures} if self.rounds else {}
        rounds = [one.encode() | {"bytes_a_second": one.bytes_a_second} for one in self.rounds]
        return {**self.prepared, "median": medians, "rounds": rounds}


class Arena:
    """Runs contenders over one dataset. Leaving the context ends all of them and their servers."""

    def __init__(self, data: Data, batch_size: int, folder: Path, pythons: Mapping[str, str]) -> None:
        self.data, self.batch_size = data, batch_size
        self.absent: dict[str, str] = {}
        self.results: dict[str, Result] = {}
        self._folder, self._pythons = folder, pythons
        self._running: dict[str, _Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._running.values():
            process.end()

    def add(self, entry: Entry) -> None:
        """Start and prepare a contender. One that cannot run is listed in ``absent``, with the reason."""
        name = entry.shown
        python = self._pythons.get(entry.peer, sys.executable)
        folder = self._folder / name.replace(" ", "-").replace("/", "-")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            process = self._running[name] = _Process(python, folder.with_suffix(".log"))
        except OSError as error:
            self.absent[name] = f"{python}: {error.strerror}"
            return
        asked = {"do": "prepare", "peer": entry.peer, "data": self.data.encode(), "batch_size": self.batch_size}
        asked |= {"folder": str(folder), "options": dict(entry.options)}
        try:
            self.results[name] = Result(process.ask(asked, PREPARE_SECONDS_MAX))
        except CannotRun as error:
            self._drop(name, str(error))

    def servers(self, name: str) -> list[int]:
        """Return the process ids of a contender's servers."""
        pids: list[int] = self._running[name].ask({"do": "servers"}, END_SECONDS_MAX)["pids"]
        return pids

    def run(self, rounds: int, step_seconds: float = 0.0) -> None:
        """Run each contender this many times, in turns."""
        for _ in range(rounds):
            for name in list(self.results):
                self.once(name, step_seconds)

    def once(self, name: str, step_seconds: float = 0.0) -> None:
        try:
            told = self._running[name].ask({"do": "round", "step_seconds": step_seconds}, ROUND_SECONDS_MAX)
            self.results[name].rounds.append(Round(**told))
        except CannotRun as error:
            self._drop(name, str(error))

    def check_same_bytes(self) -> None:
        """Remove contenders that delivered other bytes than those of the data; mark those that used another order.

        Contenders that decode deliver other bytes; they are compared with the first of them.
        """
        one_size = self.data.sample_bytes if self.data.kind == "tokens" else None
        content, ordered = digests_of(([self.data.sample(at)] for at in self.data.order.tolist()), one_size)
        for name, result in list(self.results.items()):
            if self.data.kind == "jpeg":
                first = next(iter(self.results.values())).prepared
                content, ordered = first["content"], first["ordered"]
            result.prepared["same_order"] = result.prepared["ordered"] == ordered
            if result.prepared["content"] != content:
                self._drop(name, "it delivered bytes that differ from the data")

    def _drop(self, name: str, reason: str) -> None:
        self.absent[name] = reason
        self.results.pop(name, None)
        if name in self._running:
            self._running.pop(name).end()


class _Process:
    """The process group of one contender: its process and all that it starts."""

    def __init__(self, python: str, log: Path) -> None:
        self._log = log
        paths = [str(ROOT), str(ROOT / "client"), str(ROOT / "cacheserver"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, "-m", "bench.contender"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=log.parent,
                env=environment,
                start_new_session=True,
            )
        self._heard = b""

    def ask(self, asked: dict[str, Any], seconds_max: float) -> dict[str, Any]:
        """Return the answer to a command. Raises ``CannotRun`` with the reason if there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise CannotRun(self._last_words()) from error
        told: dict[str, Any] = json.loads(self._line(time.monotonic() + seconds_max, asked["do"]))
        if "error" in told:
            raise CannotRun(told["error"])
        return told

    def end(self) -> None:
        """End it by closing its input; kill processes of its group that remain after a while."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS_MAX)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def _line(self, deadline: float, doing: str) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                os.killpg(self._process.pid, signal.SIGKILL)
                raise CannotRun(f"it took too long to {doing}")
            if not (chunk := os.read(self._process.stdout.fileno(), 1 << 16)):
                raise CannotRun(self._last_words())
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _last_words(self) -> str:
        said = self._log.read_text(errors="replace").strip().splitlines()
        return f"its process ended: {said[-1] if said else 'without a word'}"
