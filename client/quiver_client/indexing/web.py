"""Lists the objects of an HTTP server: objects named by their URL, and folders whose index page links to them.

Only links to below the folder are followed, so that a page cannot lead the indexer elsewhere.
"""

from __future__ import annotations

import posixpath
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from typing import Any, Final
from urllib.parse import quote, unquote, urljoin, urlsplit

from quiver.errors import BadRequest, Forbidden, Misconfigured, NotFound, QuiverError, Unavailable
from quiver.location import is_object_path, shown
from quiver.manifest import SUFFIX
from quiver.origin.web import redirected
from quiver_client.indexing.local import LEFT_OUT_MANIFEST, LEFT_OUT_NAME
from quiver_client.indexing.objects import Listing, ListingBuilder
from quiver_client.indexing.remote import list_named
from quiver_client.indexing.report import Notices

PAGE_BYTES_MAX: Final = 64 << 20
PAGES_MAX: Final = 100_000
REQUEST_SECONDS: Final = 60


def list_web(url: str, notices: Notices) -> Listing:
    """List an object, or the folder whose index page is at ``url``."""
    url = tidy(url)
    if not url.endswith("/"):
        url = _look(url)
    if not url.endswith("/"):
        base, name = split_object(url)
        listing = list_named(base, [name])
        return Listing(base, True, listing.paths, listing.sizes, listing.etags, listing.mtimes)
    paths = []
    for path in _crawl(url):
        if path.endswith(SUFFIX):
            notices.add(LEFT_OUT_MANIFEST, shown(path))
        elif not is_object_path(path, "http"):
            notices.add(LEFT_OUT_NAME, shown(path))
        else:
            paths.append(path)
    return list_named(url, sorted(paths)) if paths else ListingBuilder().finish(url)


def tidy(url: str) -> str:
    """Return a URL quoted once, as a browser would send it. Raises ``Misconfigured`` for one with a query."""
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise Misconfigured(f"{url}: a source's URL can have no '?' or '#' part; give one that answers without")
    return f"{parts.scheme}://{parts.netloc}{quote(parts.path or '/', safe='/%:@!$&()*+,;=~' + chr(39))}"


def split_object(url: str) -> tuple[str, str]:
    """Return the base URL of a normalised URL, and the unquoted path of the object in it."""
    base, _, name = url.rpartition("/")
    return base + "/", unquote(name)


def _look(url: str) -> str:
    """Return the folder that a URL leads to (servers redirect ``folder`` to ``folder/``), or the URL of an object."""
    with _asked(url, "HEAD") as answer:
        return tidy(answer.url) if answer.url.endswith("/") else url


def _crawl(folder: str) -> Iterator[str]:
    """Yield the unquoted paths of all files below a folder, relative to it."""
    waiting = deque([folder])
    seen = {folder}
    files: set[str] = set()
    while waiting:
        page = waiting.popleft()
        for link in _links(page):
            if not link.startswith(folder) or link in seen:
                continue
            seen.add(link)
            if link.endswith("/"):
                waiting.append(link)
                if len(seen) - len(files) > PAGES_MAX:
                    raise BadRequest(f"{folder} has more than {PAGES_MAX} folders below it; index one of them")
                continue
            path = unquote(link[len(folder) :])
            if path not in files and ".." not in path.split("/"):
                files.add(path)
                yield path


def _links(page: str) -> list[str]:
    with _asked(page, "GET") as answer:
        if answer.headers.get_content_type() not in ("text/html", "application/xhtml+xml"):
            raise BadRequest(
                f"{page} is no folder with an index page; name the objects, for example {page}{{000..009}}.tar"
            )
        data = answer.read(PAGE_BYTES_MAX + 1)
        if len(data) > PAGE_BYTES_MAX:
            raise BadRequest(f"the index page {page} is larger than {PAGE_BYTES_MAX} bytes")
        text = data.decode(answer.headers.get_content_charset() or "utf-8", errors="replace")
    parser = _Links()
    parser.feed(text)
    parser.close()
    return [link for found in parser.found for link in _below(page, found)]


def _below(page: str, link: str) -> Iterator[str]:
    """Yield the absolute link if it leads to a file or folder of the same server; links with a query sort the page."""
    try:
        parts = urlsplit(urljoin(page, link))
    except ValueError:
        return
    if not parts.query and parts.path:
        path = posixpath.normpath(parts.path) + ("/" if parts.path.endswith("/") and parts.path != "/" else "")
        yield f"{parts.scheme}://{parts.netloc}{quote(unquote(path), safe='/:@!$&()*+,;=~' + chr(39))}"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


@contextmanager
def _asked(url: str, method: str) -> Iterator[HTTPResponse]:
    """Make one request; map its failures to our errors."""
    request = urllib.request.Request(url, method=method, headers={"User-Agent": "quiver"})
    try:
        with _OPENER.open(request, timeout=REQUEST_SECONDS) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error) from error
    except (OSError, HTTPException) as error:
        raise Unavailable(url, f"does not answer: {getattr(error, 'reason', error)}") from error


class _SlashOnly(urllib.request.HTTPRedirectHandler):
    """Follows a redirect from ``folder`` to ``folder/`` and no other: the user named where the data lies."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if newurl == req.full_url + "/":
            return super().redirect_request(req, fp, code, msg, headers, newurl)
        return None


_OPENER: Final = urllib.request.build_opener(_SlashOnly)


def _refusal(url: str, error: urllib.error.HTTPError) -> QuiverError:
    status = error.code
    if 300 <= status < 400:
        return redirected(url, error.headers.get("Location", ""))
    if status in (404, 410):
        return NotFound(f"there is no {url}; check the source's URL")
    if status in (401, 403):
        return Forbidden(f"{url}: the server refuses to answer (status {status})")
    return Unavailable(url, f"the server answers with status {status}")
