"""Refusals of what this engine cannot train, and what its completions can have. Loads no torch."""

from harness.config import JobConfig
from harness.config.model_folder import DRAWN, DRAWN_WITH_EXPERTS

GIVES_ROUTES = True
"""Completions can have the experts of their tokens."""


def refusal(config: JobConfig) -> str | None:
    """The reason why it cannot train this job, in words that name a fix; None where it can."""
    architecture, cuttable = config.model.architecture, (*DRAWN, *DRAWN_WITH_EXPERTS)
    for setting in ("tensor_parallel", "pipeline_parallel"):
        if (parts := getattr(config.training, setting)) > 1 and architecture not in cuttable:
            return (
                f"training.{setting}={parts}: layers of model.architecture={architecture} can be cut in simulation "
                f"only, real ones are those of {', '.join(cuttable)}; set it to 1, or backend=virtual"
            )
    return None
