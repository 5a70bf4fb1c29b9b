"""The daemon's configuration, checked once: everything behind it may rely on what stands here."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from quiver.errors import BadRequest, Misconfigured
from quiver.handoff import is_this_host
from quiver.layout import SHARD_BYTES_MAX
from quiver.location import Location, shown
from quiver.ring import SOCKET_BYTES_MAX, check_url, usable_socket
from quiver.sizes import parse_size
from quiver.wire import PORT

REPLICAS_MAX: Final = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
ANY_ADDRESS: Final = ("0.0.0.0", "::", "")  # noqa: S104  recognised here, not bound to


class Config(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True, kw_only=True):
    """What an operator sets: each field is a flag, a ``QUIVER_*`` variable and a key of the TOML file."""

    listen: str = f"127.0.0.1:{PORT}"
    advertise: str = ""
    data_dir: str = ""
    capacity: str = ""
    rack: str = "default"
    node_id: str = ""
    etcd: str = ""
    peers: tuple[str, ...] = ()
    origin: tuple[str, ...] = ()
    replicas: int = 1
    socket: str = ""
    drain_seconds: float = 20.0
    log_level: str = "info"

    @property
    def capacity_bytes(self) -> int:
        return parse_size(self.capacity)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    def advertised_url(self, port: int) -> str:
        """Return the URL under which neighbours reach this daemon, given the port that it got."""
        if self.advertise:
            given = self.advertise if "://" in self.advertise else f"http://{self.advertise}"
            return check_url(given if urlsplit(given).port else f"{given.rstrip('/')}:{port}")
        for peer in self.peers:  # a peer with this port whose host is this machine is this daemon
            parts = urlsplit(check_url(peer))
            if parts.port == port and is_this_host(parts.hostname or ""):
                return check_url(peer)
        host = self.address[0]
        if host in ANY_ADDRESS:
            host = _own_address(self.etcd or next(iter(self.peers), ""))
        return check_url(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def check(config: Config) -> Config:
    """Return the configuration; raise ``Misconfigured`` naming the flag that is wrong and what to write."""
    host, colon, port = config.listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise Misconfigured(f"--listen {config.listen!r}: write HOST:PORT, for example 0.0.0.0:{PORT}")
    if not config.data_dir:
        raise Misconfigured("--data-dir is missing: the folder on local SSD that the shards go to")
    if not config.capacity:
        raise Misconfigured("--capacity is missing: how much of the disk to use, for example 200GiB")
    parse_size(config.capacity)
    for flag, name in (("--rack", config.rack), ("--node-id", config.node_id)):
        if not _NAME.fullmatch(name) and (name or flag == "--rack"):
            raise Misconfigured(f"{flag} {name!r}: use up to 64 letters, digits, dots, dashes and underscores")
    if config.etcd and config.peers:
        raise Misconfigured("--etcd and --peers exclude one another: a ring is kept in etcd, or it is given")
    if config.etcd and (urlsplit(config.etcd).scheme not in ("http", "https") or not urlsplit(config.etcd).hostname):
        raise Misconfigured("--etcd: write http://HOST:2379")
    for peer in config.peers:
        check_url(peer)
    if not 1 <= config.replicas <= REPLICAS_MAX:
        raise Misconfigured(f"--replicas {config.replicas}: 1 to {REPLICAS_MAX} copies of each shard")
    if config.socket and not usable_socket(config.socket):
        raise Misconfigured(
            f"--socket {config.socket!r}: write an absolute path of at most {SOCKET_BYTES_MAX} printable characters,"
            " for example /run/quiver/socket"
        )
    if config.drain_seconds < 0:
        raise Misconfigured(f"--drain-seconds {config.drain_seconds} is negative")
    for prefix in config.origin:
        allowed(prefix)
    del host
    return config


def allowed(prefix: str) -> tuple[Location, ...]:
    """Return what an ``--origin`` allows: a folder with all below it. Raises ``Misconfigured``.

    A local one is allowed under its own name and, where links lead to it, under that of its target: links on the way
    to it are the operator's.
    """
    try:
        if "://" in prefix:
            location = Location.parse(prefix)
        elif Path(prefix).is_absolute():
            location = Location.folder("/" + os.path.normpath(prefix).lstrip("/"))
        else:
            raise BadRequest(f"{shown(prefix)}: a local origin is an absolute path; others begin with s3://, https://")
        if location.scheme != "file":
            return (location,)
        return tuple(dict.fromkeys([location, Location.folder(os.path.realpath(location.path))]))
    except BadRequest as error:
        raise Misconfigured(f"--origin: {error}") from error


def _own_address(towards: str) -> str:
    """Return this machine's address on the way to ``towards`` (a URL), or its name. Sends nothing."""
    parts = urlsplit(towards)
    if parts.hostname:
        try:
            family = socket.getaddrinfo(parts.hostname, parts.port or 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
                probe.connect(family[4])
                return str(probe.getsockname()[0])
        except OSError:
            pass
    return socket.gethostname()


UPLOAD_BYTES_MAX: Final = SHARD_BYTES_MAX * 4  # a shard of one sample may be larger than the shard size
