"""Facts about the machine and the moment of a measurement, without which its figures cannot be read."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from quiver_client import native

ROOT = Path(__file__).parents[1]


def facts() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _line("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_kib": int(_line("/proc/meminfo", "MemTotal").split()[0]),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "native": native.pieces is not None,
        "load_average": list(os.getloadavg()),
        "commit": _told("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "changed": bool(_told("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")),
        "programs": {name: _version(name) for name in ("memcached", "redis-server", "nginx")},
        "packages": {
            found.name: found.version for found in sorted(metadata.distributions(), key=lambda one: one.name.lower())
        },
    }


def _line(path: str, name: str) -> str:
    """Return the value of the first line ``name : value``."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return "0"


def _version(name: str) -> str:
    return _told(name, "-v" if name == "nginx" else "--version")


def _told(*command: str) -> str:
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
    with contextlib.suppress(OSError):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}, timeout=20
        )
        return (done.stdout or done.stderr).strip()
    return ""
