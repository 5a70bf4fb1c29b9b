"""``Mix``: several datasets drawn together in given proportions, as one map-style torch dataset.

A description, as ``Dataset`` is: what the parts are, how often each is drawn and how long an epoch is. Its index space
is that of its parts, one after another. Which samples come next is decided by a ``DataLoader`` or ``BatchSampler`` over
it (``quiver_client.loader.mix.sampler``), part by part: every part keeps its own order, needs, state and transform.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import blake3
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset as TorchDataset

from quiver import forks
from quiver_client.concatenated import Concatenated
from quiver_client.failure import Named
from quiver_client.loaded import Loaded, Make
from quiver_client.loader.arguments import whole
from quiver_client.loader.mix.guided import REPORTS_MAX, Guided, loss_of, rms
from quiver_client.loader.mix.schedule import tempered, weights_of
from quiver_client.placement import Placement
from quiver_client.readable import Readable
from quiver_client.resolution import resolved
from quiver_client.seeding import Seeds
from quiver_client.selection import Columns, Ints

EPOCHS: Final = ("longest", "shortest")
PARTS_MAX: Final = 1024  # each reports its needs by a thread of its own

log = logging.getLogger("quiver_client")

UNWEIGHTED: Final = (
    "mix: its weights do not apply, since nothing draws by them: an index is that of a sample, in the parts one after"
    " another. Read it by quiver_client.DataLoader, or give another loader batch_sampler=BatchSampler(mix, batch_size)"
)


class Mix(Readable):
    """Datasets drawn in proportion to weights: ``DataLoader(Mix({"web": web, "code": code}, weights={...}), ...)``.

    ``parts``: datasets by name. ``weights``: by name, or a list in the order of the parts; they need not add up to 1,
    and 0 turns a part off. ``temperature``: weights of ``size ** (1 / temperature)`` instead. Without both, parts are
    drawn by size. ``seed``: of the parts' orders, beside the loader's. ``epoch``: how long one pass over the mixture
    is: ``"longest"``, until the part whose own pass takes longest at its weight has been read once; ``"shortest"``,
    until the first one has; or a number of samples, of all ranks together. Parts start over as often as they must, in
    the middle of an epoch too, and continue in the next epoch where they stopped: every part gives each of its samples
    once before it gives any twice. ``part_field``: a field of each sample for the name of its part, ``"__part__"`` say.

    ``guided``: draw parts with a higher utility more often, from what the loop says by ``report``; see ``Guided`` for
    its declared bias. ``True``, a function from a part's last losses to a number, or a ``Guided``. Off by default.

    ``mix[i]`` is a sample as its part returns it, with the part's transform applied. Raises ``ValueError`` naming the
    argument that is wrong.
    """

    is_mixture = True

    def __init__(  # noqa: PLR0913 - each is a property of the mixture
        self,
        parts: Mapping[str, TorchDataset[Any]],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        seed: int = 0,
        epoch: str | int = "longest",
        temperature: float | None = None,
        guided: Any = None,
        part_field: str | None = None,
    ) -> None:
        self.parts = _checked(parts)
        self.sizes = {name: len(part) for name, part in self.parts.items()}
        if weights is not None and temperature is not None:
            raise ValueError("temperature: it gives the weights; leave weights out, or give them and no temperature")
        if weights is not None:
            self.shares = weights_of(weights, self.sizes)
        else:
            self.shares = tempered(1 if temperature is None else temperature, self.sizes)
        self.seed = whole("seed", seed, 0)
        if isinstance(epoch, str) and epoch not in EPOCHS:
            raise ValueError(f"epoch={epoch!r}: give 'longest', 'shortest' or a number of samples")
        self.epoch = epoch if isinstance(epoch, str) else whole("epoch", epoch, 1)
        self.guided = Guided.of(guided)
        if part_field is not None and (not isinstance(part_field, str) or not part_field):
            raise ValueError(f"part_field={part_field!r}: give the name of a field, '__part__' for instance")
        for name, part in self.parts.items():
            if part_field is not None and part_field in getattr(part, "fields", ()):
                raise ValueError(f"part_field={part_field!r}: part {name!r} has a field of that name; give another one")
        self._part_field = part_field
        self.is_ordered = False  # some order applies the weights
        self._all = Concatenated(self.parts.values())
        self._counts: Counter[tuple[str, str]] = Counter()
        self._reports: list[tuple[str, float]] = []
        self._lock = forks.lock()

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int | slice[Any, Any, Any]) -> Any:
        if isinstance(index, slice):
            raise ValueError("Mix: a slice of a mixture would have other proportions; slice its parts, and mix those")
        return self._read([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``: of each part one plan, and one request per peer."""
        if not self.is_ordered:
            self.is_ordered = True
            log.warning(UNWEIGHTED)
        return self._read(indices)

    def _read(self, indices: Sequence[int]) -> list[Any]:
        samples = self._all.__getitems__(indices)
        if self._part_field is None:
            return samples
        parts = self.parts_of(indices)
        return [self.marked(part, sample) for part, sample in zip(parts, samples, strict=True)]

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}: {size} samples at {weight:.3g}"
            for (name, size), weight in zip(self.sizes.items(), self.weights, strict=True)
        )
        return f"Mix({parts}; epoch={self.epoch!r}{', guided' if self.guided else ''})"

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights in the order of the parts; their sum is 1."""
        return tuple(share / sum(self.shares) for share in self.shares)

    @property
    def names(self) -> list[str]:
        """The names of the parts, in order."""
        return list(self.parts)

    @property
    def offsets(self) -> dict[str, int]:
        """Where in the index space each part begins."""
        return dict(zip(self.parts, [0, *self._all.cumulative_sizes[:-1]], strict=True))

    def parts_of(self, indices: Sequence[int]) -> list[str]:
        """Return the names of the parts that samples belong to."""
        names = self.names
        found = np.searchsorted(self._all.cumulative_sizes, self.checked(indices), "right")
        return [names[part] for part in found.tolist()]

    # -- as a loader reads it: the parts one after another ------------------------------------------------------------

    @property
    def identity(self) -> str:
        """64 hexadecimal digits that tell these parts, under these names, from all others."""
        parts = "".join(f"{name}\0{part.identity}\0" for name, part in sorted(self.parts.items()))
        return blake3.blake3(b"quiver-mix-v1" + parts.encode()).hexdigest()

    @property
    def can_collate(self) -> bool:
        return self._all.can_collate

    @property
    def scalars(self) -> Columns:
        return self._all.scalars

    def placement(self) -> Placement:
        return self._all.placement()

    def named(self, index: int) -> Named:
        return self._all.named(index)

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any], indices: Ints) -> Seeds:
        return self._all.seeds(seed, epochs, indices)

    def load(self, indices: Sequence[int], *, lose: bool = False) -> Loaded:
        loaded = self._all.load(indices, lose=lose)
        return loaded if self._part_field is None else _Marked(self, loaded, self.parts_of(indices))

    def columns(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the samples at ``indices`` as one collated batch, by field, in the order of ``indices``."""
        found = self._all.columns(indices)
        return found if self._part_field is None else {**found, self._part_field: self.parts_of(indices)}

    def marked(self, part: str, sample: Any) -> Any:
        """Return a sample with the name of its part, if ``part_field`` asks for that."""
        if self._part_field is None:
            return sample
        if not isinstance(sample, dict):
            raise ValueError(
                f"part_field={self._part_field!r}: the transform of part {part!r} returns"
                f" {type(sample).__name__}, which has no fields; have it return a dictionary, or add the name there"
            )
        return {**sample, self._part_field: part}

    def _of(self, positions: Ints) -> Self:
        raise ValueError(
            "Mix: a selection of a mixture would have other proportions; select from its parts, and mix those"
        )

    # -- what the loop says, and what was counted ---------------------------------------------------------------------

    def report(self, part: str | Sequence[str], loss: Any) -> None:
        """Say what the loss was of samples of a part, since the last batch. Without ``guided`` nothing follows.

        ``loss``: a number; or, for a list of parts such as ``batch["__part__"]``, one for each. Each rank draws by
        what is reported in it; to have all ranks draw the same proportions, report losses averaged over all of them.
        Raises ``ValueError`` for an unknown part, and for losses that are not finite.
        """
        if isinstance(part, str):
            losses = {part: [float(loss)]}
        else:
            values = np.asarray(loss.detach().cpu() if isinstance(loss, torch.Tensor) else loss, np.float64)
            if values.shape != (len(part),):
                raise ValueError(f"loss: {values.shape} for {len(part)} samples; give one loss for each")
            losses = {}
            for name, value in zip(part, values.tolist(), strict=True):
                losses.setdefault(name, []).append(value)
        for name in losses:
            if name not in self.parts:
                raise ValueError(f"part={name!r}: there are {', '.join(map(repr, self.names))}")
        found = [(name, loss_of(name, rms(values))) for name, values in losses.items()]
        with self._lock:
            self._reports = (self._reports + found)[-REPORTS_MAX:] if self.guided else []

    def take_reports(self) -> list[tuple[str, float]]:
        """Return what was reported since the last call: parts and losses. For the loader."""
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def stats(self) -> dict[str, Any]:  # by part, where other datasets have one dictionary of counters
        """Return counters of this process by part (workers have their own of what they read).

        Those of ``Dataset.stats``, which parts of one ``Dataset`` object share; and of the loader that reads this
        mixture: ``weight``, at which the part is drawn now; ``drawn``, samples handed out; ``passes``, passes of the
        part that were handed out in full; ``waits`` and ``wait_seconds``: how often, and how long, batches waited for
        samples of the part to become resident.
        """
        with self._lock:
            counts = dict(self._counts)
        own = {
            name: {each: counts.get((name, each), 0) for each in ("drawn", "passes", "waits", "wait_seconds")}
            for name in self.parts
        }
        return {
            name: {**part.stats(), **own[name], "weight": counts.get((name, "weight"), weight)}
            for (name, part), weight in zip(self.parts.items(), self.weights, strict=True)
        }

    def count(self, part: str, name: str, amount: float) -> None:
        """Add to one of the counters of ``stats``. For the loader."""
        with self._lock:
            self._counts[part, name] += amount  # type: ignore[assignment]

    def drawn_at(self, weights: Sequence[float]) -> None:
        """Record at which weights the parts are drawn from now on. For the loader."""
        with self._lock:
            for name, weight in zip(self.parts, weights, strict=True):
                self._counts[name, "weight"] = weight  # type: ignore[assignment]

    def close(self) -> None:
        """Close every part. They open again when they are used again."""
        self._all.close()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_lock"]
        state.update(_reports=[], _counts=Counter(), guided=None)  # a utility may be a lambda, and workers need none
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=forks.lock())


class _Marked:
    """The samples of a batch of a mixture, each with the name of its part."""

    def __init__(self, mix: Mix, loaded: Loaded, parts: Sequence[str]) -> None:
        self._mix, self._loaded, self._parts = mix, loaded, parts

    def __len__(self) -> int:
        return len(self._loaded)

    def named(self, at: int) -> Named:
        return self._loaded.named(at)

    def maker(self, at: int) -> tuple[str, tuple[type[Exception], ...]]:
        return self._loaded.maker(at)

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any]) -> Seeds:
        return self._loaded.seeds(seed, epochs)

    def makers(self, seeds: Seeds | None) -> Iterator[Make]:
        for part, make in zip(self._parts, self._loaded.makers(seeds), strict=True):
            yield partial(_made, self._mix, part, make)

    def together(self) -> Callable[[], list[Any]] | None:
        return None


def _made(mix: Mix, part: str, make: Make) -> Any:
    return mix.marked(part, make())


def _checked(parts: Any) -> dict[str, Readable]:
    if not isinstance(parts, Mapping) or not parts:
        raise ValueError('parts: give datasets by name, {"web": Dataset(...), "code": Dataset(...)}')
    if len(parts) > PARTS_MAX:
        raise ValueError(f"parts: {len(parts)} are more than {PARTS_MAX}; concatenate those drawn at one rate")
    found = {}
    for name, part in parts.items():
        if not isinstance(name, str) or not name or "\0" in name:
            raise ValueError(f"parts: {name!r} is no name; give a string")
        if isinstance(part, Mix):
            raise ValueError(f"parts: {name!r} is a Mix; give its parts here, with their weights multiplied by its own")
        if not isinstance(part, TorchDataset):
            raise ValueError(f"parts: {name!r} is a {type(part).__name__}; give a dataset of Quiver's")
        try:
            found[name] = resolved(part)
        except ValueError as error:
            raise ValueError(f"parts: {name!r}: {error}") from error
        if not len(found[name]):
            raise ValueError(f"parts: {name!r} has no samples; leave it out")
    return found
