"""Tracebacks in the log: each of their lines is indented and escaped.

The text of an exception may be that of a stranger (``logs``). Behind a newline in it no line may begin that reads as if
the daemon had said it.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Final

from quiver_cacheserver.logs import one_line

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class Indented(logging.Formatter):
    """Writes a record as ``logging.Formatter`` does, and what was raised below it, each line to the right."""

    def formatException(self, ei: _Raised) -> str:
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).split("\n"))


def keep_indented() -> None:
    """Have all tracebacks that are logged written so."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(Indented(FORMAT))
