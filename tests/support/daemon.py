"""Real daemons in processes of their own: started on free ports, awaited by their log, and always ended.

Most are forked from a server that has imported all that a daemon imports (``tests.support.forking``), which saves each
a second of CPU; they still run the command's ``main`` with its arguments. ``FreshDaemon`` is for tests that depend
on how an interpreter starts, ends, or allocates memory.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from quiver.transport.tls import Credentials
from tests.support.etcd import free_ports
from tests.support.forking import FORKED
from tests.support.waiting import until

START_SECONDS_MAX: Final = 30.0
END_SECONDS_MAX: Final = 40.0
_SERVES = re.compile(r"serves rack (\S+) at (\S+)")


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("QUIVER_")}


class Process:
    """A forked daemon, whose log goes to ``stderr``; with the interface of ``subprocess.Popen``."""

    def __init__(self, arguments: list[str], environment: dict[str, str], serve: Callable[..., None]) -> None:
        self.stderr: IO[str]
        reading, writing = os.pipe()
        self.stderr = os.fdopen(reading)
        self._process = FORKED.Process(target=serve, args=(DupFd(writing), arguments, environment))
        self._process.start()
        os.close(writing)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        assert self._process.exitcode is not None, "the daemon does not end"
        return self._process.exitcode


def serve(stderr: Any, arguments: list[str], environment: dict[str, str]) -> None:
    fd = stderr.detach()
    os.dup2(fd, 2)
    os.close(fd)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["quiver-cacheserver", *arguments]
    from quiver_cacheserver.cli import main

    main()


def serve_patiently(stderr: Any, arguments: list[str], environment: dict[str, str]) -> None:
    """Serve, and take no peer for dead because the machine that runs the test is busy: that would read the origin."""
    from quiver_cacheserver.rack import peers

    vars(peers)["PATIENCE"] = peers.PATIENCE._replace(silence_seconds=30.0, suspect_seconds=10.0, alive_seconds=10.0)
    serve(stderr, arguments, environment)


class Daemon:
    """One daemon process. Entering waits until it serves; leaving kills it if it still runs."""

    fresh = False
    serve: Callable[..., None] = staticmethod(serve)
    """What the forked process runs. A test may alter the daemon's modules there before it calls ``serve``."""

    def __init__(
        self,
        data_dir: Path,
        *flags: str,
        origins: Sequence[Path | str] = (),
        capacity: str = "1GiB",
        port: int = 0,
        environment: dict[str, str] | None = None,
        tls: Credentials | None = None,
        token: str = "",
    ) -> None:
        """``tls``: with which to ask a daemon that speaks TLS. ``token``: what to send one that requires a token."""
        self.data_dir = data_dir
        self.tls = tls
        self.token = token
        self.lines: list[str] = []
        self._url = ""
        self._serving = threading.Event()
        self._command = [
            *(sys.executable, "-m", "quiver_cacheserver.cli", "--listen", f"127.0.0.1:{port}"),
            *("--data-dir", str(data_dir), "--capacity", capacity),
            *(part for origin in origins for part in ("--origin", str(origin))),
            *flags,
        ]
        self._environment = {**clean_environment(), **(environment or {})}
        self.process: subprocess.Popen[str] | Process | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_serving()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def start(self) -> None:
        self._serving.clear()
        process: subprocess.Popen[str] | Process
        if self.fresh:
            process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=self._environment)
        else:
            process = Process(self._command[3:], self._environment, self.serve)
        self.process = process
        self._reader = threading.Thread(target=self._read, args=(process,))
        self._reader.start()

    def wait_until_serving(self) -> None:
        assert self._serving.wait(START_SECONDS_MAX), f"the daemon does not start: {self.log}"
        assert self._url, f"the daemon ended: {self.log}"

    def _read(self, process: subprocess.Popen[str] | Process) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self.lines.append(line)
                if serves := _SERVES.search(line):
                    self._url = serves[2]
                    self._serving.set()
        self._serving.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        assert self._url
        return self._url

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Return the exit status."""
        assert self.process is not None
        assert self._reader is not None
        code = self.process.wait(END_SECONDS_MAX)
        self._reader.join(END_SECONDS_MAX)
        return code

    def stop(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        if self.process is not None:
            self.wait()

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers (lower-case names)."""
        connection = (
            http.client.HTTPConnection(*self.address, timeout=30)
            if self.tls is None
            else http.client.HTTPSConnection(*self.address, timeout=30, context=self.tls.client())
        )
        own = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            connection.request(method, path, body=body, headers={**own, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, body, _ = self.ask("GET", path)
        assert status == 200, body
        return json.loads(body)

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = self.json("/v1/status")
        return told

    def metric(self, name: str) -> float:
        """Return a metric, summed over its labels."""
        _, body, _ = self.ask("GET", "/metrics")
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", body.decode(), re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(float(value) for value in found)

    def files(self, kind: str = "shards") -> list[Path]:
        return sorted(path for path in (self.data_dir / kind).rglob("*") if path.is_file())


class FreshDaemon(Daemon):
    """A daemon in an interpreter of its own, as an operator starts it."""

    fresh = True


class Patient(Daemon):
    """A daemon that waits for its peers as long as they take: for tests that count what is read from the origin."""

    serve = staticmethod(serve_patiently)


@contextlib.contextmanager
def rack_of(
    count: int, where: Path, *flags: str, make: Callable[..., Daemon] = Daemon, **more: Any
) -> Iterator[list[Daemon]]:
    """Run a rack with a static ring (``--peers``)."""
    ports = free_ports(count)
    peers = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    daemons = [make(where / f"node{port}", "--peers", peers, *flags, port=port, **more) for port in ports]
    try:
        for daemon in daemons:
            daemon.start()
        for daemon in daemons:
            daemon.wait_until_serving()
        yield daemons
    finally:
        for daemon in daemons:
            daemon.kill()


def until_ready(daemon: Daemon) -> None:
    until(lambda: daemon.ask("GET", "/readyz")[0] == 200)
