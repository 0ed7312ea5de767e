"""The fast event model: the schedule's own file over fronts that keep no queue, no rows and no records, so that a job
of thousands of samples takes milliseconds where `simulate` takes seconds. Engines decode by the rules of
`engines.simulated.decoding`, the same lengths at the same seed; an engine goes at once to its next moment that anybody
waits for.

What it does not cover (`not_covered`) is left to `simulate`, and the result says so.
"""

from harness.driver.event_model.job import FastSteps
from harness.driver.event_model.model import difference, fast_steps, not_covered, simulated_steps

__all__ = ["FastSteps", "difference", "fast_steps", "not_covered", "simulated_steps"]
