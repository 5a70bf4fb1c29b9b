"""What a token says: who its bearer is, and what it may do. Values only; docs/protocol.md has the format.

A token is a JSON Web Token, signed with Ed25519. ``quiver token create`` signs one, and daemons verify it; both rely on
this module for the claims, so that what one of them writes the other accepts. Nothing here signs or verifies.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from quiver.errors import BadRequest

ALGORITHM: Final = "EdDSA"  # the only one; a token that names another is rejected
ISSUER: Final = "quiver"
ANY_RACK: Final = "quiver"  # as the audience; else the token is for the rack of that name
TOKEN_BYTES_MAX: Final = 2048  # checked before a token is parsed; one with the longest names has about 700
LIFETIME_SECONDS_MAX: Final = 366 * 86400  # that `quiver token create` signs: a token cannot be revoked alone
KEY_ID_BYTES: Final = 10  # of a key's SHA-256, as base32; ids are no secret, and an operator makes all keys
REQUIRED: Final = ("exp", "iat", "iss", "aud")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Right(enum.Enum):
    """What a caller may do. ``quiver_cacheserver.access.rights`` names the right that each verb requires."""

    READ = "read"
    FILL = "fill"
    OPERATE = "operate"


EVERY_RIGHT: Final = frozenset(Right)
DEFAULT_RIGHTS: Final = frozenset({Right.READ, Right.FILL})


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of a token. Times are seconds since the epoch of Unix.

    ``domain``: the sharing domain, within which a digest is the capability to read what it names. ``quota``: the class
    that decides the tenant's share of a busy daemon; ``""`` is the class of weight 1. ``audience``: the rack that
    accepts the token, or ``ANY_RACK``.
    """

    tenant: str
    domain: str
    rights: frozenset[Right]
    issued_at: int
    expires_at: int
    quota: str = ""
    audience: str = ANY_RACK

    @property
    def payload(self) -> dict[str, Any]:
        """The claims as the token contains them."""
        quota = {"quota": self.quota} if self.quota else {}
        return {
            "iss": ISSUER,
            "aud": self.audience,
            "iat": self.issued_at,
            "exp": self.expires_at,
            "tenant": self.tenant,
            "domain": self.domain,
            "rights": [right.value for right in Right if right in self.rights],
            **quota,
        }

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> Claims:
        """Return the claims of a payload. Raises ``BadRequest`` for one that breaks a rule; ignores unknown claims."""
        rights = payload.get("rights")
        if not isinstance(rights, list) or len(rights) > len(Right):
            raise BadRequest("the claim `rights` must be a list of rights")
        tenant = name_of("tenant", payload.get("tenant"))
        quota = payload.get("quota", "")
        return cls(
            tenant,
            name_of("domain", payload.get("domain", tenant)),
            rights_of(rights),
            _seconds("iat", payload.get("iat")),
            _seconds("exp", payload.get("exp")),
            name_of("quota", quota) if quota != "" else "",
            name_of("aud", payload.get("aud")),
        )


def rights_of(names: Iterable[object]) -> frozenset[Right]:
    """Return the rights of these names, at least one. Raises ``BadRequest``."""
    known = {right.value: right for right in Right}
    rights: set[Right] = set()
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise BadRequest(f"an unknown right; the rights are {', '.join(known)}")
        rights.add(known[name])
    if not rights:
        raise BadRequest(f"no right; the rights are {', '.join(known)}")
    return frozenset(rights)


def name_of(what: str, value: object) -> str:
    """Return a tenant, domain, quota class or audience. Raises ``BadRequest``."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadRequest(f"{what}: use 1 to 64 letters, digits, dots, dashes and underscores")
    return value


def _seconds(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
        raise BadRequest(f"the claim `{what}` must be a time in seconds")
    return value
