"""What runs may use: asked before one starts, without loading torch, and Ray only where a cluster is named."""

from __future__ import annotations

from harness.config.machine import Machine, this_machine
from harness.runtime.runtime import cluster_address


def machine_of_runs() -> Machine:
    """This machine, or the cluster that RAY_ADDRESS names. Raises ConfigError where that does not let us in."""
    if (address := cluster_address()) is None:
        return this_machine()
    from harness.runtime.ray_nodes import cluster_machine

    return cluster_machine(address)
