"""An evaluation of the user's own, besides held-out accuracy: `eval.function=my_lab.evaluation:robustness`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.config.fields import ConfigError
from harness.config.plugins import check_called, load
from harness.protocols import Sampling
from harness.tasks.task import EXTRA_NAME, Problem, Sample, Task

Sampled = Callable[[Sequence[Problem], Sampling], Awaitable[list[Sample]]]
"""A response to each problem."""


@dataclass(frozen=True)
class EvaluatedPolicy:
    """One version of the policy, while the job and its clock stand still. sampling: of training."""

    version: int
    task: Task
    sampling: Sampling = field(repr=False)
    _sample: Sampled = field(repr=False)

    async def answers(self, problems: Sequence[Problem], n: int = 1, *, greedy: bool = True) -> list[list[Sample]]:
        """n responses to each problem, by all engines together, as rewards read them; `greedy`, or sampled as in
        training. The same calls get the same draws with every version."""
        sampling = replace(self.sampling, temperature=0.0, top_p=1.0) if greedy else self.sampling
        samples = await self._sample([problem for problem in problems for _ in range(n)], sampling)
        return [samples[at : at + n] for at in range(0, len(samples), n)]


Evaluate = Callable[[EvaluatedPolicy], Awaitable[Mapping[str, float]]]
"""Numbers by name: `eval/custom/<name>` of metrics.jsonl, `custom` of eval.jsonl."""


def evaluation_of(path: str) -> Evaluate:
    """The function that `eval.function` names. Raises ConfigError where that is no coroutine of a policy."""
    found: Any = load(path, "eval.function")
    check_called(found, 1, "eval.function", path, "await evaluate(policy)")
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"eval.function={path} is no coroutine; write `async def`")
    evaluate: Evaluate = found
    return evaluate


async def found_by(path: str, policy: EvaluatedPolicy) -> dict[str, float]:
    """Raises ValueError for a name that cannot be a metric's, and for what is no finite number."""
    found = {name: float(value) for name, value in (await evaluation_of(path)(policy)).items()}
    for name, value in found.items():
        if not EXTRA_NAME.fullmatch(name) or not math.isfinite(value):
            raise ValueError(
                f"eval.function={path} found {name!r}: {value}; use a-z 0-9 _ . - and / in names, and finite numbers"
            )
    return found
