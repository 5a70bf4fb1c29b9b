"""HTTP that no honest client sends, and the oracle against desynchronisation.

Two parties desynchronise when they disagree on where a request ends: what one takes for a body is a request to the
other. Each message below hides a request for the shard ``CANARY`` where some parser would find one. The oracle sends a
message and behind it a probe, a well-formed request for another shard. Then either the daemon closes the connection
after an error; or it answers the message, then the probe, and nothing else. The canary's bytes never come.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final, NamedTuple

from quiver.transport.stream import PATH, PROTOCOL
from tests.support.data import make_shard

CANARY, CANARY_DATA = make_shard([b"the canary sang" * 3])
PROBE, PROBE_DATA = make_shard([b"what the probe asks for" * 3])
SHARDS: Final = {CANARY: CANARY_DATA, PROBE: PROBE_DATA}
ANSWER_SECONDS: Final = 20.0
ABANDONED_SECONDS: Final = 0.3  # then the end of the connection tells a daemon that waits for more that none comes

H: Final = b"Host: x\r\n"
END: Final = b"\r\n"
OK: Final = b"GET /healthz HTTP/1.1\r\n" + H
READ: Final = b"POST /v1/read HTTP/1.1\r\n" + H
HIDDEN: Final = f"GET /v1/shards/{CANARY} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
ASK: Final = f"GET /v1/shards/{PROBE} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
CHUNK: Final = b"%x\r\n" % len(HIDDEN) + HIDDEN + b"\r\n"
LAST: Final = b"0\r\n\r\n"
LENGTH: Final = b"Content-Length: %d\r\n" % len(HIDDEN)
CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"
UPGRADE: Final = f"GET {PATH} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n".encode()

MESSAGES: Final[dict[str, bytes]] = {
    # two lengths
    "CL.TE": READ + LENGTH + CHUNKED + END + LAST + HIDDEN,
    "CL.TE, the length of the chunks": READ + b"Content-Length: 5\r\n" + CHUNKED + END + LAST + HIDDEN,
    "TE.CL": READ + CHUNKED + b"Content-Length: 4\r\n" + END + CHUNK + LAST,
    "CL.CL, different": READ + b"Content-Length: 0\r\n" + LENGTH + END + HIDDEN,
    "CL.CL, equal": READ + LENGTH + LENGTH + END + HIDDEN,
    "CL as a list": READ + b"Content-Length: %d, %d\r\n" % (len(HIDDEN), 0) + END + HIDDEN,
    "CL and TE: identity": READ + LENGTH + b"Transfer-Encoding: identity\r\n" + END + HIDDEN,
    "TE twice": READ + CHUNKED + b"Transfer-Encoding: identity\r\n" + END + CHUNK + LAST,
    "TE, the last is not chunked": READ + b"Transfer-Encoding: chunked, identity\r\n" + END + CHUNK + LAST,
    "TE of an unknown coding": READ + b"Transfer-Encoding: xchunked\r\n" + LENGTH + END + HIDDEN,
    "TE in HTTP/1.0": b"POST /v1/read HTTP/1.0\r\n" + CHUNKED + END + CHUNK + LAST,
    # the headers that say them
    "a space before the colon": READ + b"Content-Length : %d\r\n" % len(HIDDEN) + END + HIDDEN,
    "a space before the colon of TE": READ + b"Transfer-Encoding : chunked\r\n" + END + CHUNK + LAST,
    "a tab before chunked": READ + b"Transfer-Encoding:\tchunked\r\n" + LENGTH + END + CHUNK + LAST,
    "a vertical tab before chunked": READ + b"Transfer-Encoding:\x0bchunked\r\n" + LENGTH + END + CHUNK + LAST,
    "a quoted chunked": READ + b'Transfer-Encoding: "chunked"\r\n' + LENGTH + END + HIDDEN,
    "a header before with a bare CR": READ + b"X: y\rTransfer-Encoding: chunked\r\n" + LENGTH + END + CHUNK + LAST,
    "a header before with a bare LF": READ + b"X: y\nTransfer-Encoding: chunked\r\n" + LENGTH + END + CHUNK + LAST,
    "a folded TE": READ + b"Transfer-Encoding:\r\n chunked\r\n" + LENGTH + END + CHUNK + LAST,
    "a folded header": READ + b"X: y\r\n z: 1\r\n" + LENGTH + END + HIDDEN,
    "a first header that is folded": b"POST /v1/read HTTP/1.1\r\n X: y\r\n" + H + LENGTH + END + HIDDEN,
    "a line without a colon": READ + b"nonsense\r\n" + LENGTH + END + HIDDEN,
    "a header without a name": READ + b": y\r\n" + LENGTH + END + HIDDEN,
    "a header's name with a parenthesis": READ + b"Content(Length: 5\r\n" + LENGTH + END + HIDDEN,
    "a NUL in a header's name": READ + b"Content-Length\0: 5\r\n" + LENGTH + END + HIDDEN,
    "a NUL in a header": READ + b"X: a\0b\r\n" + LENGTH + END + HIDDEN,
    "a NUL behind chunked": READ + b"Transfer-Encoding: chunked\0\r\n" + LENGTH + END + CHUNK + LAST,
    "CL with a plus": READ + b"Content-Length: +%d\r\n" % len(HIDDEN) + END + HIDDEN,
    "CL below zero": READ + b"Content-Length: -1\r\n" + END + HIDDEN,
    "CL in hexadecimal": READ + b"Content-Length: 0x%x\r\n" % len(HIDDEN) + END + HIDDEN,
    "CL with an underscore": READ + b"Content-Length: 1_0\r\n" + END + HIDDEN,
    "CL with a space inside": READ + b"Content-Length: 1 0\r\n" + END + HIDDEN,
    "CL of other digits": READ + "Content-Length: ١٢\r\n".encode() + END + HIDDEN,
    "CL past 64 bits": READ + b"Content-Length: 18446744073709551616\r\n" + END + HIDDEN,
    "CL with nothing": READ + b"Content-Length: \r\n" + END + HIDDEN,
    # chunks
    "a chunk's size in other notation": READ + CHUNKED + END + b"0x5\r\nhello\r\n" + LAST + HIDDEN,
    "a chunk's size below zero": READ + CHUNKED + END + b"-5\r\nhello\r\n" + LAST + HIDDEN,
    "a chunk past 64 bits": READ + CHUNKED + END + b"ffffffffffffffffff\r\n" + HIDDEN,
    "a chunk of 2**64 - 1": READ + CHUNKED + END + b"ffffffffffffffff\r\n" + HIDDEN,
    "a chunk without an end": READ + CHUNKED + END + b"5\r\nhelloX" + LAST + HIDDEN,
    "a chunk that ends in LF": READ + CHUNKED + END + b"5\nhello\n0\n\n" + HIDDEN,
    "a chunk's extension with LF": READ + CHUNKED + END + b"5;a\nb\r\nhello\r\n" + LAST + HIDDEN,
    "a chunk's long extension": READ + CHUNKED + END + b"5;" + b"x" * 70_000 + b"\r\nhello\r\n" + LAST,
    "trailers that say a length": READ + CHUNKED + END + b"0\r\n" + LENGTH + END + HIDDEN,
    "a body in chunks": READ + CHUNKED + END + CHUNK + LAST,
    # bodies where none is expected
    "GET with a body": OK + LENGTH + END + HIDDEN,
    "HEAD with a body": b"HEAD /healthz HTTP/1.1\r\n" + H + LENGTH + END + HIDDEN,
    "GET of nothing with a body": b"GET /nothing HTTP/1.1\r\n" + H + LENGTH + END + HIDDEN,
    "GET with chunks": OK + CHUNKED + END + CHUNK + LAST,
    "a method that is not allowed with a body": b"PATCH /v1/read HTTP/1.1\r\n" + H + LENGTH + END + HIDDEN,
    "POST without a length": READ + END,
    "an upload that is refused": b"PUT /v1/shards/zz HTTP/1.1\r\n" + H + LENGTH + END + HIDDEN,
    "an upload of other bytes": f"PUT /v1/shards/{CANARY} HTTP/1.1\r\n".encode() + H + LENGTH + END + HIDDEN,
    "Expect: 100-continue": READ + LENGTH + b"Expect: 100-continue\r\n" + END + HIDDEN,
    "Expect: no text": READ + LENGTH + b"Expect: \x80\xff\r\n" + END + HIDDEN,
    "Expect: nonsense": READ + LENGTH + b"Expect: a miracle\r\n" + END + HIDDEN,
    # the request line
    "lines that end in LF": b"GET /healthz HTTP/1.1\nHost: x\n\n",
    "a line that ends in LF": b"GET /healthz HTTP/1.1\n" + H + END,
    "a bare CR in the request line": b"GET /healthz\rX HTTP/1.1\r\n" + H + END,
    "a NUL in the path": b"GET /heal\0thz HTTP/1.1\r\n" + H + END,
    "a space in the path": b"GET /heal thz HTTP/1.1\r\n" + H + END,
    "tabs": b"GET\t/healthz\tHTTP/1.1\r\n" + H + END,
    "two spaces": b"GET  /healthz  HTTP/1.1\r\n" + H + END,
    "a space first": b" " + OK + END,
    "a line of its own first": b"\r\n\r\n" + OK + END,
    "absolute form": b"GET http://elsewhere/healthz HTTP/1.1\r\n" + H + END,
    "absolute form of another scheme": b"GET ftp://u:p@elsewhere/healthz HTTP/1.1\r\n" + H + END,
    "authority form": b"CONNECT elsewhere:443 HTTP/1.1\r\n" + H + END,
    "a star": b"OPTIONS * HTTP/1.1\r\n" + H + END,
    "no slash": b"GET healthz HTTP/1.1\r\n" + H + END,
    "another version": b"GET /healthz HTTP/9.9\r\n" + H + END,
    "no version": b"GET /healthz\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an answer": b"HTTP/1.1 200 OK\r\n" + LENGTH + END + HIDDEN,
    "a method in lower case": b"get /healthz HTTP/1.1\r\n" + H + END,
    "a method that is none": b"G(E)T /healthz HTTP/1.1\r\n" + H + END,
    "a path of 70,000 characters": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + H + END,
    "traversal": b"GET /v1/shards/../../etc/passwd HTTP/1.1\r\n" + H + END,
    "quoted traversal": b"GET /v1/shards/%2e%2e%2f%2e%2e%2fetc%2fpasswd HTTP/1.1\r\n" + H + END,
    # hosts and sizes
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n" + END,
    "no host": b"GET /healthz HTTP/1.1\r\n" + END,
    "a host that is none": b"GET /healthz HTTP/1.1\r\nHost: a/b\\c@d\r\n" + END,
    "bytes that are no text": b"GET /healthz HTTP/1.1\r\nHost: \xff\xfe\r\nX: \xff\r\n" + END,
    "a header of 1 MiB": OK + b"X: " + b"a" * (1 << 20) + END + END,
    "100,000 headers": OK + b"X: y\r\n" * 100_000 + END,
    # upgrades
    "an upgrade with a body": UPGRADE + LENGTH + END + HIDDEN,
    "an upgrade with chunks": UPGRADE + CHUNKED + END + CHUNK + LAST,
    "an upgrade in HTTP/1.0": UPGRADE.replace(b"HTTP/1.1", b"HTTP/1.0") + END,
    "an upgrade to another protocol": UPGRADE.replace(PROTOCOL.encode(), b"websocket") + END,
    "an upgrade to h2c": OK + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n" + END,
    "an upgrade that Connection does not name": UPGRADE.replace(b"Connection: Upgrade", b"Connection: close, x") + END,
    # other protocols
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "SOCKS": b"\x05\x01\x00",
    "a stream's frame": b"\x80\0\0\0QRD1" + bytes(124),
    "zeros": bytes(4096),
}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def all_answers(address: tuple[str, int], sent: bytes, wanted: int = 0) -> tuple[list[Answer], bytes]:
    """Send bytes on one connection; return all answers on it, and what follows them that is no whole answer.

    ``wanted``: how many answers to wait for; 0: up to that to the probe. Then the connection is ended.
    """
    received = b""
    is_head = sent.startswith(b"HEAD")
    with socket.create_connection(address, timeout=ANSWER_SECONDS) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(sent)
        sock.settimeout(ABANDONED_SECONDS)
        with contextlib.suppress(ConnectionError):
            with contextlib.suppress(TimeoutError):  # it waits for more of the message
                while not _is_enough(_parsed(received, is_head)[0], wanted):
                    if not (more := sock.recv(1 << 16)):
                        return _parsed(received, is_head)
                    received += more
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)  # which it answers by the end, after whatever else it has to say
            sock.settimeout(ANSWER_SECONDS)
            while more := sock.recv(1 << 16):
                received += more
    return _parsed(received, is_head)


def _is_enough(answers: list[Answer], wanted: int) -> bool:
    return len(answers) >= wanted if wanted else bool(answers) and answers[-1].body == PROBE_DATA


def _parsed(data: bytes, first_is_head: bool) -> tuple[list[Answer], bytes]:
    answers: list[Answer] = []
    while b"\r\n\r\n" in data:
        head, _, rest = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        if not lines[0].startswith("HTTP/1."):
            break
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        status = int(lines[0].split(" ")[1])
        bodiless = status < 200 or status in (204, 304) or (first_is_head and not answers)
        size = 0 if bodiless else int(headers.get("content-length", len(rest)))
        if len(rest) < size:
            break
        if status >= 200 or status == 101:  # other interim answers precede the answer
            answers.append(Answer(status, headers, rest[:size]))
        data = rest[size:]
    return answers, data


def complaint(address: tuple[str, int], message: bytes) -> str:
    """Send a message and the probe behind it; return what is wrong with the answers, empty if nothing is."""
    answers, left = all_answers(address, message + ASK)
    bodies = b"".join(answer.body for answer in answers) + left
    told = f"{[answer.status for answer in answers]} and {left[:80]!r}"
    if CANARY_DATA in bodies:
        return f"the request that was hidden in it was answered: {told}"
    if left:
        return f"half an answer, or none: {told}"
    if any(answer.status >= 500 and answer.status != 503 for answer in answers):
        return f"a failure of the daemon: {told}"
    if answers and answers[-1].status == 200 and answers[-1].body == PROBE_DATA:
        wanted = 2
    else:
        wanted = 1  # it was closed; the last answer says why
        if answers and answers[-1].status < 400 and answers[-1].headers.get("connection") != "close":
            return f"no answer to the probe, and no error: {told}"
    if len(answers) > wanted:
        return f"more answers than requests: {told}"
    return ""
