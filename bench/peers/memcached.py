"""Three memcached servers, read by ``get_multi``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.measure import Batch
from bench.peers.ahead import ahead
from bench.peers.base import Peer
from bench.servers import LOOPBACK, SERVERS, CannotRun, Server, free_ports, program

ITEM_BYTES_MAX = 8 << 20
# A slab item may be a quarter larger than its content; and the two clients disagree on which server a key
# belongs to, so that two thirds of the data are stored twice.
ROOM = 2.6  # memory ÷ data
GetMulti = Callable[[list[str]], dict[str, bytes]]


class Memcached(Peer):
    """The faster of two C clients, with the text or binary protocol, with or without a thread that fetches ahead."""

    name = "memcached"
    extra = "bench-memcached"
    packages = ("pylibmc", "libmc")
    programs = ("memcached",)
    ways = (
        "pylibmc, text",
        "pylibmc, binary",
        "libmc",
        "pylibmc, text, fetching ahead",
        "pylibmc, binary, fetching ahead",
        "libmc, fetching ahead",
    )
    settings = "three servers of one thread each, no eviction, TCP_NODELAY, no compression, one get_multi per batch"

    def prepare(self) -> None:
        import pylibmc

        self.work.folder.mkdir(parents=True, exist_ok=True)
        room = int(self.data.total_bytes * ROOM / SERVERS) + (512 << 20)
        self._servers, self._ports = [], free_ports(SERVERS)
        for port in self._ports:
            command = [program("memcached"), "-l", LOOPBACK, "-p", str(port), "-U", "0", "-u", "root", "-t", "1"]
            command += ["-m", str(room >> 20), "-I", str(ITEM_BYTES_MAX), "-M", "-R", "1000"]
            server = self.closing.enter_context(Server(command, self.work.folder / f"memcached{port}.log"))
            self._servers.append(server)
        for server, port in zip(self._servers, self._ports, strict=True):
            server.wait_for_port(port)
        behaviours = {"tcp_nodelay": True, "no_block": False, "ketama": False}
        addresses = [f"{LOOPBACK}:{port}" for port in self._ports]
        self._text = pylibmc.Client(addresses, binary=False, behaviors=behaviours)
        self._binary = pylibmc.Client(addresses, binary=True, behaviors=behaviours)
        self._batches = self.data.batches(self.work.batch_size)
        self._libmc = _libmc(addresses)
        for number in self.data.order.tolist():
            key, content = str(number), self.data.sample(number)
            if not self._text.set(key, content) or not self._libmc.set(key, content):
                raise CannotRun("memcached did not store all of the data")

    def batches(self, way: str) -> Iterable[Batch]:
        client, _, rest = way.partition(", ")
        get: GetMulti
        if client == "libmc":
            get = self._libmc.get_multi
        else:
            get = self._binary.get_multi if rest.startswith("binary") else self._text.get_multi
        plain = self._plain(get)
        return ahead(plain) if way.endswith("ahead") else plain

    def server_pids(self) -> list[int]:
        return [server.pid for server in self._servers]

    def _plain(self, get: GetMulti) -> Iterator[Batch]:
        for batch in self._batches:
            keys = [str(number) for number in batch]
            found = get(keys)
            if len(found) != len(keys):
                raise CannotRun(f"memcached returned {len(found)} of {len(keys)} samples")
            yield [found[key] for key in keys]


def _libmc(addresses: list[str]) -> Any:
    import libmc

    client = libmc.Client(addresses, do_split=False, comp_threshold=0, noreply=False, hash_fn=libmc.MC_HASH_FNV1A_32)
    client.config(libmc.MC_POLL_TIMEOUT, 10_000)
    client.config(libmc.MC_RETRY_TIMEOUT, 1)
    return client
