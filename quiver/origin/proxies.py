"""Where requests to a web server go: to its own address, or to a proxy that the environment names."""

from __future__ import annotations

import base64
import urllib.request
from urllib.parse import unquote, urlsplit

from quiver.location import Location


def address_of(location: Location) -> tuple[str, int]:
    """Return host and port."""
    host, colon, port = location.authority.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = location.authority, "443" if location.scheme == "https" else "80"
    return host.strip("[]"), int(port)


def proxy_for(location: Location) -> tuple[tuple[str, int], dict[str, str]] | None:
    """Return host and port of the proxy that the environment names, and its headers; ``None`` if it names none."""
    host, _ = address_of(location)
    url = urllib.request.getproxies().get(location.scheme)
    if not url or urllib.request.proxy_bypass(host):
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    headers = {}
    if parts.username is not None:
        plain = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(plain).decode()
    return (parts.hostname or "", parts.port or 80), headers
