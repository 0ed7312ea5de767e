"""A simulated job of numbers: what its fronts share, and what came out."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from engines.simulated.passes import scoring_s, training_s
from harness.config import CostConfig, JobConfig
from harness.config.placement import ENGINE_ROLES, Placement
from harness.cost_model.cost import DecodeCost, transfer_times
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.transfer import sender_links
from harness.driver.event_model.engine import Engine, Moments
from harness.driver.event_model.fronts import Lent, Prompts, Rewards, Rollout, Scoring, Trainer, Weights
from harness.driver.event_model.queue import Arrivals, Frontier, Queue
from harness.driver.filtering import places_of
from harness.runtime.virtual_runtime import VirtualLoop
from harness.workers.stages import DrawnJudge
from harness.workers.turns import PlacedTurns
from schedules import Schedule
from schedules.base import BESIDE, gather


@dataclass(frozen=True)
class FastSteps:
    """The iterations of a job, float64 [iterations] each: seconds from one version to the next; of these, those in
    which an engine generated, a mean over engines; those for which the trainer waited for samples; mean lag of the
    samples trained, the worst of their tokens, and a mean over groups of their oldest; those that the slowest group
    took, from its engine to its end; those in which devices that take or give weights do nothing else; by device role
    those in which its devices work, for whatever role. dropped: samples, as stale or refused. not_covered: why the
    schedule's file itself was simulated; "" where the event model was enough."""

    seconds: NDArray[np.float64]
    generate_s: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    lag_mean: NDArray[np.float64]
    lag_worst: NDArray[np.float64]
    lag_first: NDArray[np.float64]
    longest_s: NDArray[np.float64]
    exposed_s: NDArray[np.float64]
    busy_s: Mapping[str, NDArray[np.float64]]
    dropped: int = 0
    not_covered: str = ""


class Job:
    """`schedules.protocol.Job`, and what its fronts share: many attributes."""

    def __init__(
        self,
        config: JobConfig,
        schedule: Schedule,
        placement: Placement,
        cost: CostConfig,
        seed: int,
        loop: asyncio.AbstractEventLoop,
        until: int | None = None,
        lent_cost: CostConfig | None = None,
    ) -> None:
        """lent_cost: of engines on training devices."""
        assert isinstance(loop, VirtualLoop)
        algorithm, devices = config.algorithm, placement.devices
        self.config, self.schedule, self.placement, self.cost = config, schedule, placement, cost
        self.iterations, self.batch, self.group_size = config.iterations, algorithm.batch_groups, algorithm.group_size
        self.in_order = schedule.order == "fifo"
        self.costs = {"rollout": cost, "lent": lent_cost or cost}
        self.decode = {role: DecodeCost.of(its) for role, its in self.costs.items()}
        lengths, groups = ResponseLengths.of_job(config, seed), self.iterations * self.batch
        self.refills, places = config.refills, places_of(config) if config.refills else None
        self._keeps = None if cost.filtered_share is None else DrawnJudge(cost.filtered_share, seed, self.group_size)
        self.queue = Queue(lengths, groups, self.batch, self.group_size, cost.prompt_tokens, places)
        self._loop, self.moments = loop, Moments(loop)
        self._stale, self._lacking = set[int](), dict[int, int]()
        self._ready_at = self._complete_at = 0
        counts = {
            role: len(its) // config.engine.tensor_parallel if role in ENGINE_ROLES else 1
            for role, its in devices.items()
        }
        self.turns_of = PlacedTurns(devices, counts, limit_s=None)
        rank_devices = config.training.ranks_together
        self.ranks = {role: len(its) // rank_devices for role, its in devices.items()}
        links = sender_links(config, schedule.transport, len(devices["actor"]), config.engine.tensor_parallel)
        self.times = transfer_times(cost, schedule.transport, links, self.ranks["actor"])
        self.load_s = {"rollout": self.times.load_s, "lent": transfer_times(cost, BESIDE, links).load_s}
        self._scored: dict[tuple[Sequence[int], int], float] = {}
        # fronts
        self.engines = [Engine(self, role, number) for role in ENGINE_ROLES for number in range(counts.get(role, 0))]
        self.generated, self.rewarded = Frontier(groups), Frontier(groups)
        window = schedule.window_groups(self.batch)
        self.arrivals = Arrivals(self.queue.part_of, window)
        self.complete = Arrivals(self.queue.part_of, window) if schedule.awaits_completion else None
        self.complete_groups, self.completes = 0, asyncio.Event()
        self.prompts, self.rollout = (
            Prompts(self),
            Rollout(self, [one for one in self.engines if one.role == "rollout"]),
        )
        self.lent = Lent(self, [one for one in self.engines if one.role == "lent"])
        self.rewards = Rewards(self)
        scoring = [role for role in ("reference", "actor_fwd") if role in devices]
        self.scoring = [Scoring(self, role, place) for place, role in enumerate(scoring)]
        self.stages = [self.rewards, *self.scoring]
        self.trainer, self.weights = Trainer(self), Weights(self)
        self._until, self._enough = until, loop.create_future()
        # what came out
        self._ends: list[float] = []
        self.generating_s = dict.fromkeys(ENGINE_ROLES, 0.0)  # of its engines, but for what is under way
        self.worked: dict[str, float] = {}  # seconds, of roles, of loading and of sending
        self._worked_s: list[dict[str, float]] = []  # as each iteration ended, those of an engine that generates too

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return self._loop.time()

    async def run(self) -> None:
        """Run the schedule's file to its end, or to that of the last iteration that is asked for. Raises ConfigError
        where a filter refuses too many groups."""
        whole = asyncio.ensure_future(gather(self._run(), *([self.rewards.judge()] if self.refills else [])))
        await asyncio.wait((whole, self._enough), return_when=asyncio.FIRST_COMPLETED)
        if whole.done():
            whole.result()

    async def _run(self) -> None:
        await self.schedule.run(self)  # type: ignore[arg-type]  # a Job by shape
        await self.weights.finish()
        self.rewards.end()

    def steps(self) -> FastSteps:
        """The iterations as they came out."""
        ended, queue = len(self._ends), self.queue
        lags, trained = np.arange(ended), np.array(self.trainer.trained[:ended])
        return FastSteps(
            np.diff(np.array(self._ends), prepend=0.0),
            self._worked("generate"),
            np.array(self.trainer.waited_s[:ended]),
            lags - np.array(queue.versions)[trained].mean(axis=1),
            lags - np.array(queue.oldest)[trained].min(axis=1),
            lags - np.array(queue.oldest)[trained].mean(axis=1),
            np.array(queue.took)[trained].max(axis=1),
            self._exposed(),
            {role: self._busy(devices) for role, devices in self.placement.devices.items()},
            (len(self._stale) + self._refused) * self.group_size,
        )

    @property
    def _refused(self) -> int:
        places = self.queue.places
        return 0 if places is None else sum(places.dealt.values())

    def _worked(self, *kinds: str) -> NDArray[np.float64]:
        """Seconds of this work in each iteration."""
        seconds: NDArray[np.float64] = np.diff(
            [sum(at.get(kind, 0.0) for kind in kinds) for at in self._worked_s], prepend=0.0
        )
        return seconds

    def _busy(self, devices: tuple[int, ...]) -> NDArray[np.float64]:
        """Seconds of work on a role's devices in each iteration."""
        does = [role for role, its in self.placement.devices.items() if its == devices]
        engines = [role for role in ENGINE_ROLES if role in does]
        return self._worked(*does, *["send"] * ("actor" in does), *[f"load {role}" for role in engines])

    def _exposed(self) -> NDArray[np.float64]:
        """Seconds of transfers, a mean over devices that take part."""
        loads, sends = self.placement.devices["rollout"], self.placement.devices["actor"]
        if loads == sends:
            return self._worked("load rollout", "send")
        exposed = self._worked("load rollout") * len(loads) + self._worked("send", "load lent") * len(sends)
        return exposed / (len(loads) + len(sends))

    def end_iteration(self) -> None:
        """Note what was done up to its end."""
        now = self.now
        generating = dict(self.generating_s)
        for engine in self.engines:
            generating[engine.role] += 0.0 if engine.busy_since is None else now - engine.busy_since
        mean = {role: its / max(1, sum(one.role == role for one in self.engines)) for role, its in generating.items()}
        self._ends.append(now)
        self._worked_s.append(self.worked | mean | {"generate": sum(generating.values()) / len(self.engines)})
        if len(self._ends) == self._until:
            self._enough.set_result(None)

    def work(self, role: str, seconds: float) -> Awaitable[None]:
        """Have seconds of work pass, on the devices of a role."""
        self.worked[role] = self.worked.get(role, 0.0) + seconds
        return asyncio.sleep(seconds)

    # -- groups

    def began(self, groups: Sequence[int], bound: int) -> None:
        """Note that an engine took these groups, under this bound."""
        for group in groups:
            self.queue.took[group] = -self.now
        if not self.in_order:
            self.arrivals.begun(groups, bound)
        if self.complete is not None:
            self.complete.begun(groups, bound)

    def gave_back(self, groups: Sequence[int]) -> None:
        """Note that these are to begin again, under whatever bound."""
        if not self.in_order:
            self.arrivals.give_back(groups)
        if self.complete is not None:
            self.complete.give_back(groups)

    def completed(self, groups: Sequence[int]) -> None:
        """Note that these groups are generated."""
        for group in groups:
            self.queue.took[group] += self.now
        if self.in_order:
            if not self.refills:  # else once they are judged
                self._can_be_scored(groups)
            self.rewards.add(groups)
            return
        for _, of_one in groupby(groups, key=self.queue.part_of.__getitem__):
            its = sorted(of_one)
            self.rewards.add(its)
            if not self.refills:
                self._can_be_scored(its)

    def _can_be_scored(self, groups: Sequence[int]) -> None:
        self.complete_groups += len(groups)
        self.completes.set()
        if self.complete is not None:
            self._complete_at += 1
            self.complete.add(groups, self._complete_at)
        if self.in_order:
            self.generated.add(groups)
        else:
            for stage in self.scoring:
                stage.arrivals.add(groups)

    def judge(self, group: int) -> None:
        """Keep a group that has its rewards, or give its place another; what is stale is not trained anyway."""
        assert self._keeps is not None
        if group in self._stale:
            self.queue.keep(group)
        elif self._keeps.keeps(self.queue.number(group)):
            self._can_be_scored([group])
            self.came([group])
            self.queue.keep(group)
        else:
            self.arrivals.give_back([group])
            if self.complete is not None:
                self.complete.give_back([group])
            self.queue.refuse(group)

    def came(self, groups: Sequence[int]) -> None:
        """Note that one of the roles that training waits for is done with these, of one partition."""
        if self.in_order:
            self.rewarded.add(groups)
            return
        for group in groups:
            self._lacking[group] = self._lacking.get(group, 1 + len(self.scoring)) - 1
        self._ready_at += 1
        ready = [group for group in groups if not self._lacking[group] and group not in self._stale]
        self.arrivals.add(ready, self._ready_at)

    def drop(self, below: int) -> int:
        """Take out of training what was begun under this bound or a lower one."""
        dropped = self.arrivals.drop(below)
        self._stale |= dropped
        self.queue.groups += len(dropped)
        return len(dropped)

    # -- work

    def micro_batch(self, role: str) -> int:
        """Groups that a role takes at once."""
        return min(self.batch, self.config.algorithm.micro_batch_groups * self.ranks[role])

    def micro_batches(self, role: str, iteration: int) -> list[range]:
        """The groups of each micro-batch of a role, in order."""
        size, end = self.micro_batch(role), (iteration + 1) * self.batch
        return [range(begin, min(begin + size, end)) for begin in range(iteration * self.batch, end, size)]

    def score_s(self, role: str, groups: Sequence[int]) -> float:
        """Seconds of scoring a micro-batch."""
        key = (groups if self.in_order else tuple(groups), self.ranks[role])
        if key not in self._scored:
            tokens = self.queue.tokens[groups].ravel()
            self._scored[key] = scoring_s(self.cost, tokens, key[1], self.group_size, self.config.training)
        return self._scored[key]

    def train_s(self, groups: Sequence[int]) -> float:
        """Seconds of training on a micro-batch."""
        baselines = int(self.config.algorithm.has_greedy_baseline)
        tokens = self.queue.tokens[groups, baselines:].ravel()
        return training_s(self.cost, tokens, self.ranks["actor"], self.group_size - baselines, self.config.training)
