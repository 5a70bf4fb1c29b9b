"""Objects over the network: S3, GCS and Azure through obstore (Rust's object_store), plain HTTP by ``web``.

obstore runs its own threads, which do not survive a fork: a child that uses it after its parent did waits forever. So
a process that may fork uses ``origin_process`` instead (docs/adr/0004).

One read makes many parallel requests under one deadline, and retries each with full jitter (docs/adr/0014).
obstore's own retries are disabled: they end within a second and ignore Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import blake3

from quiver.digest import Digest
from quiver.errors import Changed, Misconfigured, NotFound, Unavailable
from quiver.location import WEB_SCHEMES, Location, object_path
from quiver.manifest import SUFFIX
from quiver.origin.background import submit
from quiver.origin.base import READ_SECONDS, Extent
from quiver.origin.gate import Gate, backoff_seconds
from quiver.origin.runs import ByteRun, coalesce
from quiver.origin.store_errors import first_line, status_of, store_errors
from quiver.origin.web import WebStore
from quiver.origin.web_answers import NoRanges

REQUESTS_AT_ONCE: Final = 32  # at 30 ms per request, a thousand small objects per second
STREAMED_BYTES: Final = 256 << 10  # larger answers are received in pieces of about this size, so that progress is seen
# Arriving bytes extend the deadline of their read at this rate: a slow link finishes, a store that trickles does not.
SLOWEST_BYTES_PER_SECOND: Final = 64 << 10
ATTEMPTS: Final = 6  # of a request: about 3 s of failures
ATTEMPTS_SECONDS: Final = 30  # of requests that obstore repeats: listing, indexing
REQUEST_SECONDS: Final = 60
PROBE_SECONDS: Final = 5
SIGNED_SECONDS: Final = 60  # validity of the signed URL by which a Retry-After is requested
DOWNLOAD_BYTES: Final = 8 << 20
# Errors for a range past an object's end, and of servers without byte ranges.
_NO_RANGE: Final = re.compile(r"(?:answers|status) 416\b|range requested|[Rr]equested range|Wanted range")
_BUSY: Final = frozenset({429, 503})


class _Deadline:
    """The deadline of one read, for all its requests together; arriving bytes extend it."""

    def __init__(self, within_seconds: float) -> None:
        self.within_seconds = within_seconds
        self.at = time.monotonic() + within_seconds
        self.last: Unavailable | None = None  # the last failure
        self.timeout: asyncio.Timeout | None = None

    def arrived(self, count: int) -> None:
        self.last = None
        self.at += count / SLOWEST_BYTES_PER_SECOND
        if self.timeout is not None and not self.timeout.expired():
            loop = asyncio.get_running_loop()
            self.timeout.reschedule(loop.time() + self.at - time.monotonic())

    @contextlib.asynccontextmanager
    async def kept(self, url: str) -> AsyncIterator[None]:
        """Raise ``Unavailable`` if the block takes longer."""
        try:
            async with asyncio.timeout(max(self.at - time.monotonic(), 0.0)) as self.timeout:
                yield
        except TimeoutError:
            raise self.missed(url) from self.last

    def missed(self, url: str) -> Unavailable:
        last = self.last
        if last is None:
            return Unavailable(url, f"does not answer within {self.within_seconds:.0f} s")
        return Unavailable(last.who, last.why, retry_after_seconds=last.retry_after_seconds)


class RemoteStore:
    """Objects under an ``s3://``, ``gs://``, ``az://`` or ``http(s)://`` URL. Safe to use from several threads."""

    def __init__(self, base: str) -> None:
        location = Location.parse(base)
        self.base = location.url
        self._scheme = location.scheme
        self._store = connect(self.base, attempts=1)
        self._gate = Gate()
        self._trying = asyncio.Lock()
        self._known_troubled = False  # the last read failed, so the next ones do not retry
        self._slots = asyncio.Semaphore(
            REQUESTS_AT_ONCE
        )  # used by one loop: that of ``submit``, or that of the caller of ``fetch``
        self._lock = threading.Lock()
        self._reading: set[Future[int]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"RemoteStore({self.base!r})"

    def read(self, extents: Sequence[Extent], out: memoryview, within_seconds: float = READ_SECONDS) -> int:
        with self._lock:
            if self._closed:
                raise Unavailable(self.base, "was closed", lasting=True)
            reading = submit(self.fetch(extents, out, within_seconds))
            self._reading.add(reading)
        try:
            return reading.result()
        except CancelledError:
            raise Unavailable(self.base, "was closed", lasting=True) from None
        finally:
            with self._lock:
                self._reading.discard(reading)
            if not reading.done():  # Ctrl-C
                reading.cancel()

    def close(self) -> None:
        """End all reads; they raise ``Unavailable``."""
        with self._lock:
            self._closed = True
            reading = list(self._reading)
        for each in reading:
            each.cancel()
        if isinstance(self._store, WebStore):
            self._store.close()

    async def fetch(self, extents: Sequence[Extent], out: memoryview, within_seconds: float = READ_SECONDS) -> int:
        """Do what ``read`` does, for callers with an event loop. All reads of a store must use the same loop."""
        runs = coalesce(extents)
        for path in {run.path for run in runs}:
            object_path(path, self._scheme)
        deadline = _Deadline(within_seconds)
        async with deadline.kept(self.base):
            left = iter(runs)
            await _all(self._insisted_on(left, out, deadline) for _ in range(min(len(runs), REQUESTS_AT_ONCE)))
        return sum(run.end - run.start for run in runs)

    async def _insisted_on(self, left: Iterator[ByteRun], out: memoryview, deadline: _Deadline) -> None:
        """Make one request after the other: a task for each would wait for its turn."""
        for run in left:
            await self._insisted(run, out, deadline)

    async def _insisted(self, run: ByteRun, out: memoryview, deadline: _Deadline) -> None:
        """Retry a request until it is answered, a few times at most: a longer wait is left to the caller."""
        for failures in itertools.count(1):
            # While the store fails, make one request at a time, to find out whether it has recovered.
            async with self._slots, self._trying if self._gate.in_trouble else contextlib.nullcontext():
                if await self._answered(run, out, deadline):
                    return
            pause = backoff_seconds(failures)
            if failures >= ATTEMPTS or self._known_troubled or time.monotonic() + pause >= deadline.at:
                self._known_troubled = True
                raise deadline.missed(self.base)
            await asyncio.sleep(pause)

    async def _answered(self, run: ByteRun, out: memoryview, deadline: _Deadline) -> bool:
        """Make one request; return whether it was answered. Raises errors that a retry cannot mend."""
        seconds = await self._gate.passed(deadline.at)
        if seconds:  # raised at once: the caller may have another source
            why = deadline.last.why if deadline.last is not None else "is busy"
            asks = f"{why}, and asks for no requests for {seconds:.0f} s"
            raise Unavailable(self.base, asks, retry_after_seconds=seconds)
        try:
            await self._fetch(run, out, deadline)
        except Unavailable as error:
            if error.lasting:
                raise
            deadline.last, self._gate.in_trouble = error, True
            if error.retry_after_seconds:
                self._gate.close_for(error.retry_after_seconds)
            elif status_of(error) in _BUSY:
                await self._gate.ask(await self._plain_url(run.path))
            return False
        self._gate.in_trouble = self._known_troubled = False
        return True

    async def _fetch(self, run: ByteRun, out: memoryview, deadline: _Deadline) -> None:
        url = self.base + run.path
        try:
            with store_errors(url):
                await self._receive(run, out, deadline)
        except NotFound:
            raise Changed(url, "vanished") from None
        except Unavailable as error:
            if not isinstance(error, NoRanges) and not _NO_RANGE.search(error.why):
                raise
            await self._without_ranges(run, out, error)

    async def _receive(self, run: ByteRun, out: memoryview, deadline: _Deadline) -> None:
        size = run.end - run.start
        whole = run.cuts == [(0, size, run.cuts[0][2])]  # one extent: received in place, without a buffer of its own
        if isinstance(self._store, WebStore):
            data = out[run.cuts[0][2] :][:size] if whole else memoryview(bytearray(size))
            count = await self._store.receive_range(run.path, run.start, run.end, data, deadline.arrived)
            self._cut(run, data[:count], out, copy=not whole)
            return
        if size <= STREAMED_BYTES:
            data = memoryview(await self._store.get_range_async(run.path, start=run.start, end=run.end))
            deadline.arrived(len(data))
            self._cut(run, data, out)
            return
        data = out[run.cuts[0][2] :][:size] if whole else memoryview(bytearray(size))
        at = 0
        result = await self._store.get_async(run.path, options={"range": (run.start, run.end)})
        async for chunk in result.stream(min_chunk_size=STREAMED_BYTES):
            piece = memoryview(chunk)
            data[at : at + len(piece)] = piece
            at += len(piece)
            deadline.arrived(len(piece))
        self._cut(run, data[:at], out, copy=not whole)

    def _cut(self, run: ByteRun, data: memoryview, out: memoryview, *, copy: bool = True) -> None:
        if len(data) < run.end - run.start:
            raise Changed(self.base + run.path, "became shorter")
        for at, length, target in run.cuts if copy else ():
            out[target : target + length] = data[at : at + length]

    async def _without_ranges(self, run: ByteRun, out: memoryview, error: Unavailable) -> None:
        """Read from the object's beginning, if the server lacks byte ranges. Raises ``Changed`` if it is too short."""
        url = self.base + run.path
        with store_errors(url):
            if (await self._store.head_async(run.path))["size"] < run.end:
                raise Changed(url, "became shorter") from error
            if run.start:
                raise error
            result = await self._store.get_async(run.path)
            data = bytearray()  # no more than the run needs: the object may be of any size
            async for piece in result.stream(min_chunk_size=STREAMED_BYTES):
                data += memoryview(piece)[: run.end - len(data)]
                if len(data) == run.end:
                    break
            self._cut(run, memoryview(data), out)

    async def download(self, path: str, folder: Path, within_seconds: float) -> Path:
        """Download a manifest into a folder, once per version; return its file there, named by version and BLAKE3.

        Raises ``NotFound``, ``Forbidden``, ``Unavailable``, and ``OSError`` for the folder.
        """
        url = self.base + path
        deadline = _Deadline(within_seconds)
        async with deadline.kept(url):
            with store_errors(url):
                result = await self._store.get_async(path)
            meta = result.meta
            version = Digest.of(f"{url} {meta['e_tag']} {meta['last_modified']} {meta['size']}".encode())
            if (kept := _kept(folder, str(version))) is not None:
                return kept
            temporary = folder / f".{version}.{secrets.token_hex(8)}.tmp"
            hasher = blake3.blake3()
            try:
                with temporary.open("wb") as file:
                    chunks = aiter(result.stream(min_chunk_size=DOWNLOAD_BYTES))
                    while True:
                        with store_errors(url):
                            chunk = await anext(chunks, None)
                        if chunk is None:
                            break
                        hasher.update(chunk)
                        deadline.arrived(file.write(chunk))
                    file.flush()
                    os.fsync(file.fileno())
                target = folder / f"{version}.{hasher.hexdigest()}{SUFFIX}"
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
        return target

    async def _plain_url(self, path: str) -> str:
        """Return a short-lived URL by which anybody may read the object, or ``""``; it must not be logged."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            for_so_long = timedelta(seconds=SIGNED_SECONDS)
            return str(await obstore.sign_async(self._store, "GET", path, expires_in=for_so_long))
        except (
            BaseError,
            OSError,
            ValueError,
            TypeError,
        ):  # these credentials cannot sign: there is no Retry-After then
            return ""


def _kept(folder: Path, version: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"{version}.*{SUFFIX}"))), None)


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once. Raises the first failure, once the others have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def connect(base: str, *, attempts: int = ATTEMPTS, request_seconds: float = REQUEST_SECONDS) -> Any:
    """Return the store for a base URL: obstore's, or our own for a plain HTTP server, which has the same methods.

    Credentials and endpoint come from the store's usual variables. ``attempts``: how many times the store itself tries
    a request.
    """
    location = Location.parse(base)
    base = location.url
    if location.scheme in WEB_SCHEMES:
        return WebStore(
            location, request_seconds=request_seconds, attempts=attempts - 1, attempts_seconds=ATTEMPTS_SECONDS
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
                "timeout": timedelta(seconds=request_seconds),
                "connect_timeout": timedelta(seconds=5),
            },
            retry_config={"max_retries": attempts - 1, "retry_timeout": timedelta(seconds=ATTEMPTS_SECONDS)},
        )
    except (BaseError, ValueError, TypeError) as error:
        raise Misconfigured(f"{base}: {first_line(error)}") from error
