"""Objects over the network: S3, GCS and Azure through obstore (Rust's object_store), plain HTTP by ``web``.

obstore runs its own threads, which do not survive a fork: a child that uses it after its parent did waits for ever. So
a process that may fork uses ``isolated`` instead (docs/adr/0004).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from quiver.errors import BadRequest, Changed, Forbidden, Misconfigured, NotFound, Unavailable
from quiver.location import WEB_SCHEMES, Location, object_path, shown
from quiver.origin.base import Extent
from quiver.origin.web import WebStore

REQUESTS_AT_ONCE: Final = 32  # at 30 ms a request, a thousand small objects a second
GAP_BYTES_MAX: Final = 4096  # reading 4 KiB too much costs less than another request; a tar header is 512 to 1536 bytes
RUN_BYTES_MAX: Final = 4 << 20  # larger runs are split, so that one shard is read over several connections
ATTEMPTS: Final = 5
ATTEMPTS_SECONDS: Final = 30
REQUEST_SECONDS: Final = 60
PROBE_SECONDS: Final = 5


class _Run(NamedTuple):
    """One request: a run of bytes and the extents to be cut from it, as (offset in the run, length, offset in out)."""

    path: str
    start: int
    end: int
    cuts: list[tuple[int, int, int]]


class RemoteStore:
    """Objects under an ``s3://``, ``gs://``, ``az://`` or ``http(s)://`` URL. Safe to use from several threads."""

    def __init__(self, base: str) -> None:
        location = Location.parse(base)
        self.base = location.url
        self._scheme = location.scheme
        self._store = connect(self.base)
        self._pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="quiver-origin")

    def __repr__(self) -> str:
        return f"RemoteStore({self.base!r})"

    def read(self, extents: Sequence[Extent], out: memoryview) -> int:
        runs = coalesce(extents)
        for _ in self._pool.map(lambda run: self._fetch(run, out), runs):
            pass
        return sum(run.end - run.start for run in runs)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if isinstance(self._store, WebStore):
            self._store.close()

    def _fetch(self, run: _Run, out: memoryview) -> None:
        data = memoryview(self._get(run))
        if len(data) < run.end - run.start:
            raise Changed(self.base + run.path, "became shorter")
        for at, length, target in run.cuts:
            out[target : target + length] = data[at : at + length]

    def _get(self, run: _Run) -> Any:
        url = self.base + object_path(run.path, self._scheme)
        try:
            with store_errors(url):
                return self._store.get_range(run.path, start=run.start, end=run.end)
        except NotFound:
            raise Changed(url, "vanished") from None
        except Unavailable as error:
            if "416" not in str(error) and "range" not in str(error).lower():
                raise
            with store_errors(url):
                if self._store.head(run.path)["size"] < run.end:
                    raise Changed(url, "became shorter") from error
            if run.start:
                raise
            with store_errors(url):  # a server that does not answer byte ranges: read the object from its beginning
                return self._store.get(run.path).bytes()


def connect(base: str, *, patient: bool = True) -> Any:
    """Return the store for a base URL: obstore's, or our own for a plain HTTP server.

    Both have the methods ``get_range``, ``head`` and ``get``. Credentials and endpoint come from the usual variables.
    ``patient``: try again what fails; not where somebody waits to hear whether it works at all.
    """
    location = Location.parse(base)
    base = location.url
    if location.scheme in WEB_SCHEMES:
        return WebStore(
            location,
            request_seconds=REQUEST_SECONDS if patient else PROBE_SECONDS,
            attempts=ATTEMPTS if patient else 0,
            attempts_seconds=ATTEMPTS_SECONDS,
        )
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise Misconfigured(f"{base} needs obstore; pip install 'quiver-cache[s3]'") from error
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "") if location.scheme == "s3" else ""
    try:
        return from_url(
            base,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "timeout": timedelta(seconds=REQUEST_SECONDS if patient else PROBE_SECONDS),
                "connect_timeout": timedelta(seconds=5),
            },
            retry_config={
                "max_retries": ATTEMPTS if patient else 0,
                "retry_timeout": timedelta(seconds=ATTEMPTS_SECONDS),
            },
        )
    except (BaseError, ValueError, TypeError) as error:
        raise Misconfigured(f"{base}: {_first_line(error)}") from error


def coalesce(extents: Sequence[Extent]) -> list[_Run]:
    """Merge neighbours (gap up to ``GAP_BYTES_MAX``) into one request each, up to ``RUN_BYTES_MAX``."""
    runs: list[_Run] = []
    targets = []
    at = 0
    for extent in extents:
        targets.append((extent.path, extent.offset, extent.length, at))
        at += extent.length
    for path, offset, length, target in sorted(targets):
        while length:
            take = min(length, RUN_BYTES_MAX)
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.path == path
                and offset <= last.end + GAP_BYTES_MAX
                and offset + take - last.start <= RUN_BYTES_MAX
            ):
                last.cuts.append((offset - last.start, take, target))
                runs[-1] = last._replace(end=max(last.end, offset + take))
            else:
                runs.append(_Run(path, offset, offset + take, [(0, take, target)]))
            offset, length, target = offset + take, length - take, target + take
    return runs


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


class Download:
    """One object being read from its beginning to its end."""

    def __init__(self, url: str, result: Any) -> None:
        self._url = url
        self._result = result
        meta = result.meta
        self.version = f"{meta['e_tag']} {meta['last_modified']} {meta['size']}"

    def chunks(self, size_bytes: int) -> Iterator[bytes]:
        with store_errors(self._url):
            for chunk in self._result.stream(min_chunk_size=size_bytes):
                yield bytes(chunk)


def download(url: str) -> Download:
    """Begin to read one object, a manifest for instance."""
    base, _, name = url.rpartition("/")
    store = connect(base + "/")
    with store_errors(url):
        return Download(url, store.get(unquote(name)))


@contextlib.contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Map what obstore raises. Raises ``NotFound``, ``Forbidden``, ``Unavailable``."""
    try:
        from obstore import exceptions as failed
    except ImportError:  # plain HTTP does without, and raises our errors itself
        yield
        return
    try:
        yield
    except (failed.NotFoundError, FileNotFoundError):
        raise NotFound(f"{url} does not exist") from None
    except (failed.PermissionDeniedError, failed.UnauthenticatedError) as error:
        raise Forbidden(f"{url}: the store refuses the credentials; set the usual variables of the store") from error
    except (failed.BaseError, OSError) as error:
        if "404 Not Found" in str(error):  # of a listing: there is no such bucket
            raise NotFound(f"{url} does not exist") from error
        raise Unavailable(url, _first_line(error)) from error


@contextlib.contextmanager
def path_errors(url: str) -> Iterator[None]:
    """Map what obstore says of a key that it cannot ask for. Raises ``BadRequest``."""
    try:
        from obstore.exceptions import InvalidPathError
    except ImportError:
        yield
        return
    try:
        yield
    except InvalidPathError as error:
        why = _first_line(error)
        raise BadRequest(f"{shown(url)}: {shown(why)}; rename the object, or index a folder without it") from error
