"""The daemon's log: one line per record, even if text from a client, a peer or a manifest contains line breaks.

Object names, URLs and error messages are untrusted. Logged verbatim, a newline in one could forge a line of the log,
and an escape sequence could control the terminal of the person who reads it.

A digest is a capability, so none is logged. None of Quiver's own messages contains one. Messages of libraries and of
unforeseen errors may quote a path, a URL or a header, so the formatter removes everything that looks like a digest or a
token.
"""

from __future__ import annotations

import logging
import re
import sys
from types import TracebackType
from typing import Final

from quiver_cacheserver.access.audit import LOGGER
from quiver_cacheserver.log_limits import RepeatFilter

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LINE_CHARACTERS_MAX: Final = 2000  # a path in a manifest may be as long as the manifest
_TOKEN: Final = re.compile(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")  # a JSON Web Token begins with {"
# Sixteen or more hexadecimal digits with a letter among them: a time in nanoseconds is no match.
_DIGEST: Final = re.compile(r"(?<![0-9a-fA-F])(?=[0-9]*[a-fA-F])[0-9a-fA-F]{16,}")


class OneLine(logging.Formatter):
    """Escapes unprintable characters, truncates long lines, and indents tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return "\n".join(f"  {escaped(line)}" for line in super().formatException(ei).split("\n"))


def escaped(text: str) -> str:
    """Return the text without digests, and with control characters and line ends escaped as by ``repr``."""
    text = _TOKEN.sub("[token]", _DIGEST.sub("[digest]", text))
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
    audit = logging.StreamHandler(sys.stderr)  # bare JSON, whatever the level: ``access.audit`` bounds it
    audit.setFormatter(OneLine("%(message)s"))
    log = logging.getLogger(LOGGER)
    log.handlers, log.propagate = [audit], False
    log.setLevel(logging.INFO)
