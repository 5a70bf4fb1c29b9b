"""Capacity planning: what a fleet of racks would give a list of jobs, by simulation.

``fleet`` reads FLEET.toml, ``trace`` the jobs in a CSV file, ``amounts`` sizes, rates and durations in both;
``placement`` says which rack runs which job, ``rack`` simulates one rack under one policy, on a fake clock and with
the policy's own code (``quiver.allocation``), and ``report`` sums up. Nothing here reads data or asks a daemon: it
needs the kernel alone.
"""

from quiver_client.planning.fleet import Fleet, read_fleet
from quiver_client.planning.report import Outcome, simulate

__all__ = ["Fleet", "Outcome", "read_fleet", "simulate"]
