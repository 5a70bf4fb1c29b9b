"""One pass over a mixture, and one part of it as the sampler draws from it. No lock: the sampler holds its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import Final, NamedTuple

import msgspec

from quiver.errors import BadRequest
from quiver.malformed import MALFORMED
from quiver.substitution import Ints, Mask
from quiver_client.loader.consumer import CacheConsumer
from quiver_client.loader.draw_wait import DrawWait
from quiver_client.loader.epoch import Deal, Epoch, ShardLayout
from quiver_client.loader.labels import ADVICE, ADVICE_ON_BLOCKS, LabelWatch
from quiver_client.loader.loop_rate import LoopTurn
from quiver_client.loader.mix.part import Chosen, PartPasses, Taken
from quiver_client.loader.mix.schedule import Schedule, spread
from quiver_client.mix import Mix

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[bytes])


class MixedPart:
    """A part of a mixture: its passes, its consumer of the cache, and how long it waits for that."""

    def __init__(
        self,
        mix: Mix,
        name: str,
        deal_of: Callable[[str, ShardLayout], Deal],
        lock: RLock,
        soon_samples: int | None,
    ) -> None:
        """``soon_samples``: how many samples ahead to request shards in order; ``None``: in any order."""
        self.name = name
        self.offset = mix.offsets[name]
        placement = mix.parts[name].placement()
        layout = ShardLayout.of(placement)
        deal = deal_of(name, layout)
        self.passes = PartPasses(name, mix.parts[name].identity, layout, deal)
        self.wait = DrawWait()
        self.waited_seconds = 0.0  # for the batch that was drawn last
        self.consumer = CacheConsumer(placement.leaves, self.passes, self.wait, lock, soon_samples=soon_samples)
        self.passes.keep(self._resident)
        self._labels = (
            LabelWatch.of(placement, ADVICE_ON_BLOCKS if deal.block_shards else ADVICE) if deal.shuffle else None
        )
        self._leaves = placement.leaves
        self._mix = mix

    def follow(self) -> None:
        """Another process reports what this one reads."""
        for leaf in self._leaves:
            leaf.follow()

    def choose(self, count: int, *, substitute: bool, lookahead: int | None) -> Chosen | None:
        """Return the next ``count`` entries, or ``None`` while it is worth waiting for shards."""
        view = self.consumer.view if substitute else None

        def choose(epoch: Epoch, wanted: int) -> Ints | None:
            entries = epoch.choose(wanted, view, lookahead)
            if entries is not None or view is None:
                return entries
            if lookahead is None and not epoch.order.is_hopeless(view):
                was_waiting = self.wait.is_waiting
                if self.wait.go_on(time.monotonic(), self.passes.usable(view)):
                    if not was_waiting:
                        self._mix.count(self.name, "waits", 1)
                        self.consumer.report_now()
                    return None
            return epoch.completed(wanted, view, lookahead)

        return self.passes.choose(count, choose)

    def choose_decided(self, count: int, decided: Iterator[bytes]) -> Chosen | None:
        """Return the next ``count`` entries as another process decided. Raises ``BadRequest`` if they do not fit."""

        def choose(epoch: Epoch, wanted: int) -> Ints:
            entries = epoch.decode_decision(next(decided, b""), wanted)
            if len(entries) != wanted:
                raise BadRequest(f"{len(entries)} samples of part {self.name!r} instead of {wanted}")
            return entries

        return self.passes.choose(count, choose)

    def draw(self, chosen: Chosen) -> Taken:
        self.waited_seconds = 0.0
        if self.wait.is_waiting:
            self.waited_seconds = self.wait.end(time.monotonic())
            self.consumer.starved(self.waited_seconds)
            self._mix.count(self.name, "wait_seconds", self.waited_seconds)
        taken = self.passes.draw(chosen)
        self._leaves[0].count("substitutions", taken.substituted)
        return taken

    def consume(self, taken: Taken, turn: LoopTurn) -> None:
        """The training loop received these samples."""
        passes = self.passes.consume(taken)
        self.consumer.consumed(taken.rows, turn)
        self._mix.count(self.name, "drawn", len(taken.rows))
        self._mix.count(self.name, "passes", passes)
        if self._labels is not None:
            self._labels.seen(taken.rows)

    def _resident(self) -> Mask | None:
        view = self.consumer.view
        return view.resident if view is not None else None

    @property
    def available(self) -> float:
        """The share of the pending samples of the open passes that is resident; 1 without a cache."""
        view = self.consumer.view
        pending = self.passes.pending
        return self.passes.usable(view) / pending if view is not None and pending else 1.0


class InFlight(NamedTuple):
    """A batch that was drawn and not consumed."""

    rows: Ints  # (n,): of the mixture
    epochs: Ints  # (n,): the pass of its part that each sample is of
    taken: tuple[tuple[MixedPart, Taken], ...]
    after: Schedule  # when the batch is consumed


class MixPass:
    """One epoch of a mixture in one rank, or what a resumed run left of it: ``samples``, in batches."""

    def __init__(self, number: int, samples: int, identity: str = "") -> None:
        """``identity``: a digest of where all parts are."""
        self.number = number
        self.identity = identity
        self.pending = samples
        self.drawn = 0
        self.in_flight: dict[int, InFlight] = {}

    @property
    def finished(self) -> bool:
        return not self.pending and not self.in_flight

    def rows(self, number: int) -> Ints:
        """Return the samples of a batch that was drawn and not consumed."""
        return self.in_flight[number].rows

    def encode_decision(self, chosen: Sequence[tuple[MixedPart, Chosen]]) -> bytes:
        """Return what was chosen for another process that reads the same pass: by part and by pass of that part."""
        return _encoder.encode([each.encode_decision(entries) for _, found in chosen for each, entries in found])

    def decode_decision(self, decision: bytes, count_max: int) -> list[bytes]:
        """Return the decisions of the parts' passes, one after another. Raises ``BadRequest``."""
        try:
            return _decoder.decode(decision)
        except MALFORMED as error:
            raise BadRequest(f"malformed decision: {error}") from error

    def draw(self, taken: Sequence[tuple[MixedPart, Taken]], after: Schedule) -> int:
        """Record a batch; return its number. The samples of its parts are spread evenly over it."""
        rows = spread([each.rows + part.offset for part, each in taken])
        epochs = spread([each.epochs for _, each in taken])
        number, self.drawn = self.drawn, self.drawn + 1
        self.in_flight[number] = InFlight(rows, epochs, tuple(taken), after)
        self.pending -= len(rows)
        return number
