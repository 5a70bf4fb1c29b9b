"""The error that replaces an exception which would end a ``for`` loop silently; it names the samples.

``StopIteration`` ends a ``for`` loop silently, wherever below ``__next__`` it is raised, and ``IndexError`` ends a loop
over an object that has only ``__getitem__``. If the user's code raises one by mistake, the loop would lose all samples
that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

NAMED: Final = 3  # samples of a batch that a message names


def failure(what: str, error: BaseException, key: Callable[[int], str], rows: Sequence[int]) -> RuntimeError:
    """Return the error to raise because ``what`` raised ``error`` while it made these samples; ``key`` names one."""
    names = ", ".join(f"{row} ({key(row)!r})" for row in rows[:NAMED])
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    said = f": {error}" if str(error) else ""
    return RuntimeError(
        f"{what} raised {type(error).__name__}{said}, for sample{'s' * (len(rows) > 1)} {names}{more}."
        " A loop would take that for its end and lose the samples that follow; raise another exception"
    )
