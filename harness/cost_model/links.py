"""What collectives cost on rings of devices: bytes over bandwidth. Latency is counted where collectives are counted.

Each of n devices sends and receives (n - 1) / n of the bytes in an all-gather or a reduce-scatter, and twice that in an
all-reduce (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005; NCCL
tests, PERFORMANCE.md).
"""

from __future__ import annotations

from harness.config import DeviceConfig, RooflineConfig


def ring_bytes_per_s(devices: int, device: DeviceConfig, factors: RooflineConfig, *, apart: int = 1) -> float:
    """What each of `devices` devices sends at once, each `apart` devices from the next.

    Inside of a node: the link. Across nodes: rings enter and leave a node by the network of every member in it, so that
    the slower of the link and of these networks together decides.
    """
    if devices * apart <= device.per_node:
        return device.link_bytes_per_s * factors.network_share
    members = max(1, device.per_node // apart)
    return min(device.link_bytes_per_s, members * device.network_bytes_per_s) * factors.network_share


def gather_s(number: float, devices: int, bytes_per_s: float) -> float:
    """Seconds until every device has all `number` bytes, of which each had its share; also of a reduce-scatter."""
    return (devices - 1) / devices * number / bytes_per_s


def all_to_all_s(
    number: float, devices: int, device: DeviceConfig, factors: RooflineConfig, *, apart: int = 1
) -> float:
    """Seconds until each of `devices` devices, `apart` from the next, has sent `number` bytes in equal parts to all of
    them, itself included: by the link to those in its node, and by its own network to the others meanwhile (GShard:
    Lepikhin et al., arXiv 2006.16668, section 3.3)."""
    near = min(devices, max(1, device.per_node // apart))
    by_link = (near - 1) / devices * number / device.link_bytes_per_s
    by_network = (devices - near) / devices * number / device.network_bytes_per_s
    return max(by_link, by_network) / factors.network_share


def all_reduce_s(number: float, devices: int, bytes_per_s: float) -> float:
    """Seconds until every device has the sum of all devices' `number` bytes."""
    return 2 * gather_s(number, devices, bytes_per_s)
