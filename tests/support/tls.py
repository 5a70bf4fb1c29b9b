"""A certificate authority for a test, and a TLS proxy for a server without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Contexts:
    """TLS contexts of a server at 127.0.0.1 and of clients, which trust one authority."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def make_contexts(folder: Path) -> Contexts:
    """Make an authority and its certificate for 127.0.0.1."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = _certificate("a test's authority", authority, "a test's authority", authority, is_ca=True)
    own = _certificate("a daemon", server, "a test's authority", authority, is_ca=False)
    ca_file, own_file = folder / "ca.pem", folder / "own.pem"
    ca_file.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    key = server.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    own_file.write_bytes(key + own.public_bytes(serialization.Encoding.PEM))
    made = Contexts(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(ca_file)))
    made.server.load_cert_chain(own_file)
    return made


def _certificate(
    subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, signer: ec.EllipticCurvePrivateKey, *, is_ca: bool
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if is_ca:
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
    else:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@contextlib.contextmanager
def tls_front(url: str, context: ssl.SSLContext) -> Iterator[str]:
    """Serve TLS in front of ``url``; yield its address (as ``http://``: clients with the context use TLS)."""
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()
    ports: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(url)
        with contextlib.suppress(OSError, ssl.SSLError):
            inner_reader, inner_writer = await asyncio.open_connection(parts.hostname, parts.port)
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))

    async def serve() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()
        await stop.wait()
        server.close()
        handlers = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait(10)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until the end of the input, or until the other side has closed; then close both."""
    try:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
    finally:
        writer.transport.abort() if writer.transport.is_closing() else writer.close()
