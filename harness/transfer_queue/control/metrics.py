"""What `describe()` tells, as metrics: flat names, plain numbers. Sizes in rows and bytes, times with their unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def queue_metrics(described: Mapping[str, Any]) -> dict[str, float]:
    """`queue/<what>` of the whole queue, `queue/bytes/<column>` and `queue/<task>/<what>`, over all live partitions."""
    flat: dict[str, float] = {f"queue/{name}": described[name] for name in ("depth_samples", "live_rows", "bytes")}
    flat["queue/open_leases"] = described["open_leases"]
    flat["queue/partitions"] = len(described["partitions"])
    for column, size in described["column_bytes"].items():
        flat[f"queue/bytes/{column}"] = size
    for task, told in described["tasks"].items():
        flat |= {f"queue/{task}/{name}": told[name] for name in ("depth_samples", "ready", "oldest_s")}
        flat |= {
            f"queue/{task}/handout_{name}_ms": 1e3 * told["handout"][f"{name}_s"] for name in ("p50", "p99", "max")
        }
        flat[f"queue/{task}/waiting_gets"] = described.get("waiting_gets", {}).get(task, 0)
    return {name: float(value) for name, value in flat.items()}
