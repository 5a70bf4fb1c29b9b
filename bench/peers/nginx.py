"""nginx in front of a folder of files, one request per sample over persistent connections."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from bench.measure import Batch
from bench.peers.ahead import ahead
from bench.peers.base import Peer, Work
from bench.servers import LOOPBACK, CannotRun, Server, free_ports, program

CONFIGURATION: Final = """
daemon off;
user root;
worker_processes 3;
worker_rlimit_nofile 262144;
pid {folder}/pid;
error_log {folder}/errors;
events {{ worker_connections 1024; }}
http {{
    access_log off;
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
    server {{ listen {sendfile}; root {root}; sendfile on; }}
    server {{ listen {buffers}; root {root}; sendfile off; output_buffers 2 256k; }}
}}
"""
HEAD_BYTES_MAX: Final = 512
END: Final = b"\r\n\r\n"


class Nginx(Peer):
    """A client on raw sockets pipelines requests over several connections and copies nothing.

    It is the fastest client in Python: http.client and pycurl parse each answer and copy its body.
    """

    name = "nginx"
    programs = ("nginx",)
    ways = (
        "sendfile, 3 connections",
        "buffers, 3 connections",
        "sendfile, 8 connections, fetching ahead",
        "buffers, 8 connections, fetching ahead",
    )
    # tcp_nopush is off: with it nginx sends a partial packet between any two answers of a pipeline.
    settings = (
        "three workers, open_file_cache over all files; pipelined GETs, one per sample; output buffers of 256 KiB"
    )

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._connections: dict[str, list[socket.socket]] = {}

    def prepare(self) -> None:
        folder = self.work.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._ports = dict(zip(("sendfile", "buffers"), free_ports(2), strict=True))
        addresses = {how: f"{LOOPBACK}:{port}" for how, port in self._ports.items()}
        configuration = folder / "nginx.conf"
        root = self.data.files()
        configuration.write_text(CONFIGURATION.format(folder=folder, root=root, **addresses))
        command = [program("nginx"), "-p", str(folder), "-c", str(configuration), "-e", str(folder / "errors")]
        self._server = self.closing.enter_context(Server(command, folder / "log"))
        self._server.wait_for_port(self._ports["sendfile"])
        sizes = np.diff(self.data.offsets).tolist()
        self._batches = [
            [(self._get(number), sizes[number]) for number in batch]
            for batch in self.data.batches(self.work.batch_size)
        ]
        self._connections = {how: [] for how in self._ports}

    def batches(self, way: str) -> Iterable[Batch]:
        how, _, rest = way.partition(", ")
        connections, count = self._connections[how], int(rest.partition(" ")[0])
        while len(connections) < count:
            connection = socket.create_connection((LOOPBACK, self._ports[how]))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections.append(connection)
        plain = self._plain(connections[:count])
        return ahead(plain) if way.endswith("ahead") else plain

    def server_pids(self) -> list[int]:
        return [self._server.pid]

    def close(self) -> None:
        for connection in (one for connections in self._connections.values() for one in connections):
            connection.close()
        super().close()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._ports['sendfile']}/"

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
