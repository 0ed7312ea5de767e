"""What a picture or a table row says of the run it shows."""

from __future__ import annotations

from harness.metrics.manifest import RunIdentity

HOW_TIMED = {"real": "measured", "virtual": "simulated", "paced": "paced by the cost model"}


def run_title(identity: RunIdentity) -> str:
    """Schedule, model, seed, and whether times were measured or simulated."""
    parts = [identity.schedule, identity.model, f"seed {identity.seed}", HOW_TIMED[identity.backend]]
    return " · ".join(parts + ["smoke run"] * identity.smoke)


ENGINE_EVENTS = {
    "lost": "was lost, and the run went on without it",
    "leaves": "was to leave, and takes no more samples",
    "left": "has left",
    "joins": "is to come back with the next weights",
    "works": "works again",
}
"""What can happen to a rollout engine in the middle of a run."""
