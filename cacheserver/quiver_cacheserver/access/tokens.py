"""Verifies tokens: signature, issuer, audience, times and claims.

Invariant: whatever is wrong with a token, finding it out costs one verification of a signature, and the caller learns
no more than that it was refused. The reason goes to the audit log. A token that verified is remembered by its hash, so
that a reader's next request costs a hash; its expiry, and whether its key is still trusted, are checked each time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

import jwt
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from quiver.claims import ALGORITHM, ANY_RACK, ISSUER, REQUIRED, TOKEN_BYTES_MAX, Claims
from quiver.errors import BadRequest
from quiver.expiring import Expiring
from quiver_cacheserver.access.keys import PublicKeys

LEEWAY_SECONDS: Final = 30  # by which clocks may differ
REMEMBERED_MAX: Final = 4096

# Verified in place of what cannot be verified itself, so that it takes as long: the first test vector of RFC 8032, with
# another message than the one that was signed.
_DECOY_KEY: Final = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
_DECOY_SIGNATURE: Final = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
    "655141438e7a100b"
)
_DECOY_CONTENT: Final = bytes(256)


class Reason(StrEnum):
    """Why a request was refused, for operators only."""

    MISSING = "missing"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown_key"
    BAD_SIGNATURE = "bad_signature"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    AUDIENCE = "audience"  # for another rack, or by another issuer
    CERTIFICATE = "certificate"  # none, at a daemon that requires one and no token; or one that is not valid
    RIGHT = "right"  # the caller is told of this one, and of the certificate


class Refused(Exception):
    """A token was refused. ``claims``: what it says, if its signature is right."""

    def __init__(self, reason: Reason, claims: Claims | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.claims = claims


class Verified(NamedTuple):
    """A token's claims, and the id of the key that signed it."""

    claims: Claims
    key_id: str


class Tokens:
    """Verifies tokens for one rack. Safe from threads.

    ``now``: the time by which a token that was verified before expires.
    """

    def __init__(self, keys: PublicKeys, rack: str, now: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._audiences = [ANY_RACK, rack]
        self._now = now
        self._remembered: Expiring[bytes, Verified] = Expiring(REMEMBERED_MAX)
        self._decoy = Ed25519PublicKey.from_public_bytes(_DECOY_KEY)

    def __repr__(self) -> str:
        return f"Tokens({self._keys!r})"

    def verify(self, token: str) -> Verified:
        """Return what a token says. Raises ``Refused``."""
        name = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        known = self._remembered.get(name)
        if known is not None and self.fault(known.key_id, known.claims.expires_at) is None:
            return known
        verified = self._verify(token)
        reason = self.fault(verified.key_id, verified.claims.expires_at)
        if reason is not None:  # the key was withdrawn meanwhile
            raise Refused(reason, verified.claims)
        self._remembered.set(name, verified, max(verified.claims.expires_at + LEEWAY_SECONDS - self._now(), 0.0))
        return verified

    def fault(self, key_id: str, expires_at: float) -> Reason | None:
        """Return what is wrong by now with a token that verified before; ``None`` for nothing."""
        if key_id not in self._keys.by_id:
            return Reason.UNKNOWN_KEY
        return Reason.EXPIRED if self._now() >= expires_at + LEEWAY_SECONDS else None

    def refresh(self) -> None:
        """Read keys again that changed. Blocks on the disk."""
        self._keys.refresh()

    def _verify(self, token: str) -> Verified:
        if not token:
            raise self._unverifiable(Reason.MISSING)
        if len(token) > TOKEN_BYTES_MAX:
            raise self._unverifiable(Reason.TOO_LARGE)
        if not token.isascii():  # bytes of a header that are no UTF-8 arrive as surrogates, which PyJWT cannot encode
            raise self._unverifiable(Reason.MALFORMED)
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise self._unverifiable(Reason.MALFORMED) from error
        if header.get("alg") != ALGORITHM or "b64" in header or "crit" in header:
            raise self._unverifiable(Reason.MALFORMED)
        key_id = str(header.get("kid", ""))
        key = self._keys.by_id.get(key_id)
        if key is None:
            raise self._unverifiable(Reason.UNKNOWN_KEY)
        return Verified(self._signed(token, key), key_id)

    def _signed(self, token: str, key: Ed25519PublicKey) -> Claims:
        """Return the claims of a token, having verified its signature first. Raises ``Refused``."""
        try:
            payload = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                issuer=ISSUER,
                audience=self._audiences,
                leeway=LEEWAY_SECONDS,
                options={"require": list(REQUIRED)},
            )
            return Claims.parse(payload)
        except jwt.InvalidSignatureError as error:
            raise Refused(Reason.BAD_SIGNATURE) from error
        except (jwt.PyJWTError, BadRequest, OverflowError, RecursionError) as error:
            raise Refused(_reason_of(error), _claims_of(token)) from error

    def _unverifiable(self, reason: Reason) -> Refused:
        """Return the refusal of what has no signature to verify, after as much work."""
        try:
            self._decoy.verify(_DECOY_SIGNATURE, _DECOY_CONTENT)
        except InvalidSignature:
            return Refused(reason)
        raise AssertionError("the decoy's signature is wrong on purpose")


def _reason_of(error: Exception) -> Reason:
    """Return why the claims of a signed token are refused."""
    if isinstance(error, jwt.ExpiredSignatureError):
        return Reason.EXPIRED
    if isinstance(error, jwt.ImmatureSignatureError):
        return Reason.NOT_YET_VALID
    return (
        Reason.AUDIENCE if isinstance(error, (jwt.InvalidAudienceError, jwt.InvalidIssuerError)) else Reason.MALFORMED
    )


def _claims_of(token: str) -> Claims | None:
    """Return the claims of a token whose signature is right, for the audit log, if they can be parsed."""
    try:
        return Claims.parse(jwt.decode(token, options={"verify_signature": False}))
    except (jwt.PyJWTError, BadRequest, RecursionError):
        return None
