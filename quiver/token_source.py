"""The token that this process sends to daemons: ``QUIVER_TOKEN``, or what the file ``QUIVER_TOKEN_FILE`` contains.

A training run outlives its token, so the file is read again when it changes: whoever issues tokens replaces the file,
by a rename. The only state is a path and what the file contained when it had a certain ``stat``, so a forked process
needs nothing of its own. No token is part of a ``repr``, an error, a pickle or a log line.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import json
import logging
import os
import re
import time
from typing import Final, NamedTuple, NoReturn

from quiver.claims import TOKEN_BYTES_MAX
from quiver.errors import Misconfigured

log = logging.getLogger(__name__)

VARIABLE: Final = "QUIVER_TOKEN"
FILE_VARIABLE: Final = "QUIVER_TOKEN_FILE"
LOOK_SECONDS: Final = 1.0  # between two looks at the file: its folder may be on a network
HOW: Final = f"set {VARIABLE} or {FILE_VARIABLE}; `quiver token create` signs a token"

_TOKEN: Final = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)  # nothing that could end a header's line


class _Content(NamedTuple):
    """What the file contained, and the ``stat`` that it had."""

    token: str = ""
    stat: tuple[int, int, int] | None = None
    looked_at: float = -LOOK_SECONDS


class TokenSource:
    """The token of this process. Safe from threads and in forked processes."""

    __slots__ = ("_content", "_path", "_token")

    def __init__(self, token: str = "", path: str = "") -> None:
        """Raises ``Misconfigured`` if ``token`` is none."""
        if token and path:
            raise Misconfigured(f"{VARIABLE} and {FILE_VARIABLE} are both set; set one of them")
        self._token = _checked(token, VARIABLE) if token else ""
        self._path = path
        self._content = _Content()

    @classmethod
    def from_environment(cls) -> TokenSource:
        """Raises ``Misconfigured``."""
        return cls(os.environ.get(VARIABLE, "").strip(), os.environ.get(FILE_VARIABLE, ""))

    def __repr__(self) -> str:
        return f"TokenSource({self._source or 'none'})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token source does not leave their process")

    def __bool__(self) -> bool:
        """Whether this process has a token, or a file for one."""
        return bool(self._token or self._path)

    def token(self, *, fresh: bool = False) -> str:
        """Return the token, ``""`` for none. ``fresh``: look at the file now, however recently that was done.

        Raises ``Misconfigured`` if the file never contained a token; a later fault keeps the last token.
        """
        if not self._path:
            return self._token
        content, now = self._content, time.monotonic()
        if not fresh and now - content.looked_at < LOOK_SECONDS:
            return content.token
        try:
            found = os.stat(self._path)  # noqa: PTH116  # once a second on the path of a batch
            stat = (found.st_mtime_ns, found.st_size, found.st_ino)
            token = content.token if stat == content.stat else self._read()
        except (OSError, Misconfigured) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            if not content.token:
                raise Misconfigured(f"{FILE_VARIABLE} {self._path}: {why}") from error
            log.warning("%s %s: %s; sending the last token", FILE_VARIABLE, self._path, why)
            self._content = content._replace(looked_at=now)
            return content.token
        self._content = _Content(token, stat, now)
        return token

    def fault(self) -> str:
        """Return what is wrong with the token as far as its bearer can tell, and what to do."""
        if not self:
            return f"no token was sent; {HOW}"
        token = self._token or self._content.token
        expired = _expired_at(token)
        why = f"it expired at {expired}" if expired else "it is for another rack, or no key of the daemons signed it"
        return f"the token of {self._source} was refused: {why}; replace it (`quiver token create`)"

    @property
    def _source(self) -> str:
        return f"{FILE_VARIABLE} {self._path}" if self._path else VARIABLE if self._token else ""

    def _read(self) -> str:
        with open(self._path, "rb") as file:  # noqa: PTH123
            content = file.read(TOKEN_BYTES_MAX + 2)
        return _checked(content.decode("ascii", "replace").strip(), "the file")


NO_TOKEN: Final = TokenSource()


def warn_of_plain_text(host: str) -> None:
    """Log once per process that a token is sent unencrypted to another host: whoever listens can use it."""
    global _warned  # noqa: PLW0603  # one line per process, whatever the number of connections
    if _warned or host == "localhost" or host.strip("[]") == "::1" or host.startswith("127."):
        return
    _warned = True
    log.warning("the token goes to %s unencrypted: whoever listens on the way can use it; use https", host)


_warned = False


def _checked(token: str, what: str) -> str:
    """Return a token, which is safe as the value of a header. Raises ``Misconfigured``, without quoting it."""
    if len(token) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise Misconfigured(f"{what} contains no token; `quiver token create` prints one")
    return token


def _expired_at(token: str) -> str:
    """Return when a token expired, ``""`` if it did not or does not say. It is not verified here."""
    try:
        payload = token.split(".")[1]
        expires_at = float(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])
        if expires_at > time.time():
            return ""
        return datetime.datetime.fromtimestamp(expires_at, datetime.UTC).isoformat(" ", "seconds")
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, OSError, RecursionError, binascii.Error):
        return ""
