"""How much of the cache, and of the origin's bandwidth, each dataset gets: pure functions of values.

    allocate(problem, policy) -> Allocation

``values`` has what a policy is told and what it answers, ``instance`` arranges that as arrays, ``solve`` is the way
through. ``charges`` keeps to quotas, ``knapsack`` finds the bytes that are worth most, ``equal_split`` what everybody
has if all is divided. ``fair`` raises everybody from there (max-min), ``throughput`` looks for the most in all, with
``grid`` where datasets are few, ``attained`` serves first who was served least. ``reasons`` puts shares in words, and
``gain`` says whether a new allocation is worth moving data for.

The model, and where it is wrong: docs/adr/0036.
"""

from quiver.allocation.gain import is_clearly_better
from quiver.allocation.solve import allocate
from quiver.allocation.values import Allocation, DatasetDemand, Policy, Problem, Reader, Share

__all__ = ["Allocation", "DatasetDemand", "Policy", "Problem", "Reader", "Share", "allocate", "is_clearly_better"]
