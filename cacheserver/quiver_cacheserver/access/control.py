"""Who sends a request, and whether it may: asked once per request, before anything else is done for it.

Invariant: nothing below the routes runs for a request that ``admit`` has not let through, and whatever is wrong with a
token, the answer is the same.
"""

from __future__ import annotations

import asyncio
from typing import Final

from quiver.claims import Right
from quiver.errors import Forbidden, QuiverError, Unauthenticated
from quiver.token_source import HOW
from quiver.transport.tls import CERT_VARIABLE, KEY_VARIABLE
from quiver_cacheserver.access.audit import Audit
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.access.rights import RIGHTS, allows
from quiver_cacheserver.access.tokens import Reason, Refused, Tokens, Verified

REFRESH_SECONDS: Final = 2.0  # between two looks at the files of keys
NO_RIGHTS: Final[frozenset[Right]] = frozenset()
REFUSAL: Final = f"this daemon requires a valid token: {HOW}"


class Access:
    """Access control of a daemon. Without tokens every caller may do everything. Safe from threads."""

    def __init__(self, tokens: Tokens | None = None) -> None:
        self.audit = Audit()
        self.audit.refusals.update(dict.fromkeys(map(str, Reason), 0))  # so that a rate can be taken from the first on
        self._tokens = tokens

    @property
    def requires_tokens(self) -> bool:
        return self._tokens is not None

    def admit(
        self, address: str, token: str, verb: str, *, is_member: bool = False, is_certified: bool = True
    ) -> Caller:
        """Return the sender of a request for a verb of ``rights.RIGHTS``. Raises ``Unauthenticated``, ``Forbidden``.

        ``is_member``: a daemon of the rack, authenticated by its certificate; it needs no token. ``is_certified``:
        whether the connection has a certificate of the authority, or needs none. With tokens none is needed: it says
        which machine asks, and the token says who.
        """
        if is_member or (self._tokens is None and is_certified):
            return Caller(address, is_member=is_member)
        if self._tokens is None:
            return self._uncertified(address, verb)
        if RIGHTS[verb] is None and not token:
            return Caller(address, rights=NO_RIGHTS)
        try:
            caller = _caller(address, self._tokens.verify(token))
        except Refused as refused:
            if RIGHTS[verb] is None:
                return Caller(address, rights=NO_RIGHTS)
            raise self._unauthenticated(address, verb, refused) from None
        self._check_right(caller, verb)
        return caller

    def check(self, caller: Caller, verb: str) -> None:
        """Ask again for a caller that was admitted, on a stream or socket. Raises as ``admit`` does."""
        if self._tokens is not None and not caller.is_member:
            reason = self._tokens.fault(caller.key_id, caller.expires_at)
            if reason is not None:
                self.audit.refused(caller, verb, reason)
                raise Unauthenticated(REFUSAL)
        self._check_right(caller, verb)

    async def follow_keys(self) -> None:
        """Read the public keys again when their files change, until cancelled."""
        loop = asyncio.get_running_loop()
        while self._tokens is not None:
            await asyncio.sleep(REFRESH_SECONDS)
            await loop.run_in_executor(None, self._tokens.refresh)

    def _check_right(self, caller: Caller, verb: str) -> None:
        right = RIGHTS[verb]
        if right is not None and not allows(caller, verb):
            self.audit.refused(caller, verb, Reason.RIGHT)
            needed = ",".join(each.value for each in Right if each is right or each in caller.rights)
            raise Forbidden(f"this token lacks the right `{right.value}`; ask for one made with --rights {needed}")

    def _uncertified(self, address: str, verb: str) -> Caller:
        """Return a caller of whom neither a certificate nor a token says who it is, for the public routes alone."""
        caller = Caller(address, rights=NO_RIGHTS)
        if RIGHTS[verb] is not None:
            self.audit.refused(caller, verb, Reason.CERTIFICATE)
            raise Forbidden(
                "this daemon requires a client certificate of its authority, and the connection has none: set"
                f" {CERT_VARIABLE} and {KEY_VARIABLE}"
            )
        return caller

    def _unauthenticated(self, address: str, verb: str, refused: Refused) -> QuiverError:
        claims = refused.claims
        caller = Caller(address, claims.tenant, claims.domain) if claims is not None else Caller(address)
        self.audit.refused(caller, verb, refused.reason)
        return Unauthenticated(REFUSAL)


def _caller(address: str, verified: Verified) -> Caller:
    claims, key_id = verified
    return Caller(
        address,
        claims.tenant,
        claims.domain,
        claims.rights,
        quota=claims.quota,
        key_id=key_id,
        expires_at=claims.expires_at,
    )
