"""Ports for processes that have to be told one before they listen, as torch's store is."""

from __future__ import annotations

import random
import socket
from contextlib import closing

CHOSEN = range(20_000, 32_000)  # below those that the system gives to connections, so that none takes it meanwhile


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    while True:
        port = random.SystemRandom().choice(CHOSEN)
        try:
            with closing(socket.create_server(("127.0.0.1", port))):
                return port
        except OSError:
            continue
