"""Addresses that an operator writes down: where etcd is, and which of this machine's addresses others can reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from quiver.errors import Misconfigured

ANY_ADDRESS: Final = ("0.0.0.0", "::", "")  # noqa: S104  recognised here, not bound to
_OUTSIDE: Final = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))  # for documentation: RFC 5737, 3849


@dataclass(frozen=True)
class EtcdEndpoint:
    """The address of an etcd. Its text form never shows the password."""

    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"etcd at http://{self.host}:{self.port}"


def parse_endpoints(text: str) -> tuple[EtcdEndpoint, ...]:
    """Parse ``http://[USER:PASSWORD@]HOST:PORT``, or several of them separated by commas."""
    endpoints = []
    for url in filter(None, (each.strip() for each in text.split(","))):
        shown = url.rpartition("@")[2][:120]  # what precedes it may be a password
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise Misconfigured(f"--etcd {shown!r} is not the URL of an etcd; write http://HOST:2379") from error
        if parts.scheme == "https":
            raise Misconfigured(f"--etcd {shown!r}: https is not supported; use http://HOST:2379 inside the rack")
        if parts.scheme != "http" or not host or not port or parts.path.strip("/") or parts.query or parts.fragment:
            raise Misconfigured(f"--etcd {shown!r} is not the URL of an etcd; write http://HOST:2379")
        if (parts.username is None) != (parts.password is None):
            raise Misconfigured(f"--etcd {shown!r} needs both a user and a password, or neither")
        user = unquote(parts.username) if parts.username is not None else None
        password = unquote(parts.password) if parts.password is not None else None
        endpoints.append(EtcdEndpoint(f"[{host}]" if ":" in host else host, port, user, password))
    if not endpoints:
        raise Misconfigured("--etcd names no etcd; write http://HOST:2379")
    return tuple(endpoints)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always means the local machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def own_address(towards: Sequence[tuple[str, int]]) -> str:
    """Return the address at which others reach this machine: its source address for traffic to the first of these.

    If all of them are on this machine, the source address for traffic to any other; without one, the loopback address.
    Connecting a datagram socket asks the kernel for the route and sends nothing.
    """
    found = ""
    for host, port in towards:
        found = found or _source_address(host, port)
        if found and not is_loopback(found):
            return found
    for host, family in _OUTSIDE:
        if outward := _source_address(host, 9, family):
            return outward
    return found or socket.gethostname()


def _source_address(host: str, port: int, family: int = 0) -> str:
    try:
        target = socket.getaddrinfo(host.strip("[]"), port, family, socket.SOCK_DGRAM)[0]
        with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
            probe.connect(target[4])
            return str(probe.getsockname()[0])
    except OSError:
        return ""
