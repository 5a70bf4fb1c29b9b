"""How much of the cache, and of the origin's bandwidth, each dataset gets: pure functions of values.

``values`` has what a policy is told and what it answers.
"""

from quiver.allocation.values import Allocation, DatasetDemand, Policy, Problem, Reader, Share

__all__ = ["Allocation", "DatasetDemand", "Policy", "Problem", "Reader", "Share"]
