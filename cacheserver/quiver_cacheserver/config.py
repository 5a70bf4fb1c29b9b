"""The daemon's configuration, validated once: the rest of the daemon relies on it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from quiver.allocation import Policy
from quiver.claims import ANY_RACK
from quiver.errors import BadRequest, Misconfigured
from quiver.layout import SHARD_BYTES_MAX
from quiver.location import Location, shown
from quiver.prepared import prepare
from quiver.ring import REPLICAS_MAX, SOCKET_BYTES_MAX, check_url, usable_socket
from quiver.sizes import format_size, parse_size
from quiver.transport.handoff import is_this_host
from quiver.transport.tls import TlsFiles
from quiver.wire import PORT
from quiver_cacheserver.access.quotas import Quotas
from quiver_cacheserver.allocation.settings import AllocationSettings
from quiver_cacheserver.rack.addresses import ANY_ADDRESS, is_loopback, own_address, parse_endpoints

TLS_FLAGS: Final = ("--tls-ca", "--tls-cert", "--tls-key")
CAPACITY_BYTES_MIN: Final = 64 << 10  # a smaller one is a number without its unit
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


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
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    token_keys: str = ""
    quota: tuple[str, ...] = ()
    policy: str = Policy.MAX_MIN.value
    origin_rate: tuple[str, ...] = ()
    tenants: dict[str, Any] = {}
    insecure: bool = False
    drain_seconds: float = 20.0
    eviction_notice: str = ""
    log_level: str = "info"

    @property
    def capacity_bytes(self) -> int:
        return parse_size(self.capacity)

    @property
    def allocation(self) -> AllocationSettings:
        """What the flags and the file say about allocation. Raises ``Misconfigured``."""
        return AllocationSettings.parse(self.policy, self.tenants, self.origin_rate, self.capacity_bytes)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def authenticates(self) -> bool:
        """Whether callers have to say who they are: by a token, or by a certificate of ``--tls-ca``."""
        return bool(self.token_keys) or self.tls_files is not None

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of TLS, or ``None`` without it. Raises ``Misconfigured`` if some are missing."""
        given = self.tls_ca, self.tls_cert, self.tls_key
        if not any(given):
            return None
        if not all(given):
            flags = f"{', '.join(TLS_FLAGS[:2])} and {TLS_FLAGS[2]}"
            raise Misconfigured(f"{flags} (or QUIVER_TLS_… in the environment) belong together: give all three")
        return TlsFiles(*given, names=TLS_FLAGS)

    @property
    def scheme(self) -> str:
        return "https" if self.tls_files is not None else "http"

    def advertised_url(self, port: int) -> str:
        """Return the URL at which peers reach this daemon, given the port that it was assigned."""
        if self.advertise:
            given = self.advertise if "://" in self.advertise else f"{self.scheme}://{self.advertise}"
            return check_url(given if urlsplit(given).port else f"{given.rstrip('/')}:{port}")
        for peer in self.peers:  # a peer at this port on this machine is this daemon
            parts = urlsplit(check_url(peer))
            if parts.port == port and is_this_host(parts.hostname or ""):
                return check_url(peer)
        host = self.address[0]
        if host in ANY_ADDRESS:
            host = own_address(self._others())
        return check_url(f"{self.scheme}://[{host}]:{port}" if ":" in host else f"{self.scheme}://{host}:{port}")

    def _others(self) -> list[tuple[str, int]]:
        """Return host and port of the peers and of etcd, as far as they are configured."""
        urls = [urlsplit(peer) for peer in self.peers]
        named = [(endpoint.host, endpoint.port) for endpoint in parse_endpoints(self.etcd)] if self.etcd else []
        return named + [(url.hostname or "", url.port or PORT) for url in urls]

    def check_reachable(self) -> None:
        """Raise ``Misconfigured`` if the rack has several machines and this daemon listens only on loopback."""
        if self.advertise or not is_loopback(self.address[0]):
            return
        elsewhere = next((host for host, _ in self._others() if not is_loopback(host)), None)
        if elsewhere is not None:
            raise Misconfigured(
                f"--listen {self.listen} can be reached only from this machine, and {elsewhere.strip('[]')} is"
                f" another one: write --listen 0.0.0.0:{self.address[1] or PORT}"
                " (or --advertise URL, if something forwards to it)"
            )

    def check_authenticates(self, address: str = "") -> None:
        """Raise ``Misconfigured`` if other machines can reach this daemon and it would not ask who they are.

        ``address``: that it listens on; by default as far as the name of the host tells.
        """
        if self.insecure or self.authenticates or is_loopback(address or self.address[0]):
            return
        raise Misconfigured(
            f"--listen {self.listen} can be reached from other machines, and this daemon would answer anyone: give it"
            " --tls-cert, --tls-key and --tls-ca (`quiver tls init`), or --token-keys (`quiver token keygen`), or"
            " --insecure if everyone on that network may read and write the cache"
        )


def check(config: Config) -> Config:
    """Return the configuration; raise ``Misconfigured`` naming the wrong flag and what to write instead."""
    host, colon, port = config.listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise Misconfigured(f"--listen {config.listen!r}: write HOST:PORT, for example 0.0.0.0:{PORT}")
    if not config.data_dir:
        raise Misconfigured("--data-dir is missing: the folder on local SSD for the shards")
    if not config.capacity:
        raise Misconfigured("--capacity is missing: how much of the disk to use, for example 200GiB")
    if config.capacity_bytes < CAPACITY_BYTES_MIN:
        raise Misconfigured(
            f"--capacity {config.capacity} is {format_size(config.capacity_bytes)}, less than one shard: write a unit,"
            " for example 200GiB"
        )
    for flag, name in (("--rack", config.rack), ("--node-id", config.node_id)):
        if not _NAME.fullmatch(name) and (name or flag == "--rack"):
            raise Misconfigured(f"{flag} {name!r}: use up to 64 letters, digits, dots, dashes and underscores")
    if config.etcd and config.peers:
        raise Misconfigured("--etcd and --peers exclude one another: the ring is either kept in etcd or given")
    if config.etcd:
        parse_endpoints(config.etcd)
    for peer in config.peers:
        check_url(peer)
    _check_schemes(config)
    config.check_reachable()
    _check_access(config)
    if not 1 <= config.replicas <= REPLICAS_MAX:
        raise Misconfigured(f"--replicas {config.replicas}: 1 to {REPLICAS_MAX} copies of each shard")
    if config.socket and not usable_socket(config.socket):
        raise Misconfigured(
            f"--socket {config.socket!r}: write an absolute path of at most {SOCKET_BYTES_MAX} printable characters,"
            " for example /run/quiver/socket"
        )
    if config.drain_seconds < 0:
        raise Misconfigured(f"--drain-seconds {config.drain_seconds} is negative")
    if config.eviction_notice:
        check_notice(config.eviction_notice)
    for prefix in config.origin:
        allowed(prefix)
    _ = config.allocation
    del host
    return config


def _check_access(config: Config) -> None:
    """Raise ``Misconfigured`` for settings about who may call that protect less than they seem to."""
    config.check_authenticates()
    if config.token_keys and config.rack == ANY_RACK:
        raise Misconfigured(f"--rack {ANY_RACK}: a token for {ANY_RACK} is accepted by every rack; choose another name")
    if config.quota and not config.token_keys:
        raise Misconfigured("--quota needs --token-keys: a token names the class that it belongs to")
    Quotas.parse(config.quota)


def _check_schemes(config: Config) -> None:
    """Raise ``Misconfigured`` for URLs of daemons that do not speak TLS as this one does, or does not."""
    for flag, url in (("--advertise", config.advertise), *(("--peers", peer) for peer in config.peers)):
        scheme = urlsplit(url).scheme if "://" in url else config.scheme
        if scheme != config.scheme:
            how = "speaks TLS (--tls-cert)" if config.scheme == "https" else "speaks no TLS (--tls-cert is not given)"
            raise Misconfigured(f"{flag} {url}: this daemon {how}: write {config.scheme}://")


def allowed(prefix: str) -> tuple[Location, ...]:
    """Return what an ``--origin`` allows: a folder with all below it. Raises ``Misconfigured``.

    A local folder is allowed by its own name and, if symbolic links lead to it, by that of its target: the operator is
    trusted with links in the prefix.
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


def check_notice(source: str) -> str:
    """Return the source of eviction notices: an absolute path, or a URL. Raises ``Misconfigured``."""
    if "://" not in source:
        if Path(source).is_absolute() and source.isprintable():
            return source
        raise Misconfigured(
            f"--eviction-notice {shown(source)}: write an absolute path, or a URL like http://HOST/PATH"
        )
    try:
        parts = urlsplit(source)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and source.isprintable()
    except ValueError:
        valid = False
    if not valid or "@" in parts.netloc or " " in source:
        raise Misconfigured(
            f"--eviction-notice {shown(source)}: write an absolute path, or a URL like http://HOST/PATH"
        )
    return source


UPLOAD_BYTES_MAX: Final = SHARD_BYTES_MAX * 4  # a shard of one sample may be larger than the shard size


prepare(Config)
