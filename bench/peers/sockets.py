"""The machine's limit between processes: ``sendfile`` (or ``writev``) → ``recv_into``, over TCP, and nothing else.

Three server processes map or open the same file; the client requests a third of a batch's samples from each, by one
message of ranges over one connection, and each answers with their bytes back to back.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.measure import Batch
from bench.peers.ahead import ahead
from bench.peers.base import Peer
from bench.servers import LOOPBACK, SERVERS

IOVECS_MAX: Final = 1024
_COUNT: Final = struct.Struct("<I")


class Sockets(Peer):
    """One ``recv_into`` buffer per server and batch, handed out as views in the requested order.

    If all samples have one size, the three buffers are handed out whole, in the order of the servers.
    """

    name = "sockets"
    ways = ("sendfile", "writev", "sendfile, fetching ahead", "writev, fetching ahead")
    settings = "three processes, one connection each; every request of a batch is sent before an answer is read"

    def prepare(self) -> None:
        context = multiprocessing.get_context("fork")
        self._processes = []
        self._connections: dict[str, list[socket.socket]] = {"sendfile": [], "writev": []}
        listeners = [(way, socket.create_server((LOOPBACK, 0))) for way in self._connections for _ in range(SERVERS)]
        for way, listener in listeners:
            process = context.Process(target=_serve, args=(listener, self.data.blob, way), daemon=True)
            process.start()
            self._processes.append(process)
            connection = socket.create_connection(listener.getsockname())
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[way].append(connection)
        for _, listener in listeners:
            listener.close()
        self._requests = [self._request(batch) for batch in self.data.batches(self.work.batch_size)]

    def batches(self, way: str) -> Iterable[Batch]:
        how, _, fetching = way.partition(", ")
        plain = self._plain(self._connections[how])
        return ahead(plain) if fetching else plain

    def server_pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        for connection in (one for connections in self._connections.values() for one in connections):
            connection.close()  # which ends the server
        for process in self._processes:
            process.join(10)
        super().close()

    def _request(self, batch: list[int]) -> tuple[list[bytes], list[int], list[tuple[int, int, int]]]:
        """Return a message a server, the bytes that it will answer, and of each sample: server, begin and end there."""
        asked: list[list[tuple[int, int]]] = [[] for _ in range(SERVERS)]
        sizes = [0] * SERVERS
        places = []
        for number in batch:
            server, (begin, end) = number % SERVERS, self.data.offsets[number : number + 2].tolist()
            asked[server].append((begin, end - begin))
            places.append((server, sizes[server], sizes[server] + end - begin))
            sizes[server] += end - begin
        messages = [_COUNT.pack(len(ranges)) + np.array(ranges, np.int64).tobytes() for ranges in asked]
        return messages, sizes, places

    def _plain(self, connections: list[socket.socket]) -> Iterator[Batch]:
        whole = self.data.kind == "tokens"
        for messages, sizes, places in self._requests:
            for connection, message in zip(connections, messages, strict=True):
                connection.sendall(message)
            buffers = [np.empty(size, np.uint8).data for size in sizes]
            for connection, buffer in zip(connections, buffers, strict=True):
                _fill(connection, buffer)
            yield buffers if whole else [buffers[server][begin:end] for server, begin, end in places]


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("a raw server ended")
        buffer = buffer[count:]


def _serve(listener: socket.socket, path: Path, way: str) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = memoryview(bytearray(_COUNT.size))
    with connection, path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        while connection.recv_into(head, 0, socket.MSG_WAITALL):
            ranges = np.empty((_COUNT.unpack(head)[0], 2), np.int64)
            if len(ranges):
                _fill(connection, ranges.reshape(-1).view(np.uint8).data)
            if way == "sendfile":
                _send_file(connection, file.fileno(), ranges.tolist())
            else:
                _send_slices(connection, [view[begin : begin + size] for begin, size in ranges.tolist()])
    os._exit(0)  # a fork of a process with libraries that would end themselves at length


def _send_file(connection: socket.socket, file: int, ranges: list[list[int]]) -> None:
    out = connection.fileno()
    for begin, size in ranges:
        while size:
            count = os.sendfile(out, file, begin, size)
            begin, size = begin + count, size - count


def _send_slices(connection: socket.socket, slices: list[Any]) -> None:
    while slices:
        count = connection.sendmsg(slices[:IOVECS_MAX])
        done = 0
        while done < len(slices) and count >= len(slices[done]):
            count -= len(slices[done])
            done += 1
        slices = slices[done:]
        if count:
            slices[0] = slices[0][count:]
