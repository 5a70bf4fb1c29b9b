"""What the daemon logs: a line per record, whatever text of a client's, a peer's or a manifest's is in it.

Names of objects, URLs and error messages come from outside. Written as they are, a newline in one begins a line that
reads as if the daemon had said it, and an escape sequence does what it likes with the terminal of whoever reads it.

A digest is the right to read what it names, so none is logged. No message of ours is made with one in it; those of
libraries and of unforeseen errors may quote a path or a URL, so whatever looks like much of a digest is left out here.
"""

from __future__ import annotations

import logging
import re
import sys
from types import TracebackType
from typing import Final

from quiver_cacheserver.log_limits import RepeatFilter

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LINE_CHARACTERS_MAX: Final = 2000  # the rest says no more, and a path may have as many as a manifest's bytes
# Sixteen hexadecimal digits and more with a letter among them: a time in nanoseconds stays.
_DIGEST: Final = re.compile(r"(?<![0-9a-fA-F])(?=[0-9]*[a-fA-F])[0-9a-fA-F]{16,}")


class OneLine(logging.Formatter):
    """Escapes what is not printable and shortens what is too long. Lines of a traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return "\n".join(f"  {escaped(line)}" for line in super().formatException(ei).split("\n"))


def escaped(text: str) -> str:
    """Return the text without digests, control characters, line ends and so on as ``repr`` would write them."""
    text = _DIGEST.sub("[digest]", text)
    if len(text) > LINE_CHARACTERS_MAX:
        text = f"{text[:LINE_CHARACTERS_MAX]}… ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def log_to_stderr(level: str) -> None:
    """Set the root logger up, once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(FORMAT))
    handler.addFilter(RepeatFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
