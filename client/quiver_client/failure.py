"""An error that names the samples, in place of an exception that a loop would take for its end.

``StopIteration`` ends a ``for`` loop without a word, wherever below ``__next__`` it was raised, and ``IndexError`` ends
one over an object that has ``__getitem__`` alone. Raised by the user's code by mistake, they would lose all samples
that were still to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quiver.manifest import Manifest

NAMED: Final = 3  # samples of a batch that a message names


def failure(what: str, error: BaseException, manifest: Manifest, rows: Sequence[int]) -> RuntimeError:
    """Return the error to raise because ``what`` raised ``error`` while it made these samples."""
    names = ", ".join(f"{row} ({manifest.key(row)!r})" for row in rows[:NAMED])
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    said = f": {error}" if str(error) else ""
    return RuntimeError(
        f"{what} raised {type(error).__name__}{said}, for sample{'s' * (len(rows) > 1)} {names}{more}."
        " A loop would take that for its end and lose the samples that follow; raise another exception"
    )
