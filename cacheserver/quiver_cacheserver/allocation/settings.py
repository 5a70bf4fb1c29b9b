"""What an operator says about allocation, parsed once: the policy, tenants' weights and quotas, caps on origins."""

from __future__ import annotations

import math
import os.path
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quiver.allocation import Policy
from quiver.errors import BadRequest, Misconfigured
from quiver.identity import check_name
from quiver.location import Location, normal, shown
from quiver.sizes import format_size, parse_size

NO_POLICY: Final = "none"  # need alone decides, also between datasets: to compare with
TENANTS_MAX: Final = 4096
WEIGHT_MIN, WEIGHT_MAX = 1e-3, 1e3
_KEYS: Final = ("weight", "quota")


@dataclass(frozen=True, slots=True)
class AllocationSettings:
    """``policy``: ``None`` for none. ``weights`` and ``quotas`` (bytes of this daemon) by tenant.

    ``origin_rates``: bytes per second that the rack may read, by the folder that it lies below, as the normal form of
    its URL; "": from each origin.
    """

    policy: Policy | None = Policy.MAX_MIN
    weights: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, float] = field(default_factory=dict)
    origin_rates: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(
        cls, policy: str, tenants: Mapping[str, Any], origin_rates: Iterable[str], capacity_bytes: int
    ) -> AllocationSettings:
        """Parse what was given. Raises ``Misconfigured`` with one line that says what to write."""
        known = [NO_POLICY, *Policy]
        if policy not in known:
            raise Misconfigured(f"--policy {policy!r}: write one of {', '.join(Policy)}")
        if len(tenants) > TENANTS_MAX:
            raise Misconfigured(f"[tenants]: {len(tenants)} tenants; {TENANTS_MAX} are the most")
        weights, quotas = dict[str, float](), dict[str, float]()
        for tenant, given in tenants.items():
            _check_tenant(tenant, given)
            if "weight" in given:
                weights[tenant] = _weight(tenant, given["weight"])
            if "quota" in given:
                quotas[tenant] = _quota(tenant, given["quota"], capacity_bytes)
        chosen = None if policy == NO_POLICY else Policy(policy)
        return cls(chosen, weights, quotas, _origin_rates(origin_rates))

    def cap_of(self, base: str) -> tuple[str, float] | None:
        """Return the longest prefix of where an origin's data lies that has a cap, and the cap; ``None`` if none."""
        url = normal(base)
        found = [prefix for prefix in self.origin_rates if url.startswith(prefix)]
        prefix = max(found, key=len, default=None)
        return None if prefix is None else (prefix, self.origin_rates[prefix])


def _check_tenant(tenant: str, given: Any) -> None:
    try:
        check_name("a tenant", tenant)
    except ValueError as error:
        raise Misconfigured(f"[tenants]: {error}") from None
    if not isinstance(given, Mapping):
        raise Misconfigured(f'[tenants.{tenant}]: write weight = 2 or quota = "200GiB" below it')
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise Misconfigured(f"[tenants.{tenant}]: unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")


def _weight(tenant: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise Misconfigured(f"[tenants.{tenant}] weight = {given!r}: write a number, for example 2")
    if not WEIGHT_MIN <= given <= WEIGHT_MAX:
        raise Misconfigured(f"[tenants.{tenant}] weight = {given}: write one from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}")
    return float(given)


def _quota(tenant: str, given: Any, capacity_bytes: int) -> float:
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise Misconfigured(f'[tenants.{tenant}] quota = {given!r}: write a size, for example "200GiB"')
    try:
        quota_bytes = parse_size(given)
    except Misconfigured as error:
        raise Misconfigured(f"[tenants.{tenant}] quota: {error}") from None
    if quota_bytes > capacity_bytes:
        raise Misconfigured(
            f"[tenants.{tenant}] quota = {given!r} is more than --capacity, {format_size(capacity_bytes)}; a quota is"
            " of one daemon"
        )
    return float(quota_bytes)


def _origin_rates(given: Iterable[str]) -> dict[str, float]:
    rates = dict[str, float]()
    for each in given:
        prefix, rate = _origin_rate(each)
        if prefix in rates:
            raise Misconfigured(
                f"--origin-rate {shown(each)!r}: {prefix or 'each origin'} has a rate already; write one"
            )
        rates[prefix] = rate
    return rates


def _origin_rate(given: str) -> tuple[str, float]:
    prefix, equals, text = given.rpartition("=")
    try:
        rate = float(parse_size(text.strip().removesuffix("/s")))
        if not equals:
            return "", rate
        return _prefix(prefix.strip()), rate
    except Misconfigured:
        raise Misconfigured(
            f"--origin-rate {shown(given)!r}: write [PREFIX=]RATE in bytes per second, for example 200MB or s3://b/=1GiB"
        ) from None
    except BadRequest as error:
        raise Misconfigured(f"--origin-rate: {error}") from None


def _prefix(text: str) -> str:
    """Return a prefix as ``Location.url``, which is how ``--origin`` is written: a URL or an absolute path."""
    if "://" not in text and not text.startswith("/"):
        raise BadRequest(f"{shown(text)!r} is no prefix: write an absolute path, or a URL like s3://b/")
    return (Location.parse(text) if "://" in text else Location.folder("/" + os.path.normpath(text).lstrip("/"))).url
