"""TLS between clients and daemons: contexts made from files, identities, and errors that say what is wrong.

Daemons and clients trust one authority, that of the file ``ca``, and no other: not those of the system. A certificate
says in a URI of its subject's alternative names who holds it, ``quiver://node/<id>`` or ``quiver://client/<name>``. A
client accepts only a node's certificate that is valid for the host it connects to, and for a ring entry only that of
the node named there. So neither a client's certificate nor one of another machine can pass for a daemon.

The files are read again when they change, for new connections; open ones go on. Certificates that cannot be used are
found when they are loaded, by a handshake in memory: then what was loaded before stays, and that is logged once.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from quiver import forks
from quiver.errors import Misconfigured
from quiver.ring import NODE_ID
from quiver.transport.sockets import connect

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 1.0  # between two looks at the files
ALPN: Final = "http/1.1"
NODE_URI: Final = "quiver://node/"
CLIENT_URI: Final = "quiver://client/"
CA_VARIABLE: Final = "QUIVER_TLS_CA"
CERT_VARIABLE: Final = "QUIVER_TLS_CERT"
KEY_VARIABLE: Final = "QUIVER_TLS_KEY"
FLIGHTS_MAX: Final = 16  # of a handshake in memory

Signature = tuple[tuple[int, int, int], ...]
Certificate = Mapping[str, Any]


class TlsError(OSError):
    """A handshake failed, or the other side is not who it should be. Trying again does not help."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one side, in PEM: the authority, and its own certificate and key, empty if it has none.

    ``names``: what to call the three in messages.
    """

    ca: str
    cert: str = ""
    key: str = ""
    names: tuple[str, str, str] = (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE)

    def __post_init__(self) -> None:
        ca, cert, key = self.names
        if not self.ca:
            raise Misconfigured(f"{ca} is missing: the file of the authority that signed the daemons' certificates")
        if bool(self.cert) != bool(self.key):
            raise Misconfigured(f"{cert} and {key} belong together: the certificate and its key")

    @classmethod
    def from_environment(cls) -> TlsFiles:
        """Return the files that the environment names. Raises ``Misconfigured`` if it names no authority."""
        ca, cert, key = (os.environ.get(name, "") for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE))
        if not ca:
            raise Misconfigured(
                f"a daemon with an https:// URL speaks TLS, and {CA_VARIABLE} is not set: write there the path of the"
                " authority's file, ca.pem of `quiver tls init`; the URL of one without TLS begins with http://"
            )
        return cls(ca, cert, key)

    def signature(self) -> Signature:
        """Return what changes when one of the files does. A missing file has a signature, too."""
        return tuple(_signature(path) for path in (self.ca, self.cert, self.key) if path)


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a verified certificate names: a node or a client, or nobody."""

    node: str = ""
    client: str = ""

    @property
    def is_known(self) -> bool:
        return bool(self.node or self.client)


NOBODY: Final = Identity()


def identity_of(certificate: Certificate | None) -> Identity:
    """Return whom a certificate names, in the form of ``SSLSocket.getpeercert``; nobody unless it is exactly one."""
    named = [value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "URI"]
    ours = [uri for uri in named if uri.startswith("quiver:")]
    if len(ours) != 1:
        return NOBODY
    for prefix, make in ((NODE_URI, Identity), (CLIENT_URI, lambda name: Identity(client=name))):
        name = ours[0].removeprefix(prefix)
        if name != ours[0] and NODE_ID.fullmatch(name):
            return make(name)
    return NOBODY


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The contexts made of one state of the files."""

    client: ssl.SSLContext
    server: ssl.SSLContext | None
    certificate: Certificate
    signature: Signature

    @property
    def identity(self) -> Identity:
        return identity_of(self.certificate)


class Credentials:
    """One side's authority, certificate and key, loaded from files and loaded again when they change.

    ``serves``: they are a daemon's, which is a server and a client of other daemons. Safe from threads; a forked child
    loads them again, since a thread of its parent may have been in the middle of a handshake.
    """

    def __init__(self, files: TlsFiles, *, serves: bool = False) -> None:
        self.files = files
        self._serves = serves
        self._lock = forks.lock()
        self._loaded: _Loaded | None = None
        self._looked_at = 0.0
        self._failed: Signature | None = None  # of the files that could not be loaded last
        forks.close_in_child(self)

    def __repr__(self) -> str:
        return f"Credentials({self.files.cert or self.files.ca!r})"

    def close(self) -> None:
        """Forget what was loaded."""
        self._loaded = None

    # -- contexts -----------------------------------------------------------------------------------------------------

    def client(self) -> ssl.SSLContext:
        """Return the context for a new connection to a daemon. Raises ``Misconfigured`` if none could be loaded."""
        self.refresh()
        return self._current().client

    def server(self) -> ssl.SSLContext:
        """Return the context for a connection that was accepted. Reads no files once they are loaded."""
        server = self._current().server
        assert server is not None, "these are a client's"
        return server

    @property
    def identity(self) -> Identity:
        """Whom the own certificate names."""
        return self._current().identity

    @property
    def expires_at(self) -> float:
        """When the own certificate expires, in seconds since the epoch; 0 without one."""
        told = self._current().certificate.get("notAfter")
        return float(ssl.cert_time_to_seconds(told)) if told else 0.0

    def check_host(self, host: str) -> None:
        """Raise ``Misconfigured`` unless the own certificate is valid for this host, as those who connect demand."""
        try:
            _proved(self.files, as_server=True, host=host)
        except ssl.SSLError as error:
            _, cert, _ = self.files.names
            raise Misconfigured(f"{cert} {self.files.cert}: {explained(error)}") from error

    def refresh(self) -> None:
        """Load the files again if they have changed. If that fails, keep what was loaded, and log it once."""
        now = time.monotonic()
        loaded = self._loaded
        if loaded is None or now - self._looked_at < CHECK_SECONDS:
            return
        with self._lock:
            self._looked_at = now
            signature = self.files.signature()
            if signature in (loaded.signature, self._failed):
                return
            try:
                self._loaded = self._load(signature)
            except Misconfigured as error:
                self._failed = signature
                log.warning("%s; the TLS files loaded before stay in use", error)
            else:
                self._failed = None
                log.info("the TLS files were loaded again")

    def _current(self) -> _Loaded:
        loaded = self._loaded
        if loaded is None:
            with self._lock:
                loaded = self._loaded
                if loaded is None:
                    loaded = self._loaded = self._load(self.files.signature())
        return loaded

    def _load(self, signature: Signature) -> _Loaded:
        files = self.files
        certificate: Certificate = {}
        if files.cert:
            certificate = _checked(files, as_server=False)
            if self._serves:
                certificate = _checked(files, as_server=True)
        client = _context(files, ssl.PROTOCOL_TLS_CLIENT)
        client.set_alpn_protocols([ALPN])
        server = None
        if self._serves:
            server = _context(files, ssl.PROTOCOL_TLS_SERVER)
            server.set_alpn_protocols([ALPN])
            server.verify_mode = ssl.CERT_OPTIONAL  # whether a caller needs a certificate is decided by its route
            server.num_tickets = 0  # connections are kept open; a ticket would only be one more record to skip
        return _Loaded(client, server, certificate, signature)

    # -- connections --------------------------------------------------------------------------------------------------

    def wrap(self, sock: socket.socket, host: str, node: str, seconds: float) -> ssl.SSLSocket:
        """Do a client's handshake with the daemon at ``host``; return the socket that speaks TLS.

        ``node``: the node that the ring names there, or empty: any node whose certificate is for this host. Raises
        ``TlsError`` if it is another one, ``TimeoutError`` after ``seconds``, and ``Misconfigured``.
        """
        sock.settimeout(seconds)
        try:
            wrapped = self.client().wrap_socket(sock, server_hostname=host)
        except ssl.SSLError as error:
            raise TlsError(explained(error)) from error
        except TimeoutError as error:  # OpenSSL's text begins with a line of its source
            raise TimeoutError("no answer to the TLS handshake") from error
        try:
            found = identity_of(wrapped.getpeercert()).node
            if not found:
                raise TlsError("its certificate is not a node's: it has no URI quiver://node/ID")
            if node and found != node:
                raise TlsError(f"its certificate is that of node {found}, and the ring has node {node} there")
        except BaseException:
            wrapped.close()
            raise
        return wrapped


_of_environment: dict[TlsFiles, Credentials] = {}


def credentials_of_environment() -> Credentials:
    """Return this process's credentials as a client: ``QUIVER_TLS_CA``, and ``QUIVER_TLS_CERT`` and ``_KEY``."""
    files = TlsFiles.from_environment()
    return _of_environment.setdefault(files, _of_environment.get(files) or Credentials(files))


def open_socket(
    url: str, connect_seconds: float, handshake_seconds: float, tls: Credentials | None = None, node: str = ""
) -> socket.socket:
    """Return a connection to the daemon at a URL, for ``https`` after the handshake: see ``Credentials.wrap``.

    ``tls``: by default the credentials of the environment. Raises ``OSError`` and ``Misconfigured``.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https":
        return connect(host, parts.port or 80, connect_seconds)
    credentials = tls if tls is not None else credentials_of_environment()
    sock = connect(host, parts.port or 443, connect_seconds)
    try:
        return credentials.wrap(sock, host, node, handshake_seconds)
    except BaseException:
        sock.close()
        raise


# -- contexts ----------------------------------------------------------------------------------------------------------


def _context(files: TlsFiles, side: ssl._SSLMethod) -> ssl.SSLContext:
    """Return a context that trusts the authority alone. Raises ``Misconfigured`` naming the file that is wrong."""
    ca, cert, _ = files.names
    made = ssl.SSLContext(side)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        made.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise Misconfigured(f"{ca} {files.ca}: {_reason(error)}; it should have certificates in PEM") from error
    if files.cert:
        try:
            made.load_cert_chain(files.cert, files.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise Misconfigured(f"{cert} {files.cert} with the key {files.key}: {_reason(error)}") from error
    return made


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted; keep it in a file without a password that only its user may read")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = {
            "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
            "NO_CERTIFICATE_OR_CRL_FOUND": "there is no certificate in it",
        }.get(error.reason or "")
        return reason or f"it cannot be read ({error.reason or error})"
    return error.strerror or str(error)


def _checked(files: TlsFiles, *, as_server: bool) -> Certificate:
    """Return the own certificate once others would accept it. Raises ``Misconfigured``."""
    try:
        return _proved(files, as_server=as_server)
    except ssl.SSLError as error:
        ca, cert, _ = files.names
        text = explained(error).replace("the authority", f"the authority in {ca} {files.ca}")
        raise Misconfigured(f"{cert} {files.cert}: {text}") from error


def _proved(files: TlsFiles, *, as_server: bool, host: str = "") -> Certificate:
    """Do a handshake in memory, in which the other side verifies the own certificate, and return what it sees of it.

    Raises ``ssl.SSLError`` with what is wrong: expired, not signed by the authority, not for ``host``.
    """
    server, client = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = bool(host)
    if not as_server:
        server.verify_mode = ssl.CERT_REQUIRED
        client.verify_mode = ssl.CERT_NONE
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(back, there, server_hostname=host or None),
        server.wrap_bio(there, back, server_side=True),
    ]
    left = list(sides)
    for _ in range(FLIGHTS_MAX):
        for side in list(left):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            left.remove(side)
    return dict(sides[0 if as_server else 1].getpeercert() or {})


def _signature(path: str) -> tuple[int, int, int]:
    try:
        found = Path(path).stat()
    except OSError as error:
        return 0, 0, -(error.errno or 1)
    return found.st_mtime_ns, found.st_ino, found.st_size


# -- errors ------------------------------------------------------------------------------------------------------------

_EXPIRED: Final = (10,)  # numbers of OpenSSL's X509_V_ERR_…
_NOT_YET: Final = (9,)
_WRONG_NAME: Final = (62, 64)
_FOREIGN: Final = (2, 18, 19, 20, 21)
_PURPOSE: Final = (26,)
# What a peer that speaks no TLS makes of a handshake, or what OpenSSL makes of its answer.
_PLAIN: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG",
                 "BAD_RECORD_TYPE", "RECORD_TOO_SMALL")  # fmt: skip
_ALERT: Final = re.compile(r"alert ([a-z ]+?)(?: \(|$)")


def explained(error: ssl.SSLError) -> str:
    """Return what went wrong in a handshake, and with OpenSSL's words for it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        told = f"certificate verify failed: {error.verify_message}"
        code = error.verify_code
        if code in _EXPIRED:
            return f"the certificate has expired ({told}); issue a new one"
        if code in _NOT_YET:
            return f"the certificate is not valid yet ({told}); compare the clocks of the machines"
        if code in _WRONG_NAME:
            return f"the certificate is for another host: the wrong name ({told})"
        if code in _FOREIGN:
            return f"the certificate is not signed by the authority ({told})"
        if code in _PURPOSE:
            return f"the certificate is of the wrong kind, a client's for a node or a node's for neither ({told})"
        return f"the certificate is not accepted ({told})"
    reason = error.reason or ""
    if reason == "HTTP_REQUEST":
        return "plain HTTP was spoken to a port that speaks TLS"
    if reason in _PLAIN:
        return f"the other side speaks no TLS ({reason}): is it a plain port? Its URL begins with http://, then"
    if "ALERT" in reason:
        return _of_alert(reason)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "the other side closed the connection in the middle of the handshake"
    return f"TLS failed ({reason or error})"


def _of_alert(reason: str) -> str:
    """Return what an alert of the other side means, which is about the own certificate mostly."""
    told = reason.partition("ALERT_")[2].replace("_", " ").lower()
    if "CERTIFICATE_EXPIRED" in reason:
        return f"the other side says that this side's certificate has expired (alert: {told})"
    if "UNKNOWN_CA" in reason:
        return f"the other side says that this side's certificate is not signed by its authority (alert: {told})"
    if "CERTIFICATE_REQUIRED" in reason:
        return f"the other side requires a client certificate: set {CERT_VARIABLE} and {KEY_VARIABLE} (alert: {told})"
    if "CERTIFICATE" in reason:
        return f"the other side does not accept this side's certificate (alert: {told})"
    return f"the other side refused the handshake (alert: {told})"


def label(error: ssl.SSLError) -> str:
    """Return one word for what went wrong, for a counter: one of ``LABELS``."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        return "expired" if code in _EXPIRED else "foreign" if code in _FOREIGN else "invalid"
    reason = error.reason or ""
    return "plain" if reason in _PLAIN else "rejected" if "ALERT" in reason else "handshake"


LABELS: Final = ("expired", "foreign", "invalid", "plain", "rejected", "handshake")
