"""An evaluation of your own: eval.function=my_lab.evaluation:agreement (docs/plugins.md)."""

from collections.abc import Mapping

import numpy as np

from harness.tasks.generation import EvaluatedPolicy


async def agreement(policy: EvaluatedPolicy) -> Mapping[str, float]:
    """How often four sampled responses to a problem are one and the same."""
    problems = [policy.task.held_out(index) for index in range(16)]
    answers = await policy.answers(problems, 4, greedy=False)
    return {"agreement": float(np.mean([len({one.response for one in four}) == 1 for four in answers]))}
