"""A sample written down as one coroutine of the user's, `task.generate=my_lab.agents:search`: what an environment does
in three methods, in the order in which it happens.

    async def search(problem, sample):
        said = await sample.say()               # what the policy says, up to the end of its turn
        sample.hear(look_up(said))              # what it reads before it goes on
        return judge(await sample.say())        # the sample is over; its reward, or None: the task's own

And an evaluation of the user's own, besides held-out accuracy: `eval.function=my_lab.evaluation:robustness`.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from harness.config.fields import ConfigError
from harness.config.plugins import check_called, keywords, load
from harness.protocols import Sampling
from harness.tasks.environment import Environment, Step
from harness.tasks.reward import score_of
from harness.tasks.task import EXTRA_NAME, Problem, Sample, Score, Task


class Conversation:
    """One sample, as the function that plays it sees it. seed: of this sample in this run, the same under every
    schedule."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._asks = asyncio.Event()
        self._asked = 0
        self._heard: list[str] = []

    async def say(self) -> str:
        """The policy's next turn, without the token that ends it. Raises ValueError where it has had one already and
        heard nothing since."""
        if self._asked and not self._heard:
            raise ValueError("the policy has spoken and heard nothing since: call hear(...) before the next say()")
        self._asked += 1
        self._asks.set()
        return await self._said.get()

    def hear(self, text: str) -> None:
        """Let the policy read this before its next turn. Raises ValueError before its first one: that is the
        prompt's."""
        if not self._asked:
            raise ValueError("the policy speaks first, to its prompt: what it is to read before belongs into the task")
        self._heard.append(text)


Generate = Callable[[Problem, Conversation], Awaitable[float | None]]


@dataclass
class _Play:
    problem: Problem
    sample: Conversation
    task: asyncio.Task[float | None] | None = None


@dataclass(frozen=True)
class GeneratedTurns:
    """`harness.tasks.Environment`: runs the function beside the policy, from turn to turn."""

    generate: Generate
    max_turns: int
    step_timeout_s: float

    async def reset(self, problem: Problem, seed: int) -> _Play:
        return _Play(problem, Conversation(seed))

    async def step(self, state: _Play, action: str) -> Step:
        """Go on with the function until it asks for another turn, or is over."""
        sample = state.sample
        if state.task is None:
            state.task = asyncio.ensure_future(self.generate(state.problem, sample))
            await _either(sample._asks, state.task)  # the turn is there already
            if state.task.done():
                return Step("", done=True, reward=state.task.result())
        sample._asks.clear()
        sample._heard.clear()
        sample._said.put_nowait(action)
        await _either(sample._asks, state.task)
        if state.task.done():
            return Step("", done=True, reward=state.task.result())
        return Step("".join(sample._heard), done=False)

    async def close(self, state: _Play) -> None:
        """End the function with its sample, whatever it waits for."""
        if state.task is not None and not state.task.done():
            state.task.cancel()
            await asyncio.wait([state.task])


async def _either(event: asyncio.Event, task: asyncio.Task[Any]) -> None:
    waits = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waits, task], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waits.cancel()


@dataclass(frozen=True)
class Generated:
    """A task whose samples a function plays. What it returns is their reward; None leaves that to the task."""

    task: Task
    environment: Environment = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for before there is a task, by who unpickles it
            raise AttributeError(name)
        return getattr(self.task, name)

    async def score(self, sample: Sample) -> Score:
        """Score the sample by the task, with the function's reward where it gave one."""
        score = await score_of(self.task, sample)
        return score if sample.environment_reward is None else replace(score, reward=sample.environment_reward)


def generated(task: Task, path: str, options: Mapping[str, Any], *, turns: int, timeout_s: float) -> Generated:
    """The task, its samples played by the function that `path` names. Raises ConfigError where that is no coroutine of
    a problem and a sample, or has no such options."""
    found = _coroutine("task.generate", path, 2, "await generate(problem, sample)")
    play = partial(found, **keywords(found, options, "task.generate_options", path))
    return Generated(task, GeneratedTurns(play, turns, timeout_s))


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
    evaluate: Evaluate = _coroutine("eval.function", path, 1, "await evaluate(policy)")
    return evaluate


def _coroutine(setting: str, path: str, positional: int, call: str) -> Any:
    found = load(path, setting)
    check_called(found, positional, setting, path, call)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"{setting}={path} is no coroutine; write `async def`")
    return found


async def found_by(path: str, policy: EvaluatedPolicy) -> dict[str, float]:
    """Raises ValueError for a name that cannot be a metric's, and for what is no finite number."""
    found = {name: float(value) for name, value in (await evaluation_of(path)(policy)).items()}
    for name, value in found.items():
        if not EXTRA_NAME.fullmatch(name) or not math.isfinite(value):
            raise ValueError(
                f"eval.function={path} found {name!r}: {value}; use a-z 0-9 _ . - and / in names, and finite numbers"
            )
    return found
