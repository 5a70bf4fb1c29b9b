"""The sender of a request, once it is authenticated: a value that everything below the routes relies on."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Right(enum.Enum):
    """What a caller may do. The table of routes names the right that each route requires."""

    READ = "read"
    FILL = "fill"
    OPERATE = "operate"


EVERY_RIGHT: Final = frozenset(Right)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    ``domain``: its sharing domain. A shard or manifest is readable only in the domains that have shown that they have
    its bytes; elsewhere it looks absent. A daemon without tokens has a single domain, ``""``. ``is_member``: a daemon
    of this rack, authenticated by its certificate; it acts for the domain that its request names.
    """

    address: str
    tenant: str = ""
    domain: str = ""
    rights: frozenset[Right] = EVERY_RIGHT
    is_member: bool = False

    @property
    def budget(self) -> str:
        """The name under which this caller's use of shared resources is counted (``budget.Budgets``)."""
        return self.address
