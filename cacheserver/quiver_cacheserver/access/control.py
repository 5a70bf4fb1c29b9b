"""Who sends a request, and whether it may: asked once per request, before anything else is done for it.

Invariant: nothing below the routes runs for a request that ``admit`` has not let through, and whatever is wrong with a
token, the answer is the same.
"""

from __future__ import annotations

from quiver_cacheserver.access.caller import Caller


class Access:
    """Access control of a daemon. Without tokens every caller may do everything."""

    def admit(self, address: str, token: str, verb: str, *, is_member: bool = False) -> Caller:
        """Return the sender of a request for a verb of ``rights.RIGHTS``. Raises ``Unauthenticated``, ``Forbidden``."""
        return Caller(address, is_member=is_member)

    def check(self, caller: Caller, verb: str) -> None:
        """Raise ``Unauthenticated`` if the caller's token is no longer valid, ``Forbidden`` without the right."""
