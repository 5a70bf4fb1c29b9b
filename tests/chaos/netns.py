"""Machines of their own, as network namespaces joined by a bridge: a cut link loses packets, as a real partition does.

A proxy can refuse, reset or hang; only a lost link makes ``connect`` hang and ends connections without a word. It needs
root and the permission of the kernel: ``why_not`` says why it cannot be had.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Final, Self

PREFIX: Final = "10.213.77."


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Return why namespaces cannot be used here, "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "the command ip is not installed"
    try:
        with Machines(1):
            return ""
    except OSError as error:
        return f"network namespaces are not allowed here: {error}"


class Machines:
    """``count`` machines with an address each, and a bridge that this process can reach them by."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._tag = f"qv{os.getpid() % 100_000}"
        self._made: list[tuple[str, ...]] = []

    def name(self, number: int) -> str:
        return f"{self._tag}n{number}"

    def address(self, number: int) -> str:
        return f"{PREFIX}{number + 10}"

    @property
    def own_address(self) -> str:
        return f"{PREFIX}1"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def _make(self) -> None:
        bridge = f"{self._tag}b"
        self._do(("ip", "link", "add", bridge, "type", "bridge"), ("ip", "link", "del", bridge))
        _run("ip", "addr", "add", f"{self.own_address}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for number in range(self.count):
            name, outer = self.name(number), f"{self._tag}v{number}"
            self._do(("ip", "netns", "add", name), ("ip", "netns", "del", name))
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")

    def _do(self, make: tuple[str, ...], undo: tuple[str, ...]) -> None:
        _run(*make)
        self._made.append(undo)

    def _remove(self) -> None:
        while self._made:
            subprocess.run(self._made.pop(), capture_output=True, timeout=20, check=False)

    def inside(self, number: int, command: list[str]) -> list[str]:
        """Return the command that runs another one on a machine."""
        return ["ip", "netns", "exec", self.name(number), *command]

    def cut(self, number: int) -> None:
        """Take the machine off the network, without a word to anybody."""
        _run("ip", "link", "set", f"{self._tag}v{number}", "down")

    def join(self, number: int) -> None:
        _run("ip", "link", "set", f"{self._tag}v{number}", "up")
