"""Which shards are needed, fetched and evicted: pure functions of values, the same for every cache.

``report`` is what a consumer reports, ``messages`` encodes it; ``leases`` knows the consumers that count, ``consumers``
what each of them said, ``orders`` the uses to come of those that read in a fixed order; ``needs`` counts what they
need, ``commitments`` the decisions that are not carried out yet; ``hunger`` says who needs a fetch now, ``division``
which datasets may take room from which, ``room`` how to make room for a shard, and ``policy`` decides what to fetch, in
a ``situation``; where uses to come are known, ``future`` says what each shard is worth and ``planned`` decides by that;
``eviction`` says which files may be evicted at all; ``worth`` which for a shard that a draining daemon hands over;
``origin_estimate`` measures how fast fills are.

    needs.report(...)                    reports in
    decide(needs, situation)             decisions out
    needs.commit(decision)               carried out exactly: store.reserve(..., evict=decision.evict)
    needs.arrived(...), needs.gone(...)  events of the store
    needs.end(decision.recipe)           the fetch ended, successfully or not
"""

from quiver.residency.commitments import Commitments, Decision, Recipe
from quiver.residency.eviction import IDLE_SECONDS, Candidates, OnBehalf, Shelf, StoredFile, choose_idle
from quiver.residency.leases import CONSUMERS_MAX, Lease, Leases
from quiver.residency.needs import Needs
from quiver.residency.origin_estimate import OriginEstimate, OriginEstimator
from quiver.residency.policy import decide
from quiver.residency.report import CONSUMER_BYTES, ConsumerReport, Measured, rounded_up
from quiver.residency.situation import Situation

__all__ = [
    "CONSUMERS_MAX",
    "CONSUMER_BYTES",
    "IDLE_SECONDS",
    "Candidates",
    "Commitments",
    "ConsumerReport",
    "Decision",
    "Lease",
    "Leases",
    "Measured",
    "Needs",
    "OnBehalf",
    "OriginEstimate",
    "OriginEstimator",
    "Recipe",
    "Shelf",
    "Situation",
    "StoredFile",
    "choose_idle",
    "decide",
    "rounded_up",
]
