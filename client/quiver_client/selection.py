"""Which samples of a dataset were selected: row numbers, a mask, or an expression, as row numbers in arrays.

``chosen_rows`` parses what a user gives. An expression of ``pyarrow.compute`` is evaluated by Arrow over the scalar
columns of the manifest, as they lie in memory, so that selecting takes no Python step per sample and no byte of a
sample. ``Rows`` holds the result. It pickles compactly: a spawned worker maps the memory of its parent, and a
serialiser gets a range, one bit per sample, or four bytes per selected sample, whichever is smallest.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.manifest import KEY_FIELD
from quiver.manifest.content import Content, sealed

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Chosen = Any  # row numbers, a mask, a slice or an expression

SHARED_BYTES_MIN: Final = 1 << 16  # of rows that a spawned worker maps instead of receiving a copy
SHOWN_FIELDS: Final = 12


class Rows:
    """Row numbers ``(n,)``, int64 and read-only. A value: equal rows pickle to equal bytes."""

    __slots__ = ("_content", "array")

    def __init__(self, array: Ints, content: Content | None = None) -> None:
        array.flags.writeable = False
        self.array = array
        self._content = content  # the shared memory that ``array`` is a view of

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if get_spawning_popen() is not None and self.array.nbytes >= SHARED_BYTES_MIN:
            try:
                if self._content is None:
                    view = self.array.data.cast("B")
                    self._content = Content.adopt(sealed(view, "quiver-rows"))
                fd = self._content.share()
            except OSError:  # forbidden, or no memory for a second copy: the rows are sent instead
                fd = None
            if fd is not None:
                return _adopted, (DupFd(fd),)
        return _unpacked, _packed(self.array)


def _adopted(passed: Any) -> Rows:
    content = Content.adopt(passed.detach())
    return Rows(np.frombuffer(content.view, np.int64), content)


def _packed(rows: Ints) -> tuple[str, int, int, int, bytes]:
    """Return rows as a kind, the first and the last of them, their number, and bytes."""
    first, last, count = int(rows[0]), int(rows[-1]), len(rows)
    steps = np.diff(rows)
    if not len(steps) or bool((steps == steps[0]).all()):
        return "range", first, last, count, b""
    if bool((steps > 0).all()) and (last - first) // 8 < 4 * count:
        bits = np.zeros(last - first + 1, bool)
        bits[rows - first] = True
        return "bits", first, last, count, np.packbits(bits).tobytes()
    return "rows", first, last, count, rows.astype("<u4").tobytes()  # a manifest has fewer than 2**32 samples


def _unpacked(kind: str, first: int, last: int, count: int, data: bytes) -> Rows:
    if kind == "range":
        step = (last - first) // (count - 1) if count > 1 else 0
        return Rows(first + step * np.arange(count, dtype=np.int64))
    if kind == "bits":
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=last - first + 1)
        return Rows(np.flatnonzero(bits).astype(np.int64) + first)
    return Rows(np.frombuffer(data, "<u4").astype(np.int64))


class Columns:
    """The scalar columns of a dataset, and its keys, as Arrow arrays ``(samples,)`` by name; each made when asked for.

    ``others``: fields that there are, and that no expression can be over.
    """

    def __init__(self, names: Sequence[str], others: Sequence[str], column: Any) -> None:
        self.names = (*names, KEY_FIELD)
        self.others = tuple(others)
        self._column = column

    def __getitem__(self, name: str) -> pa.ChunkedArray[Any]:
        return pa.chunked_array([column]) if isinstance(column := self._column(name), pa.Array) else column

    def checked(self, argument: str, name: Any) -> str:
        """Return the name if it is one of a column. Raises ``ValueError`` naming the argument."""
        if name in self.names:
            return cast(str, name)
        if name in self.others:
            raise ValueError(f"{argument}: {name!r} holds bytes; give one of {_listed(self.names)}")
        raise ValueError(f"{argument}: there is no field {name!r}; there are {_listed(self.names)}")


def chosen_rows(chosen: Chosen, count: int, columns: Columns) -> Ints:
    """Return the rows ``(n,)`` out of ``count`` that were chosen, in the order in which they were given.

    Raises ``ValueError`` for a mask of another length, an expression over unknown fields or not boolean, and if nothing
    is selected; ``IndexError`` for a row out of range; ``TypeError`` for what is none of these.
    """
    if isinstance(chosen, slice):
        rows = np.arange(count, dtype=np.int64)[chosen]
        if not len(rows):
            raise ValueError(f"[{_sliced(chosen)}]: it selects none of {count} samples, and a dataset has at least one")
        return rows
    if _is_expression(chosen):
        rows = np.flatnonzero(_evaluated(chosen, columns)).astype(np.int64)
        if not len(rows):
            raise ValueError(f"select: no sample satisfies {chosen}, and a dataset has at least one")
        return rows
    values = _array(chosen)
    if values.dtype.kind == "b":
        if values.shape != (count,):
            raise ValueError(f"select: a mask of {_shape(values)} values, but the dataset has {count} samples")
        values = np.flatnonzero(values)
    if not values.size:
        raise ValueError("select: nothing is selected, and a dataset has at least one sample")
    return rows_in(values, count)


def rows_in(values: npt.NDArray[Any], count: int) -> Ints:
    """Return indices ``(n,)``, negative ones too, as rows of ``count`` samples: ``IndexError``, ``TypeError``."""
    if values.size == 0:
        return np.empty(0, np.int64)
    if values.dtype.kind == "O" and values.ndim == 1 and all(isinstance(row, int) for row in values.tolist()):
        raise IndexError(f"indices out of range for {count} samples")  # integers beyond 64 bits
    if values.ndim != 1:
        raise TypeError("indices must be integers, one at a time, or slices; for several write dataset.select([...])")
    if values.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, not {values.dtype}")
    if values.dtype.kind == "u":
        values = np.minimum(values, np.uint64(count))  # past the end stays past the end and does not turn negative
    rows = values.astype(np.int64)
    wrong = (rows < -count) | (rows >= count)
    if wrong.any():
        raise IndexError(f"index {int(rows[wrong][0])} is out of range for {count} samples")
    return np.where(rows < 0, rows + count, rows)


def _is_expression(chosen: Any) -> bool:
    compute = sys.modules.get("pyarrow.compute")  # whoever made an expression has imported it
    return compute is not None and isinstance(chosen, compute.Expression)


def _evaluated(expression: Any, columns: Columns) -> Mask:
    """Return for each sample whether it satisfies the expression; where that is null it does not."""
    from pyarrow import acero

    table = pa.table({name: columns[name] for name in columns.names})
    plan = [
        acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
        acero.Declaration("project", acero.ProjectNodeOptions([expression], ["chosen"])),
    ]
    try:
        # One thread: several would return the batches in any order.
        chosen = acero.Declaration.from_sequence(plan).to_table(use_threads=False).column("chosen")
    except (pa.ArrowException, NotImplementedError, ValueError) as error:
        why = str(error).split("\n", 1)[0]
        raise ValueError(
            f"select: {expression} cannot be evaluated over {_listed(columns.names)}"
            + (f" ({_listed(columns.others)} hold bytes)" if columns.others else "")
            + f": {why}"
        ) from error
    if chosen.type != pa.bool_():
        raise ValueError(f"select: {expression} gives {chosen.type}; give a condition, such as {expression} == 3")
    return cast(Mask, chosen.fill_null(False).combine_chunks().to_numpy(zero_copy_only=False))


def _array(chosen: Any) -> npt.NDArray[Any]:
    """Return rows or a mask as an array: of a list, a range, a tensor, or an array of numpy, Arrow or pandas."""
    if isinstance(chosen, str | bytes | Mapping) or callable(chosen):
        raise TypeError(
            f"select: give row numbers, a mask, or an expression of pyarrow.compute such as"
            f' pyarrow.compute.field("label") == 3, not {type(chosen).__name__}'
        )
    if isinstance(chosen, range):
        return np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64)
    if isinstance(chosen, pa.Array | pa.ChunkedArray):
        if chosen.type == pa.bool_():
            chosen = chosen.fill_null(False)
        elif chosen.null_count:
            raise ValueError(f"select: {chosen.null_count} of the row numbers are null")
        return np.asarray(chosen)
    if not hasattr(chosen, "__array__") and not isinstance(chosen, Sequence):
        chosen = list(chosen)
    values = np.asarray(chosen)
    return values if values.size or values.dtype.kind == "b" else values.astype(np.int64)


def _shape(values: npt.NDArray[Any]) -> str:
    return " × ".join(map(str, values.shape)) or "no"


def _sliced(chosen: slice) -> str:
    parts = ["" if part is None else str(part) for part in (chosen.start, chosen.stop, chosen.step)]
    return ":".join(parts if parts[2] else parts[:2])


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > SHOWN_FIELDS else ""
    return ", ".join(names[:SHOWN_FIELDS]) + more
