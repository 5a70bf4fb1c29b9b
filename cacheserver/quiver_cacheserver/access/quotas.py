"""Quota classes: how large a share of a busy daemon the tenants of a class get, as the operator configures it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from quiver.claims import name_of
from quiver.errors import BadRequest, Misconfigured
from quiver_cacheserver.access.caller import quota_of

WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0
CLASSES_MAX: Final = 64


class Quotas:
    """The weight of each account: that of its class, and 1 for other classes, for no class, and for addresses."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)

    @classmethod
    def parse(cls, settings: Iterable[str]) -> Quotas:
        """Parse values of ``--quota``, such as ``batch=0.25``. Raises ``Misconfigured``."""
        weights: dict[str, float] = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            try:
                weights[name_of("class", name)] = weight = float(text)
            except (ValueError, BadRequest):
                raise Misconfigured(f"--quota {setting!r}: write CLASS=WEIGHT, for example batch=0.25") from None
            if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
                raise Misconfigured(f"--quota {setting}: a weight is from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}")
        if len(weights) > CLASSES_MAX:
            raise Misconfigured(f"--quota: {len(weights)} classes; {CLASSES_MAX} are the most")
        return cls(weights)

    def weight_of(self, account: str) -> float:
        return self._weights.get(quota_of(account), 1.0)
