"""What it costs to wake up for a request: the daemon's poller beside a thread per connection that blocks in ``recv``.

    python -m bench.wakeup poller|threads CONNECTIONS SECONDS

One process answers each message of a few bytes by itself; another one asks on one connection after the other, so that
every request finds its connection idle. Printed are the requests per second, and the CPU of the answering process.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import threading
import time
from math import inf
from typing import Any, Final

MESSAGE: Final = b"x" * 64


def main() -> None:
    how, connections, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    context = multiprocessing.get_context("spawn")
    told: Any = context.SimpleQueue()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    asking = context.Process(target=_ask, args=(listener.getsockname(), connections, seconds, told))
    asking.start()
    accepted = []
    for _ in range(connections):
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.append(sock)
    cpu = time.process_time()
    if how == "poller":
        _poll(accepted)
    else:
        for sock in accepted:
            threading.Thread(target=_block, args=(sock,), daemon=True).start()
    requests, took = told.get()
    cpu = time.process_time() - cpu
    print(json.dumps({"us": took / requests * 1e6, "cpu_us": cpu / requests * 1e6, "requests": requests}), flush=True)
    asking.join()


def _ask(address: tuple[str, int], connections: int, seconds: float, told: Any) -> None:
    opened = []
    for _ in range(connections):
        sock = socket.create_connection(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.append(sock)
    for sock in opened:  # and whatever is made on first use is there
        sock.sendall(MESSAGE)
        sock.recv(len(MESSAGE), socket.MSG_WAITALL)
    requests, began = 0, time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        for sock in opened:
            sock.sendall(MESSAGE)
            sock.recv(len(MESSAGE), socket.MSG_WAITALL)
        requests += len(opened)
    told.put((requests, now - began))


def _block(sock: socket.socket) -> None:
    while data := sock.recv(4096):
        sock.sendall(data)


def _poll(accepted: list[socket.socket]) -> None:
    from quiver_cacheserver.budget import Budgets
    from quiver_cacheserver.serving.poller import ENDED, READABLE, Channel, Poller

    class Echo(Channel):
        def serve(self) -> int:
            try:
                data = self.sock.recv(4096)
            except BlockingIOError:
                return READABLE
            if not data:
                return ENDED
            self.sock.send(data)
            return READABLE

        def ended(self) -> None:
            pass

    poller = Poller(Budgets())
    for thread in poller._threads:
        thread.daemon = True
    poller.start()
    for sock in accepted:
        sock.setblocking(False)
        poller.add(Echo(sock, "127.0.0.1", inf), READABLE)


if __name__ == "__main__":
    main()
