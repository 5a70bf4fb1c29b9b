"""Three Redis servers, read by ``MGET``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from bench.measure import Batch
from bench.peers.ahead import ahead
from bench.peers.base import Peer
from bench.servers import LOOPBACK, SERVERS, CannotRun, Server, free_ports, program


class Redis(Peer):
    """One ``MGET`` per server and batch; all are sent before an answer is read. redis-py with hiredis."""

    name = "redis"
    extra = "bench-redis"
    packages = ("redis", "hiredis")
    programs = ("redis-server",)
    ways = ("plain", "fetching ahead")
    settings = "three servers, nothing saved to disk, redis-py's connections with the hiredis parser, RESP2"

    def prepare(self) -> None:
        import redis

        self.work.folder.mkdir(parents=True, exist_ok=True)
        self._servers, self._connections = [], []
        for port in free_ports(SERVERS):
            command = [
                program("redis-server"),
                "--port",
                str(port),
                "--bind",
                LOOPBACK,
                "--save",
                "",
                "--appendonly",
                "no",
            ]
            command += ["--dir", str(self.work.folder), "--daemonize", "no", "--client-output-buffer-limit"]
            command += ["normal", "0", "0", "0"]
            server = self.closing.enter_context(Server(command, self.work.folder / f"redis{port}.log"))
            server.wait_for_port(port)
            self._servers.append(server)
            self._connections.append(redis.Connection(host=LOOPBACK, port=port, socket_read_size=1 << 20))
        self._batches = self.data.batches(self.work.batch_size)
        for number in self.data.order.tolist():
            connection = self._connections[number % SERVERS]
            connection.send_command("SET", number, self.data.sample(number))
            if connection.read_response() != b"OK":
                raise CannotRun("Redis did not store all of the data")

    def batches(self, way: str) -> Iterable[Batch]:
        plain = self._plain()
        return ahead(plain) if way == "fetching ahead" else plain

    def server_pids(self) -> list[int]:
        return [server.pid for server in self._servers]

    def close(self) -> None:
        for connection in self._connections:
            connection.disconnect()
        super().close()

    def _plain(self) -> Iterator[Batch]:
        for batch in self._batches:
            asked = [[number for number in batch if number % SERVERS == at] for at in range(SERVERS)]
            for connection, numbers in zip(self._connections, asked, strict=True):
                if numbers:
                    connection.send_command("MGET", *numbers)
            found: dict[int, Any] = {}
            for connection, numbers in zip(self._connections, asked, strict=True):
                if numbers:
                    found.update(zip(numbers, connection.read_response(), strict=True))
            yield [found[number] for number in batch]
