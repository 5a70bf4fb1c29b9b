"""What is needed, what is fetched for it and what is evicted: pure functions of values, the same for every cache.

``report`` is what a consumer says, ``messages`` how it travels; ``leases`` knows who has a place, ``needs`` counts what
all of them need, ``commitments`` what was decided and is not carried out yet; ``policy`` decides what to fetch and all
that is evicted for it, ``eviction`` which files may be evicted at all; ``origin_estimate`` says how fast shards come.

    needs.report(...)                    reports in
    decide(needs, situation)             decisions out
    needs.commit(decision)               each carried out as it stands: store.reserve(..., evict=decision.evict)
    needs.arrived(...), needs.gone(...)  what the store says
    needs.end(decision.recipe)           the fetch ended, whatever came of it
"""

from quiver.residency.commitments import Commitments, Decision, Recipe
from quiver.residency.eviction import IDLE_SECONDS, Candidates, OnBehalf, Shelf, StoredFile, choose_idle
from quiver.residency.leases import CONSUMERS_MAX, Lease, Leases
from quiver.residency.needs import Needs
from quiver.residency.origin_estimate import OriginEstimate, OriginEstimator
from quiver.residency.policy import Situation, decide
from quiver.residency.report import CONSUMER_BYTES, Report, rounded_up

__all__ = [
    "CONSUMERS_MAX",
    "CONSUMER_BYTES",
    "IDLE_SECONDS",
    "Candidates",
    "Commitments",
    "Decision",
    "Lease",
    "Leases",
    "Needs",
    "OnBehalf",
    "OriginEstimate",
    "OriginEstimator",
    "Recipe",
    "Report",
    "Shelf",
    "Situation",
    "StoredFile",
    "choose_idle",
    "decide",
    "rounded_up",
]
