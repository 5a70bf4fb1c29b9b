"""A small certificate authority for a rack: what ``quiver tls init`` makes, and what docs/protocol.md demands of it.

A node's certificate names the node in the URI ``quiver://node/<id>`` and is valid for its hosts, as a server and as a
client of other daemons. A client's names ``quiver://client/<name>``, has no host, and may only be used by a client: no
daemon and no reader takes it for a node's.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quiver.errors import Misconfigured
from quiver.ring import NODE_ID
from quiver.transport.tls import CLIENT_URI, NODE_URI

BACKDATED: Final = datetime.timedelta(hours=1)  # for machines whose clocks are behind
_PEM: Final = serialization.Encoding.PEM
_USES: Final = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
                "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A certificate authority: its certificate, and the key that signs."""

    def __init__(self, pair: Pair) -> None:
        """Raises ``Misconfigured`` if this is no authority's certificate with its key."""
        try:
            self._certificate = x509.load_pem_x509_certificate(pair.certificate)
            key = serialization.load_pem_private_key(pair.key, None)
            is_ca = self._certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except (ValueError, TypeError, x509.ExtensionNotFound) as error:
            raise Misconfigured(f"this is no authority's certificate with its key, in PEM: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_ca:
            raise Misconfigured("this is no authority's certificate, or its key is of another kind than EC")
        if key.public_key() != self._certificate.public_key():
            raise Misconfigured("the authority's key is not that of its certificate")
        self._key = key
        self.pair = pair

    @classmethod
    def new(cls, name: str, days: float) -> Authority:
        """Make an authority, valid from now on for ``days``."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        builder = _begun(subject, subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage("key_cert_sign", "crl_sign", "digital_signature"), critical=True)
        signed = builder.sign(key, hashes.SHA256())
        return cls(Pair(signed.public_bytes(_PEM), _private(key)))

    def node(self, node: str, hosts: list[str], days: float) -> Pair:
        """Issue a node's certificate, valid for these host names and addresses. Raises ``Misconfigured``."""
        if not hosts:
            raise Misconfigured(f"node {node}: name its hosts or addresses, as its URL has them")
        alternatives = [_alternative(host) for host in hosts]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._issue(node, NODE_URI, alternatives, uses, days)

    def client(self, name: str, days: float) -> Pair:
        """Issue a client's certificate. Raises ``Misconfigured``."""
        return self._issue(name, CLIENT_URI, [], [ExtendedKeyUsageOID.CLIENT_AUTH], days)

    def _issue(
        self,
        name: str,
        prefix: str,
        alternatives: list[x509.GeneralName],
        uses: list[x509.ObjectIdentifier],
        days: float,
    ) -> Pair:
        if not NODE_ID.fullmatch(name):
            raise Misconfigured(f"{name!r}: use up to 64 letters, digits, dots, dashes and underscores")
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([*alternatives, x509.UniformResourceIdentifier(prefix + name)])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _begun(_name(name), self._certificate.subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage("digital_signature"), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(authority, critical=False)
        return Pair(builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM), _private(key))


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    until = now + datetime.timedelta(days=days)
    builder = builder.not_valid_before(min(now, until) - BACKDATED).not_valid_after(until)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in _USES})


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        if not host or any(char in host for char in " /:*@"):
            raise ValueError("not a host name")
        return x509.DNSName(host)
    except ValueError as error:
        raise Misconfigured(f"{host!r} is neither a host name nor an address") from error


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
