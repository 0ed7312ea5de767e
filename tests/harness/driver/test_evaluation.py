"""Held-out accuracy of a version: what is asked of whom, what comes out, and a clock that stands still."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.config import EvalConfig
from harness.config.compose import compose_job
from harness.driver.endings import NothingScored
from harness.driver.evaluation import FIRST_SAMPLE, MOST_SAMPLES, Evaluated, Evaluation, in_calls
from harness.protocols import Completion, Request, Sampling
from harness.runtime.runtime import RealClock
from harness.tasks import Problem, make_task
from harness.weight_sync.membership import Fleet
from harness.workers.stages import Judged

TASK = make_task(compose_job([]))
TRAINING = Sampling(max_tokens=9, temperature=0.8, top_p=1.0, stop_tokens=TASK.stop_tokens)
PROBLEMS, K = 5, 3


class Job:
    """Two engines, a trainer and the reward, which write down what is asked of them; greedy responses are right for
    even problems, the j-th sampled one for problems above j."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.asked: dict[str, list[Request]] = {}
        self.clock, self.found = RealClock.starting_now(), list[Evaluated]()
        self.responses: list[Any] = []
        self.times: list[float] = []
        self.unscored = set[tuple[int, int]]()  # problems, and numbers of their responses
        self.fleet: Any = Fleet([self.role("rollout[0]"), self.role("rollout[1]")])
        self.evaluation: Any = Evaluation(
            EvalConfig(every=2, samples=PROBLEMS, k=K),
            task=TASK,
            sampling=TRAINING,
            iterations=7,
            devices=3,
            fleet=self.fleet,
            reward=SimpleNamespace(name="reward[0]", role=self),  # type: ignore[arg-type]
            others=[self.role("actor[0]")],
            runtime=self,  # type: ignore[arg-type]
            clock=self.clock,
            hear=lambda found, responses: (self.found.append(found), self.responses.append(responses)),
        )

    async def evaluate_held(self, version: int) -> None:
        """Evaluate a version that all engines hold."""
        for engine in self.fleet.working:
            self.fleet.membership.set_version(engine.name, version)
        await self.evaluation.evaluate(version)

    def role(self, name: str) -> Any:
        async def hold() -> bool:
            self.log.append(f"hold {name}")
            return self.log.count(f"hold {name}") == 1

        async def let_go() -> None:
            self.log.append(f"let go {name}")

        async def generate(requests: list[Request], answers: list[str]) -> list[Completion]:
            for request, answer in zip(requests, answers, strict=True):
                assert answer == TASK.held_out((request.sample_id - FIRST_SAMPLE) // MOST_SAMPLES).answer
            self.asked[name] = requests
            self.times.append(self.clock.now())
            await asyncio.sleep(0)
            self.times.append(self.clock.now())
            return [completion(request) for request in requests]

        async def end() -> None:
            self.log.append(f"end {name}")

        return SimpleNamespace(name=name, role=SimpleNamespace(hold=hold, let_go=let_go, evaluate=generate), end=end)

    async def stop_clocks(self) -> float:
        self.log.append("stop")
        return self.clock.now()

    async def start_clocks(self, clock: RealClock) -> None:
        assert clock is self.clock
        self.log.append("start")

    async def evaluate(self, problems: list[Problem], completions: list[Completion]) -> Judged:
        """The reward's."""
        held_out = [TASK.held_out(index) for index in range(PROBLEMS)]
        exact, failures = [], []
        for problem, done in zip(problems, completions, strict=True):
            index, number = divmod(done.sample_id - FIRST_SAMPLE, MOST_SAMPLES)
            assert problem.answer == held_out[index].answer
            failures.append("the judge is away" if (index, number) in self.unscored else "")
            exact.append(not failures[-1] and (index >= number if number else index % 2 == 0))
        rewards = [math.nan if why else 0.5 + 0.5 * one for one, why in zip(exact, failures, strict=True)]
        return Judged(rewards, exact, [[]] * len(exact), failures)


def completion(request: Request) -> Completion:
    tokens = np.arange(4)
    index = (request.sample_id - FIRST_SAMPLE) // MOST_SAMPLES
    reason = "length" if index == 0 else "stop"
    return Completion(request.sample_id, tokens, np.zeros(4, np.float32), tokens, reason, 0.0, 1.0)


async def test_what_is_found_is_counted_by_problem_and_tied_to_the_version() -> None:
    job = Job()
    await job.evaluate_held(4)
    (found,) = job.found
    assert (found.version, found.problems, found.k, found.tokens) == (4, PROBLEMS, K, PROBLEMS * (1 + K) * 4)
    assert found.greedy == 3 / 5 and found.reward == pytest.approx(0.8) and found.truncated == 1 / 5
    assert found.sampled == (0 + 1 + 2 + 3 + 3) / 15 and found.pass_at_k == 4 / 5
    assert found.device_s == pytest.approx(3 * found.seconds)
    names = ("version", "greedy", "reward", "sampled", "pass_at_k", "device_s", "failed")
    assert found.metrics.keys() == {f"eval/{name}" for name in names}
    alone = replace(found, sampled=None, pass_at_k=None)
    assert "eval/sampled" not in alone.metrics


async def test_every_response_is_told_and_one_without_a_score_is_no_wrong_one() -> None:
    job = Job()
    await job.evaluate_held(4)
    (told,) = job.responses
    assert told["version"] == [4] * PROBLEMS * (1 + K) and told["number"] == list(range(1 + K)) * PROBLEMS
    for place, row in enumerate(told["row"]):
        held_out = TASK.held_out(place // (1 + K))
        assert row == str(place // (1 + K)) and told["answer"][place] == held_out.answer
        assert told["prompt"].rows()[place].tolist() == held_out.prompt.tolist()
        assert told["reward"][place] == 0.5 + 0.5 * told["exact_match"][place]
    assert told["finish_reason"].count("length") == 1 + K and set(told["response"].lengths) == {4}
    job = Job()
    job.unscored = {(0, 0), (1, 0), (2, 3), *((0, number) for number in range(1, 1 + K))}
    await job.evaluate_held(4)
    (found,) = job.found
    assert found.failed == found.metrics["eval/failed"] == 3 + K
    assert found.greedy == 2 / 3 and found.reward == pytest.approx((1 + 0.5 + 1) / 3)
    assert found.sampled == (1 + 2 + 3 + 3) / 11 and found.pass_at_k == 1.0
    for numbers, which in ((range(1), "5 greedy"), (range(1, 1 + K), "15 sampled")):
        job.unscored = {(index, number) for index in range(PROBLEMS) for number in numbers}
        with pytest.raises(NothingScored, match=f"none of the {which} responses to held-out problems could be scored"):
            await job.evaluate_held(6)


async def test_engines_share_the_problems_each_answered_greedily_and_k_times_with_draws_of_its_own() -> None:
    job = Job()
    await job.evaluate_held(0)
    first, second = job.asked["rollout[0]"], job.asked["rollout[1]"]
    assert abs(len(first) - len(second)) <= 1
    every = sorted([*first, *second], key=lambda request: request.sample_id)
    assert len({request.sample_id for request in every}) == PROBLEMS * (1 + K)
    for place, request in enumerate(every):
        assert request.prompt.tolist() == TASK.held_out(place // (1 + K)).prompt.tolist()
        greedy = place % (1 + K) == 0
        assert request.sampling == (replace(TRAINING, temperature=0.0) if greedy else TRAINING)


async def test_the_job_stands_still_meanwhile_and_so_does_its_clock() -> None:
    job = Job()
    await job.evaluate_held(0)
    assert job.log == [
        *("hold actor[0]", "hold actor[0]", "hold rollout[0]", "hold rollout[1]", "stop"),
        *("start", "let go rollout[0]", "let go rollout[1]", "let go actor[0]"),
    ]
    assert len(set(job.times)) == 1, "the clock went on"
    assert job.clock.now() - job.times[0] < job.found[0].seconds + 60 and job.clock.now() >= job.times[0]


async def test_engines_that_hold_another_version_have_no_share_and_one_that_is_started_again_is_waited_for() -> None:
    job = Job()
    first, second = (engine.name for engine in job.fleet.working)

    async def start_again(engine: Any, why: str) -> int:
        await asyncio.sleep(0)
        assert not job.found, "nobody holds a version meanwhile"
        return 4

    job.fleet.membership.set_version(first, 4)
    job.fleet.membership.set_version(second, 5)
    await job.evaluation.evaluate(4)
    assert list(job.asked) == [first] and len(job.asked[first]) == PROBLEMS * (1 + K)
    job.asked.clear()
    job.found.clear()
    job.fleet.replace = start_again
    await job.fleet.lose({first: "killed", second: "killed"})
    await job.evaluation.evaluate(3)
    assert not job.found and job.evaluation.newest == 4, "both came back with version 4"
    await job.evaluation.evaluate(4)
    assert len(job.found) == 1 and list(job.asked) == [first, second]


def test_due_versions_are_the_first_from_each_multiple_on_and_calls_are_cut() -> None:
    evaluation = Job().evaluation

    def evaluated(versions: range | list[int]) -> list[int]:
        evaluation.newest, found = -1, []
        for version in versions:
            if evaluation.due(version):
                evaluation.newest = version
                found.append(version)
        return found

    assert evaluated(range(8)) == [0, 2, 4, 6, 7]
    assert evaluated([0, 3, 6, 7]) == [0, 3, 6, 7], "of versions in between engines get none"
    assert evaluated([0, 2, 2, 7, 7]) == [0, 2, 7]
    assert list(in_calls("abcde", [4, 6, 1, 20, 1], limit=10)) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(in_calls("", [])) == []
