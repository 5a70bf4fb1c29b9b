"""Where data lies: a folder's URL, parsed once into a normal form, so that what is compared is also what is opened.

Parsers of URLs disagree: some drop tabs and line feeds, some cut at ``?`` and ``#``, some read a backslash as a slash
or decode twice. Code that compares one reading of a string and opens another can be led out of the folder that it
checked. So this module rejects text that two parsers could read differently, and everything behind it handles a
``Location``: a scheme, a bucket or host, and the decoded names of folders, none of them empty, ``.`` or ``..``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from quiver.errors import BadRequest

SCHEMES: Final = frozenset({"file", "s3", "gs", "az", "http", "https"})
WEB_SCHEMES: Final = frozenset({"http", "https"})
PLAIN: Final = "/:@!$&'()*+,;="  # allowed unquoted in the path of a URL, besides letters and digits (RFC 3986)
_PORTS: Final = {"http": 80, "https": 443}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # and lone surrogates, which cannot be encoded
_AMBIGUOUS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\\?#]")
# A percent-encoded control character, dot, slash or backslash, encoded once or repeatedly.
_QUOTED = re.compile(r"%(?:25)*(?:[01][0-9a-f]|7f|2e|2f|5c)", re.IGNORECASE)
_BROKEN = re.compile(r"%(?![0-9a-f]{2})", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._:$-]{0,254}", re.ASCII)
_HOST = re.compile(
    r"(?P<name>[a-z0-9_](?:[a-z0-9._-]{0,252})|\[[0-9a-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Location:
    """A folder of the local file system, of a bucket, or of a web server. Compared and opened by value."""

    scheme: str
    authority: str  # a bucket, or a host and port in lower case; empty for local folders
    names: tuple[str, ...]  # the folders of the path, decoded

    @classmethod
    def parse(cls, url: str) -> Location:
        """Return the location that a URL names. Raises ``BadRequest`` for an ambiguous one."""
        scheme, colon, rest = url.partition("://")
        scheme = scheme.lower()
        if not colon or scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in sorted(SCHEMES))
            raise BadRequest(f"{shown(url)} is not a URL of an origin; these begin with {known}")
        refuse_credentials(url)
        if _AMBIGUOUS.search(url):
            raise BadRequest(
                f"{shown(url)}: control characters, backslashes, '?' and '#' are not allowed in the URL of an origin;"
                " in a name they are written %3F and %23"
            )
        if _QUOTED.search(rest):
            raise BadRequest(f"{shown(url)}: quoted dots, slashes, backslashes and control characters are not allowed")
        if _BROKEN.search(rest):
            raise BadRequest(f"{shown(url)}: a percent sign in a name is written %25")
        authority, _, path = rest.partition("/")
        try:
            names = unquote_to_bytes(path).decode().split("/")
        except UnicodeDecodeError:
            raise BadRequest(f"{shown(url)}: its names are not UTF-8") from None
        return cls._checked(url, scheme, _authority(url, scheme, authority), names)

    @classmethod
    def folder(cls, path: str) -> Location:
        """Return the location of a local folder, given by an absolute path. Raises ``BadRequest`` as ``parse`` does."""
        if not path.startswith("/"):
            raise BadRequest(f"{shown(path)} is not an absolute path")
        return cls._checked(path, "file", "", path[1:].split("/"))

    @classmethod
    def _checked(cls, text: str, scheme: str, authority: str, names: list[str]) -> Location:
        if names[-1] == "":  # a slash at the end, or no path at all
            names.pop()
        for name in names:
            if name in ("", ".", ".."):
                raise BadRequest(
                    f"{shown(text)}: a folder in it has no name, or is {name!r}; it steps out of its folder"
                )
            if _CONTROL.search(name) or "\\" in name or _QUOTED.search(name):
                raise BadRequest(
                    f"{shown(text)}: a folder's name has a control character, a backslash or a quoted dot or slash"
                    " in it; rename the folder, or name one above it"
                )
        return cls(scheme, authority, tuple(names))

    def __str__(self) -> str:
        return self.url

    @property
    def url(self) -> str:
        """The URL in its one normal form, which ends in a slash."""
        path = "".join(f"{quote(name, safe=PLAIN[1:])}/" for name in self.names)
        return f"{self.scheme}://{self.authority}/{path}"

    @property
    def path(self) -> str:
        """The decoded path, as system calls take it for a local folder."""
        return "/" + "/".join(self.names)

    def contains(self, other: Location) -> bool:
        """Whether ``other`` is this folder or lies below it."""
        return (
            (self.scheme, self.authority) == (other.scheme, other.authority)
            and other.names[: len(self.names)] == self.names
        )  # fmt: skip


@lru_cache(4096)
def normal(base: str) -> str:
    """Return the URL of a location in its one normal form; one that is none stays as it is."""
    try:
        return Location.parse(base).url
    except BadRequest:
        return base


def origin_of(base: str) -> str:
    """Return the origin that data at a base comes from, by host or bucket: what shares one bandwidth."""
    scheme, _, rest = normal(base).partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def object_path(path: str, scheme: str) -> str:
    """Return the unquoted path of an object below a location, if every reader resolves it to the same object.

    Local names and keys of object stores pass unchanged: the system and the store compare them byte by byte. A path
    that becomes part of a web server's URL must follow the rules for locations. Raises ``BadRequest``.
    """
    if not path or "\0" in path or any(name in ("", ".", "..") for name in path.split("/")):
        raise BadRequest(f"an object has a path that is not allowed: {shown(path)!r}")
    if scheme != "file" and _CONTROL.search(path):
        raise BadRequest(f"an object has a control character in its path: {shown(path)}")
    if scheme in WEB_SCHEMES and ("\\" in path or _QUOTED.search(path)):
        raise BadRequest(f"an object has a backslash, or a quoted dot or slash, in its path: {shown(path)}")
    return path


def is_object_path(path: str, scheme: str) -> bool:
    """Whether ``object_path`` accepts it."""
    try:
        object_path(path, scheme)
    except BadRequest:
        return False
    return True


def refuse_credentials(url: str) -> None:
    """Raise ``BadRequest`` for a URL that contains a user or a password."""
    _, _, rest = url.partition("://")
    if _redacted(rest) != rest:
        raise BadRequest(
            f"{shown(url)} contains a user or a password, which manifests and logs would repeat;"
            " remove it, and give credentials where the store's own client looks for them"
        )


def shown(text: str, most: int = 200) -> str:
    """Return a path or URL in a form that is safe in a message or a log: one line, without credentials."""
    scheme, colon, rest = text.partition("://")
    text = scheme + colon + _redacted(rest) if colon else text
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: most + 1])
    return line if len(text) <= most else line[:most] + "…"


def _redacted(rest: str) -> str:
    """Return what follows ``://`` without user and password; a password may contain a slash or ``@``."""
    authority, _, path = rest.partition("/")
    host, colon, port = authority.rpartition(":")
    cut = "@" in authority or (colon and host and not port.isdecimal() and "@" in path and not port.endswith("]"))
    return "…@" + rest.rpartition("@")[2] if cut else rest


def _authority(url: str, scheme: str, authority: str) -> str:
    if scheme == "file":
        if authority not in ("", "localhost"):
            raise BadRequest(f"{shown(url)}: a file URL has three slashes: file:///path")
        return ""
    if scheme not in _PORTS:
        if not _BUCKET.fullmatch(authority):
            raise BadRequest(f"{shown(url)} names no bucket; write {scheme}://bucket/path")
        return authority
    found = _HOST.fullmatch(authority.lower())
    port = int(found["port"] or _PORTS[scheme]) if found else 0
    labels = found["name"].rstrip(".").split(".") if found else [""]
    if found is None or not 0 < port < 65536 or not all(0 < len(label) < 64 for label in labels):
        raise BadRequest(f"{shown(url)} names no host; write {scheme}://host:port/path")
    name = str(found["name"])
    return name if port == _PORTS[scheme] else f"{name}:{port}"
