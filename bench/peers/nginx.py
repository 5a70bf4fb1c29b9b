"""nginx in front of a folder of files, one request a sample over connections that stay."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from bench.measure import Batch
from bench.peers.ahead import ahead
from bench.peers.base import Peer
from bench.servers import LOOPBACK, CannotRun, Server, free_ports, program

CONFIGURATION: Final = """
daemon off;
user root;
worker_processes 3;
pid {folder}/pid;
error_log {folder}/errors;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    tcp_nodelay on;
    etag off;
    keepalive_requests 1000000000;
    keepalive_timeout 1h;
    open_file_cache max=200000 inactive=1h;
    open_file_cache_valid 1h;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{ listen {address} backlog=1024; root {root}; }}
}}
"""
HEAD_BYTES_MAX: Final = 512
END: Final = b"\r\n\r\n"


class Nginx(Peer):
    """Requests are pipelined over several connections by a client of raw sockets that copies nothing.

    Nothing faster is to be had in Python: http.client and pycurl parse each answer and copy its body.
    """

    name = "nginx"
    programs = ("nginx",)
    ways = ("3 connections", "8 connections", "3 connections, fetching ahead", "8 connections, fetching ahead")
    settings = "three workers, sendfile, tcp_nopush, open_file_cache over all files; pipelined GETs, one a sample"

    def prepare(self) -> None:
        folder = self.work.folder
        folder.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        self._address = (LOOPBACK, port)
        configuration = folder / "nginx.conf"
        root = self.data.files()
        configuration.write_text(CONFIGURATION.format(folder=folder, address=f"{LOOPBACK}:{port}", root=root))
        command = [program("nginx"), "-p", str(folder), "-c", str(configuration), "-e", str(folder / "errors")]
        self._server = self.closing.enter_context(Server(command, folder / "log"))
        self._server.wait_for_port(port)
        sizes = np.diff(self.data.offsets).tolist()
        self._batches = [
            [(self._get(number), sizes[number]) for number in batch]
            for batch in self.data.batches(self.work.batch_size)
        ]
        self._connections: list[socket.socket] = []

    def batches(self, way: str) -> Iterable[Batch]:
        count = int(way.partition(" ")[0])
        while len(self._connections) < count:
            connection = socket.create_connection(self._address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)
        plain = self._plain(self._connections[:count])
        return ahead(plain) if way.endswith("ahead") else plain

    def server_pids(self) -> list[int]:
        return [self._server.pid]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        super().close()

    @property
    def url(self) -> str:
        return f"http://{self._address[0]}:{self._address[1]}/"

    def _get(self, number: int) -> bytes:
        path = self.data.file(number).relative_to(self.data.folder / "files")
        return f"GET /{path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()

    def _plain(self, connections: list[socket.socket]) -> Iterator[Batch]:
        count = len(connections)
        for batch in self._batches:
            for at, connection in enumerate(connections):
                connection.sendall(b"".join(request for request, _ in batch[at::count]))
            samples: list[memoryview] = [memoryview(b"")] * len(batch)
            for at, connection in enumerate(connections):
                samples[at::count] = _bodies(connection, [size for _, size in batch[at::count]])
            yield samples


def _bodies(connection: socket.socket, sizes: list[int]) -> list[memoryview]:
    """Receive the answers to pipelined requests into one buffer; return views of their bodies."""
    view = np.empty(sum(sizes) + HEAD_BYTES_MAX * len(sizes), np.uint8).data
    bodies: list[memoryview] = []
    at = filled = 0
    for size in sizes:
        while (head := bytes(view[at : min(at + HEAD_BYTES_MAX, filled)]).find(END)) < 0:
            filled += _some(connection, view[filled:])
        if bytes(view[at + 9 : at + 12]) != b"200":
            raise CannotRun(f"nginx answers {bytes(view[at : at + head])!r}")
        begin = at + head + len(END)
        at = begin + size
        while filled < at:
            filled += _some(connection, view[filled:])
        bodies.append(view[begin:at])
    return bodies


def _some(connection: socket.socket, room: memoryview) -> int:
    count = connection.recv_into(room)
    if not count:
        raise CannotRun("nginx closed a connection")
    return count
