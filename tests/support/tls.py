"""A certificate authority for a test, what it issues, and a TLS proxy for a server without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from quiver.transport.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, Credentials, TlsFiles
from quiver_client.certificates import Authority, Pair

HOST: Final = "127.0.0.1"


class Pki:
    """An authority for a test, and the files of what it issued in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.authority = Authority.new("a test's authority", 2)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.pair.certificate)

    def node(self, name: str, *hosts: str, days: float = 1) -> TlsFiles:
        """Issue a node's certificate, by default for 127.0.0.1. Negative days: it has expired."""
        return self._written(f"node-{name}", self.authority.node(name, list(hosts) or [HOST], days))

    def client(self, name: str, *, days: float = 1) -> TlsFiles:
        return self._written(f"client-{name}", self.authority.client(name, days))

    def anonymous(self) -> TlsFiles:
        """Return the files of a client that has no certificate."""
        return TlsFiles(str(self.ca))

    def _written(self, name: str, pair: Pair) -> TlsFiles:
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        replace(cert, pair.certificate)
        replace(key, pair.key)
        return TlsFiles(str(self.ca), str(cert), str(key))


def replace(path: Path, data: bytes) -> None:
    """Replace a file at once, as tools that renew certificates do."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.rename(path)


def flags(files: TlsFiles) -> tuple[str, ...]:
    """Return a daemon's flags for its files."""
    return "--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key


def variables(files: TlsFiles) -> dict[str, str]:
    """Return a client's environment for its files."""
    given = {CA_VARIABLE: files.ca, CERT_VARIABLE: files.cert, KEY_VARIABLE: files.key}
    return {name: path for name, path in given.items() if path}


@dataclass(frozen=True)
class Contexts:
    """The TLS of a server at 127.0.0.1, and of clients that trust its authority."""

    server: ssl.SSLContext
    client: Credentials
    pki: Pki


def make_contexts(folder: Path) -> Contexts:
    """Make an authority, and a node's certificate for 127.0.0.1."""
    pki = Pki(folder)
    files = pki.node("a")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key)
    return Contexts(server, Credentials(pki.anonymous()), pki)


@contextlib.contextmanager
def tls_front(url: str, context: ssl.SSLContext) -> Iterator[str]:
    """Serve TLS in front of ``url``; yield its ``https://`` address."""
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()
    ports: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(url)
        with contextlib.suppress(OSError, ssl.SSLError):
            inner_reader, inner_writer = await asyncio.open_connection(parts.hostname, parts.port)
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))

    async def serve() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()
        await stop.wait()
        server.close()
        handlers = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait(10)
    try:
        yield f"https://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until the end of the input, or until the other side has closed; then close both."""
    try:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
    finally:
        writer.transport.abort() if writer.transport.is_closing() else writer.close()
