"""Held-out accuracy of the versions of a run: the job stands still meanwhile, its clock too.

Everything is held where it is: trainers and stages after the micro-batch that they compute, engines after the token
that they sample (`harness.workers.held_engine`). Then clocks stop, all engines share the held-out problems, and the
job's own reward scores them. What the job was doing goes on afterwards, at the time at which it was stopped: so no
time, lag or throughput of the run has any of it. Where nothing is sampled, as in simulations, nothing is evaluated.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, TypeVar

import numpy as np

from harness.config import EvalConfig
from harness.driver.endings import NothingScored
from harness.metrics.definitions import CUSTOM
from harness.protocols import Completion, Request, Sampling
from harness.runtime.messages import BYTES_OF_A_TOKEN, FRAME_LIMIT
from harness.runtime.runtime import Handle, RealClock, Runtime, ask_all
from harness.tasks import Problem, Sample, Task, extra_metrics
from harness.tasks.generation import EvaluatedPolicy, found_by
from harness.transfer_queue import Ragged
from harness.weight_sync.membership import Fleet
from harness.workers.rollout import RolloutRole
from harness.workers.stages import Judged, RewardStage, completed_sample
from harness.workers.turns import ComputingRole

T = TypeVar("T")

FIRST_SAMPLE = 1 << 40
"""Ids of held-out samples begin here: no sample of training has such a one, so the two never share a draw."""
MOST_SAMPLES = 1 << 12
"""Samples of one problem, at most."""
FIRST_OWN_SAMPLE = 1 << 41
"""Number of the first sample that a function of the user's asks for."""


@dataclass(frozen=True)
class Evaluated:
    """The results of one version, as a line of eval.jsonl.

    greedy, reward, sampled and pass_at_k are of responses that were scored; failed: how many could not be.
    at_s: the run's clock, which stood still; greedy, reward: share of greedy responses that are right, and their mean
    reward; sampled, pass_at_k: of k sampled responses each, the share that is right, and the share of problems with one
    that is; None where k is 0. truncated: share of greedy responses that the limit ended. tokens: of all responses.
    seconds: that the job stood still, wait for the present micro-batches aside; device_s: the same, of all devices.
    custom: what a function of the user's found.
    """

    version: int
    at_s: float
    problems: int
    k: int
    greedy: float
    reward: float
    sampled: float | None
    pass_at_k: float | None
    truncated: float
    tokens: int
    seconds: float
    device_s: float
    custom: dict[str, float] = field(default_factory=dict)
    failed: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/*` of metrics.jsonl."""
        found = {
            "eval/version": float(self.version),
            "eval/greedy": self.greedy,
            "eval/reward": self.reward,
            "eval/device_s": self.device_s,
            "eval/failed": float(self.failed),
        }
        if self.sampled is not None and self.pass_at_k is not None:
            found |= {"eval/sampled": self.sampled, "eval/pass_at_k": self.pass_at_k}
        return found | {f"eval/{CUSTOM}{name}": value for name, value in self.custom.items()}


class Evaluation:
    """Evaluates every `settings.period`-th version, version 0, and the last one.

    sampling: of training, by which the k responses are sampled, with the same draws for every version; greedy ones have
    its limits. seed: of the run; problems are the same for all seeds. hear: is told what was found, and the responses,
    as columns of eval_responses.parquet. newest: that was evaluated last. It has twelve parameters, as it holds every
    part of a job, and asks three of them.
    """

    def __init__(
        self,
        settings: EvalConfig,
        *,
        task: Task,
        sampling: Sampling,
        iterations: int,
        devices: int,
        fleet: Fleet[RolloutRole],
        reward: Handle[RewardStage],
        others: Sequence[Handle[ComputingRole]],
        runtime: Runtime,
        clock: RealClock,
        hear: Callable[[Evaluated, Mapping[str, Any]], None],
        newest: int = -1,
    ) -> None:
        self.settings, self.task, self.sampling = settings, task, sampling
        self.iterations, self.devices = iterations, devices
        self.fleet, self.reward, self.others = fleet, reward, others
        self.runtime, self.clock, self.hear = runtime, clock, hear
        self.newest = newest

    def due(self, version: int) -> bool:
        """Whether this version is to be evaluated: the first that engines get from each `every`-th one on."""
        passed = version // self.settings.period > self.newest // self.settings.period
        return passed or self.newest < version == self.iterations

    async def evaluate(self, version: int) -> None:
        """Evaluate a version by the engines that hold it; by none, where an engine that was started again holds a newer
        one. Returns when the job goes on."""
        await self.fleet.any_back(None)
        async with self._standing_still() as held:
            versions = self.fleet.membership.versions
            engines = [engine for engine in held if versions[engine.name] == version]
            if not engines:
                return
            start = time.monotonic()
            problems, requests = self._requests()
            completions = await self._completed(engines, problems, requests)
            judged = await self._judged(problems, requests, completions)
            custom = await self._custom(engines, version)
            seconds = time.monotonic() - start
            found = self._found(version, completions, judged, seconds, custom)
            responses = self._responses(version, problems, completions, judged)
        self.newest = version
        self.hear(found, responses)

    async def _completed(
        self, engines: Sequence[Handle[RolloutRole]], problems: Sequence[Problem], requests: Sequence[Request]
    ) -> list[Completion]:
        """Completions by all engines together, in the order of the requests; a problem for each."""
        asked = list(zip(requests, (problem.answer for problem in problems), strict=True))

        async def complete(engine: Handle[RolloutRole], share: Sequence[tuple[Request, str]]) -> list[Completion]:
            done: list[Completion] = []
            for part in in_calls(share, [self._size_of(request) for request, _ in share]):
                requests, answers = map(list, zip(*part, strict=True))
                done += await engine.role.evaluate(requests, answers)
            return done

        async with asyncio.TaskGroup() as tasks:
            shares = [
                tasks.create_task(complete(engine, asked[place :: len(engines)]))
                for place, engine in enumerate(engines)
            ]
        done = {completion.sample_id: completion for task in shares for completion in task.result()}
        return [done[request.sample_id] for request in requests]

    def _size_of(self, request: Request) -> int:
        """The most bytes that a message has of this request and of its completion."""
        sampling = request.sampling or self.sampling
        return 1024 + BYTES_OF_A_TOKEN * (len(request.prompt) + sampling.max_tokens)

    async def _judged(
        self, problems: Sequence[Problem], requests: Sequence[Request], completions: Sequence[Completion]
    ) -> Judged:
        """The scores of the completions."""
        judged = Judged()
        sizes = [self._size_of(request) for request in requests]
        for part in in_calls(list(zip(problems, completions, strict=True)), sizes):
            judged = judged.joined(await self.reward.role.evaluate(*map(list, zip(*part, strict=True))))
        return judged

    async def _custom(self, engines: Sequence[Handle[RolloutRole]], version: int) -> dict[str, float]:
        """Values that the user's function finds, of responses that it asks for."""
        if self.settings.function is None:
            return {}
        numbers = count(FIRST_OWN_SAMPLE)  # from the first again with every version: the same draws

        async def sample(problems: Sequence[Problem], sampling: Sampling) -> list[Sample]:
            requests = [Request(next(numbers), problem.prompt, sampling=sampling) for problem in problems]
            completions = await self._completed(engines, problems, requests)
            return [completed_sample(self.task, p, c) for p, c in zip(problems, completions, strict=True)]

        return await found_by(self.settings.function, EvaluatedPolicy(version, self.task, self.sampling, sample))

    @cached_property
    def _problems(self) -> list[Problem]:
        """Each once: where the task holds out fewer than are asked for, it begins again."""
        asked = [self.task.held_out(index).numbered(index) for index in range(self.settings.samples)]
        return list({(problem.prompt.tobytes(), problem.answer): problem for problem in asked}.values())

    def _requests(self) -> tuple[list[Problem], list[Request]]:
        """Each problem as often as it is answered: once greedily, then k times. A problem and a request for each."""
        greedy = replace(self.sampling, temperature=0.0, top_p=1.0)
        problems, requests = [], []
        for index, problem in enumerate(self._problems):
            for number in range(1 + self.settings.k):
                sample = FIRST_SAMPLE + index * MOST_SAMPLES + number
                problems.append(problem)
                requests.append(Request(sample, problem.prompt, sampling=self.sampling if number else greedy))
        return problems, requests

    def _responses(
        self, version: int, problems: Sequence[Problem], completions: Sequence[Completion], judged: Judged
    ) -> dict[str, Any]:
        """Columns of eval_responses.parquet."""
        count, each = len(problems), 1 + self.settings.k
        masks = [np.ones(len(one.tokens), np.bool_) if one.mask is None else one.mask for one in completions]
        named = zip(extra_metrics(self.task), zip(*judged.extras, strict=True), strict=False)
        return {
            "version": [version] * count,
            "row": [problem.row for problem in problems],
            "number": [place % each for place in range(count)],
            "prompt": Ragged.from_rows([problem.prompt for problem in problems]),
            "answer": [problem.answer for problem in problems],
            "response": Ragged.from_rows([one.tokens for one in completions]),
            "loss_mask": Ragged.from_rows(masks),
            "reward": [None if math.isnan(reward) else reward for reward in judged.rewards],
            "exact_match": [
                None if math.isnan(reward) else exact
                for reward, exact in zip(judged.rewards, judged.exact, strict=True)
            ],
            "failure": [why or None for why in judged.failures],
            "finish_reason": [one.finish_reason for one in completions],
            "turns": [one.turns for one in completions],
            **{CUSTOM + name: [None if math.isnan(value) else value for value in values] for name, values in named},
        }

    def _found(
        self, version: int, completions: Sequence[Completion], judged: Judged, seconds: float, custom: dict[str, float]
    ) -> Evaluated:
        settings, rewards = self.settings, np.array(judged.rewards)
        right = np.where(np.isnan(rewards), np.nan, judged.exact).reshape(-1, 1 + settings.k)
        for part, which in ((right[:, :1], "greedy"), (right[:, 1:], "sampled")):
            if part.size and np.isnan(part).all():
                which = f"the {part.size} {which} responses to held-out problems"
                raise NothingScored(which, next(filter(None, judged.failures)))
        said = right[:, 1:][~np.isnan(right[:, 1:]).all(1)]  # of problems of which a sampled response was scored
        greedy = completions[:: 1 + settings.k]
        return Evaluated(
            version=version,
            at_s=self.clock.now() if version else 0.0,  # before the schedule the clock counts from the start of the run
            problems=len(right),
            k=settings.k,
            greedy=float(np.nanmean(right[:, 0])),
            reward=float(np.nanmean(rewards[:: 1 + settings.k])),
            sampled=float(np.nanmean(said)) if said.size else None,
            pass_at_k=float(np.nanmax(said, axis=1).mean()) if said.size else None,
            truncated=float(np.mean([completion.finish_reason == "length" for completion in greedy])),
            tokens=sum(len(completion.tokens) for completion in completions),
            seconds=seconds,
            device_s=seconds * self.devices,
            custom=custom,
            failed=sum(map(bool, judged.failures)),
        )

    @asynccontextmanager
    async def _standing_still(self) -> AsyncIterator[Sequence[Handle[RolloutRole]]]:
        """The job, and its clock. Engines last: they work on while others come to the end of what they compute."""
        engines = list(self.fleet.working)
        while any(await ask_all(self.others, lambda role: role.hold())):
            continue  # one that waited for a device may have got it when another's turn was over
        await ask_all(engines, lambda engine: engine.hold())
        at = max(self.clock.stop(), await self.runtime.stop_clocks())
        yield engines
        self.clock.restart(at)
        await self.runtime.start_clocks(self.clock)
        await ask_all(engines, lambda engine: engine.let_go())
        await ask_all(self.others, lambda role: role.let_go())


def in_calls(items: Sequence[T], sizes: Sequence[int], limit: int = FRAME_LIMIT) -> Iterator[list[T]]:
    """Items in order, as many at a time as a message has room for, one at least. sizes: bytes of each, at most."""
    part: list[T] = []
    left = limit
    for item, size in zip(items, sizes, strict=True):
        if part and size > left:
            yield part
            part, left = [], limit
        part.append(item)
        left -= size
    if part:
        yield part
