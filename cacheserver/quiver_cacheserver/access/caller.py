"""The sender of a request, once it is authenticated: a value that everything below the routes relies on."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from quiver.claims import EVERY_RIGHT, Right
from quiver.domain import Domain, domain_named

__all__ = ["EVERY_RIGHT", "Caller", "Right", "account_of", "quota_of", "tenant_of"]

_TENANT: Final = "tenant "  # an address contains no space, so no account is an address's and a tenant's
_CLASS: Final = " class "
_OPERATES: Final = frozenset({Right.OPERATE})


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    ``domain``: its sharing domain. A shard or manifest is readable only in the domains that have shown that they have
    its bytes; elsewhere it looks absent. A daemon without tokens has a single domain, ``""``. ``is_member``: a daemon
    of this rack, authenticated by its certificate; it acts for the domain that its request names. ``key_id`` and
    ``expires_at`` (seconds since the epoch of Unix): of the token, until which a stream may use this value.
    """

    address: str
    tenant: str = ""
    domain: str = ""
    rights: frozenset[Right] = EVERY_RIGHT
    is_member: bool = False
    quota: str = ""
    key_id: str = ""
    expires_at: float = inf
    acting_for: Domain | None = None  # what a member's request names

    @property
    def scope(self) -> Domain:
        """The sharing domain that this caller reads and fills in: all that routes tell the node of it."""
        return domain_named(self.domain) if self.acting_for is None else self.acting_for

    @property
    def sees(self) -> Domain | None:
        """The sharing domain whose names it is shown; ``None``: of every domain.

        A token that may read or fill acts in its domain, and learns of no other one. A member of the rack, and a token
        that may operate and nothing else, act in none: they see the whole daemon.
        """
        if self.is_member or self.rights == _OPERATES or not self.domain:
            return None
        return self.scope

    @property
    def budget(self) -> str:
        """The name under which this caller's use of shared resources is counted (``budget.Budgets``)."""
        return account_of(self.tenant, self.quota) if self.tenant else self.address


def account_of(tenant: str, quota: str) -> str:
    """Return the account of a tenant's tokens of one quota class: its batch jobs leave its other jobs' share alone."""
    return f"{_TENANT}{tenant}{_CLASS}{quota}" if quota else f"{_TENANT}{tenant}"


def quota_of(account: str) -> str:
    """Return the quota class of an account, ``""`` for none: the inverse of ``account_of``."""
    return account.partition(_CLASS)[2] if account.startswith(_TENANT) else ""


def tenant_of(account: str) -> str:
    """Return the tenant of an account, ``""`` for one that is an address: another inverse of ``account_of``."""
    return account.removeprefix(_TENANT).partition(_CLASS)[0] if account.startswith(_TENANT) else ""
