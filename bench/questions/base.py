"""A question, its setting, and its answer: figures, and ratios between figures of one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from bench.arena import Arena, Entry, Result
from bench.data import Data, Kind, make_data
from bench.measure import Round

BATCH: Final = 256
SAMPLE_BYTES: Final = 110_000
COUNT: Final = 11_264  # 1.24 GB: fits the page cache of a small machine, and is far larger than CPU caches
COUNT_QUICK: Final = 1_280
TOKENS_BATCH: Final = 1024
TOKENS_COUNT: Final = 131_072  # 537 MB
TOKENS_COUNT_QUICK: Final = 8_192
Sense = Literal["≥", "≤"]


@dataclass(frozen=True)
class Setting:
    """How a question is measured."""

    folder: Path  # temporary, used only by this question
    quick: bool = False
    rounds: int = 5
    samples: int | None = None  # None: the question's default
    peers: frozenset[str] | None = None  # contenders; Quiver's always run unless some of them are named; None: all
    pythons: Mapping[str, str] = field(default_factory=dict)  # peer -> the interpreter that has its packages
    say: Callable[[str], None] = lambda text: None

    def data(self, kind: Kind = "blobs", count: int | None = None, sample_bytes: int = SAMPLE_BYTES) -> Data:
        usual = {"blobs": (COUNT, COUNT_QUICK), "tokens": (TOKENS_COUNT, TOKENS_COUNT_QUICK), "jpeg": (1024, 64)}
        count = self.samples or usual[kind][self.quick] if count is None else count
        return make_data(self.folder / f"{kind}-{sample_bytes}", kind, count, sample_bytes)

    def takes_part(self, entry: Entry) -> bool:
        if self.peers is None or entry.peer in self.peers:
            return True
        return entry.peer.startswith("quiver") and not any(name.startswith("quiver") for name in self.peers)

    @contextmanager
    def arena(self, data: Data, batch_size: int, entries: Sequence[Entry]) -> Iterator[Arena]:
        """Prepare contenders over one dataset, and check that they deliver the same bytes."""
        with Arena(data, batch_size, self.folder / f"contenders-{data.folder.name}", self.pythons) as arena:
            for entry in filter(self.takes_part, entries):
                self.say(f"making {entry.shown} ready")
                arena.add(entry)
            arena.check_same_bytes()
            yield arena


@dataclass(frozen=True)
class Ratio:
    """One figure divided by another; ``value`` is the median of the rounds' ratios if there are rounds."""

    name: str
    value: float
    reach: float | None = None
    sense: Sense = "≥"
    unit: str = ""
    each: tuple[float, ...] = ()
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.reach is None:
            return None
        return self.value >= self.reach if self.sense == "≥" else self.value <= self.reach

    def encode(self) -> dict[str, Any]:
        return {
            "name": self.name, "value": self.value, "reach": self.reach, "sense": self.sense, "unit": self.unit,
            "met": self.met, "each": list(self.each), "note": self.note,
        }  # fmt: skip


@dataclass
class Answer:
    """The results. ``contenders`` and ``more`` have the form of the JSON."""

    ratios: list[Ratio] = field(default_factory=list)
    contenders: dict[str, Result] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def take(self, arena: Arena) -> None:
        self.contenders |= arena.results
        self.absent |= arena.absent
        data = arena.data
        self.configuration |= {
            "kind": data.kind, "samples": data.count, "sample_bytes": data.sample_bytes,
            "total_bytes": data.total_bytes, "batch_size": arena.batch_size,
        }  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A name for the command line, the question in words, and the function that answers it."""

    name: str
    asks: str
    answer: Callable[[Setting], Answer]


def compare(setting: Setting, data: Data, batch_size: int, entries: Sequence[Entry]) -> Answer:
    """Run contenders side by side."""
    answer = Answer()
    with setting.arena(data, batch_size, entries) as arena:
        for at in range(setting.rounds):
            setting.say(f"round {at + 1} of {setting.rounds}")
            arena.run(1)
        answer.take(arena)
    return answer


def fastest(answer: Answer, names: Sequence[str]) -> str | None:
    """Return the contender with the highest throughput."""
    there = [name for name in names if name in answer.contenders]
    return max(there, key=lambda name: answer.contenders[name].median("bytes_a_second"), default=None)


def speed_ratio(
    answer: Answer, name: str, ours: Sequence[str], theirs: Sequence[str], reach: float | None = None, **more: Any
) -> None:
    """Add the fastest of ``ours`` ÷ the fastest of ``theirs``, by round; nothing if either is absent."""
    one, other = fastest(answer, ours), fastest(answer, theirs)
    if one is None or other is None:
        return
    each = per_round(answer, one, other, lambda done: done.bytes_a_second)
    answer.ratios.append(Ratio(f"{name} ({one} ÷ {other})", median(each), reach, each=each, **more))


def per_round(answer: Answer, one: str, other: str, figure: Callable[[Round], float]) -> tuple[float, ...]:
    """Return, for each round, a figure of one contender divided by that of another."""
    pairs = zip(answer.contenders[one].rounds, answer.contenders[other].rounds, strict=True)
    return tuple(figure(ours) / figure(theirs) if figure(theirs) else math.inf for ours, theirs in pairs)
