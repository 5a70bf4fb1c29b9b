"""A rack to inject faults into: real daemons and etcd as processes, each behind a proxy, a scripted origin, clients.

    with ChaosRack(tmp_path, files, Plan(daemons=3, seed=seed)) as rack:
        with rack.client(epochs=2) as client: ...
        rack.check(client.wait())

Daemons are known by the addresses of their proxies. ``check`` runs the validators that hold under any fault.
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from tests.chaos import validators
from tests.chaos.history import Client, History, Job
from tests.chaos.origin import ChaosOrigin, chaos_origin
from tests.chaos.proxy import Network, Proxy
from tests.support.daemon import Daemon, serve
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.etcd import Etcd
from tests.support.waiting import until

NOBODY: Final = "http://127.0.0.1:1"  # behind a proxy until its daemon serves, at a port of the kernel's choice
TTL_SECONDS: Final = 2.0
"""Of the leases of daemons in a chaos rack: 10 s in life, and with 2 s tests of three TTLs take a fifth of the time."""


def samples(count: int = 240, *, seed: int = 5, low: int = 6_000, high: int = 8_000) -> dict[str, bytes]:
    """Return content whose names are those of a flat folder."""
    content = random_files(count, seed=seed, low=low, high=high)
    return {f"{serial:05}.bin": data for serial, data in enumerate(content.values())}


def chaos_files(where: Path, count: int = 240, *, seed: int = 5, shard_bytes: str = "64KiB", **more: Any) -> Files:
    """Return a dataset of ``count`` samples in about ``count / 8`` shards."""
    return make_files(where, samples(count, seed=seed, **more), shard_bytes=shard_bytes, layout="mixed")


@dataclass(frozen=True)
class Plan:
    """What a rack is made of."""

    daemons: int = 3
    seed: int = 1
    etcd: bool = False
    ttl_seconds: float = TTL_SECONDS
    capacity: str = "1GiB"
    s3: bool = False
    may_read_origin: bool = True
    etcd_runs: bool = True  # when the daemons start
    sockets: bool = False  # daemons pass open files to readers on this host
    rings: tuple[tuple[int, ...], ...] = ()  # without etcd: whom each daemon believes to be in the rack; () is all
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def _serve_with_ttl(ttl_seconds: float, stderr: Any, arguments: list[str], environment: dict[str, str]) -> None:
    from quiver_cacheserver import serve as module
    from quiver_cacheserver.rack.etcd_registry import EtcdRegistry

    vars(module)["EtcdRegistry"] = functools.partial(EtcdRegistry, ttl_seconds=ttl_seconds)
    serve(stderr, arguments, environment)


class ChaosDaemon(Daemon):
    """A daemon whose lease has the TTL of the plan."""

    def __init__(self, plan: Plan, data_dir: Path, *flags: str, **more: Any) -> None:
        super().__init__(data_dir, *plan.flags, *flags, capacity=plan.capacity, environment=plan.environment, **more)
        self.serve = functools.partial(_serve_with_ttl, plan.ttl_seconds)
        self._port = 0

    def wait_until_serving(self) -> None:
        super().wait_until_serving()
        assert self.process is not None
        listening = psutil.Process(self.process.pid).net_connections("tcp4")
        [self._port] = {each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN}

    @property
    def address(self) -> tuple[str, int]:
        """Its own, which the kernel chose: what a test asks does not go through the proxy."""
        return "127.0.0.1", self._port

    @property
    def own_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


class ChaosRack:
    """A rack to break. ``files`` is the dataset on local disk; clients and daemons read it from ``origin``."""

    def __init__(self, where: Path, files: Files, plan: Plan) -> None:
        self.where, self.plan = where, plan
        self.local = files
        self.network = Network(plan.seed)
        self.daemons: list[ChaosDaemon] = []
        self.proxies: list[Proxy] = []
        self.clients: list[Client] = []
        self._ended: set[int] = set()  # daemons that the test ended
        self.etcd: Etcd | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        where, plan = self.where, self.plan
        where.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.network)
            self.origin: ChaosOrigin = stack.enter_context(chaos_origin(self.local.folder, plan.seed, s3=plan.s3))
            self.origin_proxy = self.network.proxy("origin", self.origin.endpoint)
            self.origin.endpoint = self.origin_proxy.url
            self.files = rebased(self.local, self.origin.base, where / "remote.quiver")
            self.manifest = self.files.opened()
            if plan.etcd:
                self.etcd = stack.enter_context(Etcd())
                self.etcd_proxy = self.network.proxy("etcd", self.etcd.url)
                if not plan.etcd_runs:
                    self.etcd.stop()
            stack.callback(self._kill_all)
            for number in range(plan.daemons):
                self.proxies.append(self.network.proxy(f"node{number}", NOBODY))
            for number in range(plan.daemons):
                self.daemons.append(self._daemon(number))
            for daemon in self.daemons:
                daemon.start()
            for number in range(plan.daemons):
                self._until_serving(number)
            if plan.etcd and plan.etcd_runs:
                self.until_ring_has(plan.daemons)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for client in self.clients:
            client.kill()
        self._stack.close()

    def _daemon(self, number: int) -> ChaosDaemon:
        believed = self.plan.rings[number] if self.plan.rings else range(self.plan.daemons)
        ring = (
            ("--etcd", self.etcd_proxy.url, "--node-id", f"node{number}")
            if self.plan.etcd
            else ("--peers", ",".join(self.proxies[each].url for each in believed))
        )
        if self.plan.sockets:
            ring = (*ring, "--socket", str(self.where / f"node{number}.sock"))
        own = self.proxies[number].url
        origins = [self.origin.base] if self.plan.may_read_origin else []
        daemon = ChaosDaemon(self.plan, self.where / f"node{number}", *ring, "--advertise", own, origins=origins)
        daemon._environment.update(self.origin.environment)
        return daemon

    def _kill_all(self) -> None:
        for daemon in self.daemons:
            daemon.kill()

    @property
    def cache(self) -> str:
        """The ``cache=`` of a client."""
        return ",".join(proxy.url for proxy in self.proxies)

    # -- daemons ------------------------------------------------------------------------------------------------------

    def kill(self, number: int) -> None:
        """Kill a daemon (-9). Its address refuses connections, as that of a dead process does."""
        self._ended.add(number)
        self.daemons[number].kill()
        self.proxies[number].refuse()

    def stop(self, number: int) -> int:
        """End a daemon in order; return its exit status."""
        self._ended.add(number)
        status = self.daemons[number].stop()
        self.proxies[number].refuse()
        return status

    def restart(self, number: int) -> None:
        """Start a daemon that ended, at the same address and folder."""
        self.proxies[number].listen()
        self.daemons[number].start()
        self._until_serving(number)

    def _until_serving(self, number: int) -> None:
        self.daemons[number].wait_until_serving()
        self.proxies[number].retarget(self.daemons[number].own_url)
        self._ended.discard(number)

    def freeze(self, number: int) -> None:
        self.daemons[number].signal(signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        self.daemons[number].signal(signal.SIGCONT)

    def alive(self) -> list[ChaosDaemon]:
        return [daemon for daemon in self.daemons if daemon.process is not None and daemon.process.poll() is None]

    def until_ring_has(self, count: int, seconds: float = 30.0) -> None:
        """Wait until every daemon that runs knows a ring of so many members."""
        until(
            lambda: all(daemon.metric("quiver_ring_members") == count for daemon in self.alive()),
            seconds,
            f"a ring of {count}: {[daemon.metric('quiver_ring_members') for daemon in self.alive()]}",
        )

    def metric(self, name: str) -> float:
        """Return a metric, summed over the daemons that run."""
        return sum(daemon.metric(name) for daemon in self.alive())

    # -- clients ------------------------------------------------------------------------------------------------------

    def job(self, name: str = "", **more: Any) -> Job:
        environment = {**self.origin.environment, **more.pop("environment", {})}
        cache = more.pop("cache", self.cache)
        name = name or f"job{len(self.clients)}"
        return Job(name, str(self.files.manifest), cache, environment=environment, **more)

    def client(self, name: str = "", **more: Any) -> Client:
        """Start a client. It is killed when the rack is left, if it still runs."""
        made = Client(self.job(name, **more), self.where)
        self.clients.append(made)
        return made

    # -- the oracle ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def expected(self) -> validators.Expected:
        return validators.Expected.of(self.manifest, self.local.content)

    def check(self, *histories: History, wait_seconds: float = 60.0, errors: bool = False) -> None:
        """Check what clients were given, the daemons and the logs: everything that holds under any fault."""
        for history in histories:
            validators.digests_are_right(history, self.expected)
            validators.epochs_are_exact([history], self.expected)
            validators.no_wait_exceeds(history, wait_seconds)
            validators.client_leaks_nothing(history)
            if not errors:
                validators.has_no_error(history)
        validators.no_daemon_died({n: daemon for n, daemon in enumerate(self.daemons) if n not in self._ended})
        self.check_logs(*histories)

    def check_logs(self, *histories: History) -> None:
        logs = {f"node{number}": daemon.log for number, daemon in enumerate(self.daemons)}
        logs |= {history.job.name: history.log for history in histories}
        secrets = [value for name, value in self.origin.environment.items() if "SECRET" in name]
        for name, log in logs.items():
            validators.log_is_clean(name, log, self.expected, secrets)

    def reads_per_shard(self) -> tuple[float, float]:
        """Return origin reads per shard: the mean, and that of the worst shard."""
        reads = self.origin.reads_per_shard(self.manifest)
        return sum(reads.values()) / len(reads), max(reads.values())

    def objects_of(self, shards: Iterable[int]) -> set[str]:
        """Return the origin's objects of these shards."""
        wanted = {int(blob) for shard in shards for blob in self.manifest.shard_blobs(shard)}
        blobs = self.manifest.tables.blob_of.tolist()
        return {self.manifest.key(row) for row, blob in enumerate(blobs) if blob in wanted}

    def leaks(self) -> validators.Leaks:
        """Note what the daemons hold now; call ``check`` of the result when the fault is over."""
        return validators.Leaks(self.alive())
