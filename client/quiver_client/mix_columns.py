"""Collated batches of several datasets put together into one, in the order in which their samples were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Positions = npt.NDArray[np.intp]


def combined(pieces: Sequence[tuple[Positions, dict[str, Any]]], count: int) -> dict[str, Any]:
    """Return one batch of ``count`` samples, by field.

    ``pieces``: of each dataset the positions of its samples in the batch, and its columns. Where all pieces have
    tensors of one type and shape, so has the batch; elsewhere a field is a list.
    """
    if not pieces:
        return {}
    return {name: _column([(at, columns[name]) for at, columns in pieces], count) for name in pieces[0][1]}


def _column(pieces: list[tuple[Positions, Any]], count: int) -> Any:
    values = [value for _, value in pieces]
    if all(isinstance(value, torch.Tensor) for value in values):
        shapes = {(value.dtype, value.shape[1:]) for value in values}
        if len(shapes) == 1:
            out = torch.empty((count, *values[0].shape[1:]), dtype=values[0].dtype)
            for at, value in pieces:
                out[torch.from_numpy(at)] = value
            return out
    listed: list[Any] = [None] * count
    for at, value in pieces:
        for position, each in zip(at.tolist(), value, strict=True):
            listed[position] = each
    return listed
