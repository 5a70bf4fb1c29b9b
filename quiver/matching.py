"""Which of several jobs goes where, at the least cost in all: assignment, and placement in queues. Pure.

``assign`` solves the assignment problem exactly, by shortest augmenting paths (the Hungarian method as improved by
Jonker and Volgenant, Computing 38, 1987): O(rows² · columns), the inner step over arrays.

``place`` puts jobs on machines that each work on one after the other, so that the sum of all completion times is least.
That is a matching, too: of jobs with *positions* in the machines' queues. A job that is k-th from the end delays itself
and the k-1 behind it, so it costs k times its time, whoever the others are (Horn 1973; Bruno, Coffman and Sethi 1974).
AlloX (Le et al., EuroSys 2020) schedules jobs over interchangeable resources in this way: each job may have another
time on each machine.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ENTRIES_MAX: Final = 1 << 25  # of the matrix of costs: 256 MiB


class Place(NamedTuple):
    """Where a job goes: the machine, and how many jobs go to it before this one."""

    machine: int
    after: int


def assign(costs: Floats) -> Ints:
    """Return for each row ``(rows,)`` a column of its own, so that the costs ``(rows, columns)`` add up to the least.

    An infinite cost forbids a pair. Raises ``ValueError`` if there is no assignment, or a cost that is no number.
    """
    rows, columns = costs.shape
    if np.isnan(costs).any() or (costs == -np.inf).any():
        raise ValueError("costs: each must be a number, or infinite for a pair that is not possible")
    if rows > columns:
        raise ValueError(f"costs: {rows} rows cannot have a column of their own each, of {columns}")
    of_row, of_column = np.zeros(rows), np.zeros(columns)  # the dual variables
    row_at = np.full(columns, -1)  # of each column
    for row in range(rows):
        row_at = _augmented(costs, row, row_at, of_row, of_column)
    found = np.empty(rows, np.int64)
    taken = np.flatnonzero(row_at >= 0)
    found[row_at[taken]] = taken
    return found


def _augmented(costs: Floats, row: int, row_at: Ints, of_row: Floats, of_column: Floats) -> Ints:
    """Return an assignment with one row more, by the shortest augmenting path from it; update the dual variables."""
    columns = costs.shape[1]
    shortest, came_from = np.full(columns, np.inf), np.full(columns, -1)
    is_done = np.zeros(columns, bool)
    at, length, last = row, 0.0, -1
    visited = [row]
    while last < 0:
        through = length + (costs[at] - of_row[at] - of_column)
        better = ~is_done & (through < shortest)
        shortest[better], came_from[better] = through[better], at
        column = int(np.argmin(np.where(is_done, np.inf, shortest)))
        length = float(shortest[column]) if not is_done[column] else np.inf
        if not np.isfinite(length):
            raise ValueError(f"costs: row {row} has no column that is possible and free")
        is_done[column] = True
        if row_at[column] < 0:
            last = column
        else:
            at = int(row_at[column])
            visited.append(at)
    done = np.flatnonzero(is_done)
    of_row[row] += length
    column_of = {int(row_at[column]): column for column in done.tolist() if row_at[column] >= 0}
    for other in visited[1:]:
        of_row[other] += length - shortest[column_of[other]]
    of_column[done] -= length - shortest[done]
    row_at = row_at.copy()
    while True:
        previous = int(came_from[last])
        before = column_of.get(previous, -1)
        row_at[last] = previous
        if previous == row:
            return row_at
        last = before


def place(alone: Floats, occupied: Floats) -> list[Place]:
    """Return for each job the machine to run it on, and its turn there, so that the costs add up to the least.

    ``alone`` ``(jobs, machines)``: what a job costs on a machine that it has for itself. ``occupied`` ``(jobs,
    machines)``: by how much it delays each job that comes after it there. Infinite costs forbid a machine. Raises
    ``ValueError`` for a job without a machine, and for so many jobs that it would take too long.
    """
    jobs, machines = alone.shape
    if not jobs:
        return []
    if jobs * jobs * machines > ENTRIES_MAX:
        raise ValueError(f"{jobs} jobs on {machines} machines are too many to place at once")
    if not np.isfinite(alone).any(axis=1).all():
        raise ValueError(f"job {int(np.argmin(np.isfinite(alone).any(axis=1)))} fits no machine")
    behind = np.arange(jobs)  # how many jobs come after this one on its machine
    with np.errstate(invalid="ignore"):  # infinite times none
        delays = np.where(behind > 0, occupied[:, :, None] * behind, 0.0)
    columns = assign((alone[:, :, None] + delays).reshape(jobs, machines * jobs))
    machine, last = columns // jobs, columns % jobs
    turns = np.empty(jobs, np.int64)
    for each in np.unique(machine).tolist():
        its = np.flatnonzero(machine == each)
        turns[its[np.argsort(-last[its], kind="stable")]] = np.arange(len(its))
    return [Place(int(where), int(turn)) for where, turn in zip(machine, turns, strict=True)]
