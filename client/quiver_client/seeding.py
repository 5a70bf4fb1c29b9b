"""Seeds of random transforms: a function of (seed, epoch, sample), whichever process or thread makes the sample.

A transform that takes ``rng`` (``numpy.random.Generator``) or ``generator`` (``torch.Generator``) gets one that is
seeded for its sample. Others draw from the global generators of ``random``, ``numpy.random`` and torch, which all
threads of the process share: those are seeded for a sample only while nobody else may use them (``loader.source``).
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import blake3
import numpy as np
import numpy.typing as npt
import torch

from quiver.digest import Digest

Seeds = npt.NDArray[np.uint64]
_GOLDEN: Final = 0x9E3779B97F4A7C15


def seeds_of(seed: int, epochs: int | npt.NDArray[Any], dataset: Digest, rows: npt.NDArray[Any]) -> Seeds:
    """Return one seed ``(n,)`` per sample of a manifest: distinct for distinct ``rows`` of one epoch.

    ``epochs``: the epoch of all, or of each ``(n,)``. The finaliser is that of splitmix64 (Steele et al., OOPSLA 2014).
    """
    key = blake3.blake3(f"quiver-sample-seed\0{seed}\0{dataset}".encode()).digest(16)
    start, step = (int.from_bytes(part, "little") for part in (key[:8], key[8:]))
    each = np.asarray(epochs, np.uint64)
    with np.errstate(over="ignore"):
        base = _finalised(np.uint64(start) + each * np.uint64(step | 1))
        seeds: Seeds = _finalised(base + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    return seeds


def _finalised(values: Any) -> Any:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Globals(NamedTuple):
    """The states of the global generators."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> Globals:
        return cls(random.getstate(), np.random.get_state(legacy=True), torch.default_generator.get_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)

    def same(self, other: Globals) -> bool:
        """Whether nothing was drawn, nor a generator seeded, between the two."""
        return (
            torch.equal(self.torch, other.torch)
            and bool(self.python == other.python)
            and _numpy_same(self.numpy, other.numpy)
        )


def seed_globals(seed: int) -> None:
    """Seed the global generators of ``random``, ``numpy.random`` and torch's CPU.

    Not by ``torch.manual_seed``, which also seeds every accelerator: the model's dropout draws from those.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


def _numpy_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) or isinstance(other, dict):  # a bit generator other than the legacy Mersenne Twister
        return str(one) == str(other)
    return bool(one[2:] == other[2:] and np.array_equal(one[1], other[1]))


# -- generators that a transform asks for ------------------------------------------------------------------------------


def _numpy_generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _torch_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


_MADE: Final[dict[str, Callable[[int], Any]]] = {"rng": _numpy_generator, "generator": _torch_generator}


def asked_for(transform: Callable[..., Any]) -> tuple[str, ...]:
    """Return which of ``rng`` and ``generator`` a transform takes as parameters that nobody has bound."""
    target = transform.forward if isinstance(transform, torch.nn.Module) else transform
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return ()
    bound = getattr(transform, "keywords", {})  # of functools.partial
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    first = next(iter(parameters), None)
    return tuple(
        name
        for name in _MADE
        if name in parameters and parameters[name].kind in kinds and name not in bound and name != first
    )


def generators(names: tuple[str, ...], seed: int | None) -> dict[str, Any]:
    """Return the generators to call a transform with.

    ``seed=None``: drawn from torch's default generator, so that ``torch.manual_seed`` and the seed of a stock loader's
    worker determine it.
    """
    if not names:
        return {}
    if seed is None:
        seed = int(torch.randint(1 << 62, ()))
    return {name: _MADE[name](seed) for name in names}
