"""An origin of limited bandwidth and added latency that counts the bytes it sends: HTTP with byte ranges.

python -m bench.origin FOLDER PORT
GET /<file>                          a file, or a range of it
GET /-/limit/<bytes per second>/<ms>   limit all answers together, and delay each (0: no limit, no delay)
GET /-/sent                          the bytes sent since the last such request
GET /-/counts                        the bytes sent since it started, by file, as JSON
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

CHUNK_BYTES = 16 << 10


class Origin:
    """Serves one folder. The bandwidth limit is a queue: chunks of all answers take turns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rate = 0.0
        self._latency = 0.0
        self._free_at = 0.0
        self._sent = 0
        self._counts: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).strip():
                await self._answer(head.decode("latin-1"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        method, target, _ = head.split(" ", 2)
        name = unquote(target.partition("?")[0]).lstrip("/")
        if name.startswith("-/"):
            body = str(self._control(name.split("/")[1:])).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return
        path = self._folder / name
        if not path.is_file():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        size = path.stat().st_size
        asked = re.search(r"(?im)^range: *bytes=(\d+)-(\d*)", head)
        start, end = (int(asked[1]), min(int(asked[2] or size - 1) + 1, size)) if asked else (0, size)
        lines = [f"HTTP/1.1 {'206 Partial Content' if asked else '200 OK'}", f"Content-Length: {end - start}"]
        lines += [f"Content-Range: bytes {start}-{end - 1}/{size}"] if asked else []
        lines += [f'ETag: "{size}"', "Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT", "Accept-Ranges: bytes", "", ""]
        await asyncio.sleep(self._latency)
        writer.write("\r\n".join(lines).encode())
        if method == "HEAD":
            return
        with path.open("rb") as file:
            file.seek(start)
            while start < end:
                chunk = file.read(min(CHUNK_BYTES, end - start))
                await self._turn(name, len(chunk))
                writer.write(chunk)
                await writer.drain()
                start += len(chunk)

    async def _turn(self, name: str, count: int) -> None:
        self._sent += count
        self._counts[name] += count
        if self._rate:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            await asyncio.sleep(self._free_at - now)

    def _control(self, words: list[str]) -> int | str:
        if words[0] == "counts":
            return json.dumps(self._counts)
        if words[0] == "limit":
            self._rate, self._latency = float(words[1]), float(words[2]) / 1000
        sent, self._sent = self._sent, 0
        return sent


async def main(folder: Path, port: int) -> None:
    server = await asyncio.start_server(Origin(folder).serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
