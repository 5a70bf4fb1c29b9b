"""Real servers for indexing: an HTTP server with and without byte ranges, and moto's S3."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

Serve = Callable[..., str]


class Plain(SimpleHTTPRequestHandler):
    """Python's own server: index pages, and no byte ranges."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Ranges(Plain):
    """A server that answers byte ranges, as nginx does."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked or not path.is_file():
            super().do_GET()
            return
        start, end = int(asked[1]), int(asked[2])
        data = path.read_bytes()
        part = data[start : end + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


class NoPages(Ranges):
    """A server without index pages."""

    def list_directory(self, path: Any) -> None:
        self.send_error(403)


@contextmanager
def serving(folder: Path, handler: type[Plain]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a folder over HTTP; returns the URL without a slash at the end."""
    with ExitStack() as stack:
        yield lambda folder, handler=Ranges: stack.enter_context(serving(folder, handler))


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    server.stop()


class Bucket:
    """A bucket of the S3 server."""

    def __init__(self, endpoint: str, name: str) -> None:
        import boto3

        self.name = name
        self._client = boto3.client("s3", endpoint_url=endpoint)
        self._client.create_bucket(Bucket=name)

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=data)

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = Bucket(s3_endpoint, "bucket-" + re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[-40:].strip("-"))
    yield bucket
    bucket.close()
