"""Whom a certificate names decides whether its holder is a daemon, not only whether the authority issued it."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from quiver.transport.tls import CLIENT_URI, NODE_URI, Credentials, TlsError, TlsFiles
from quiver_client.certificates import _alternative
from tests.support.tls import HOST, Pki


def shake_hands(pki: Pki, files: TlsFiles, node: str) -> None:
    """Do a client's handshake with a server that has this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    with context.wrap_socket(connection, server_side=True) as sock:
                        sock.recv(1)
                except OSError:
                    pass  # the client hung up, as it should

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            sock = socket.create_connection(listener.getsockname(), 20)
            Credentials(pki.client("reader")).wrap(sock, HOST, node, 20).close()
        finally:
            serving.join()


@pytest.mark.fault("N4")
@pytest.mark.parametrize("node", ["", "alice"], ids=["any node", "the node of that name"])
def test_a_clients_certificate_does_not_pass_for_a_daemons(tmp_path: Path, node: str) -> None:
    """Even one that is valid for the daemon's host: a client that can answer there is still no daemon."""
    pki = Pki(tmp_path)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    named = {
        kind: pki._written(kind, pki.authority._issue("alice", prefix, [_alternative(HOST)], uses, 1))
        for kind, prefix in (("client", CLIENT_URI), ("node", NODE_URI))
    }
    shake_hands(pki, named["node"], node)
    with pytest.raises(TlsError, match="not a node's"):
        shake_hands(pki, named["client"], node)
