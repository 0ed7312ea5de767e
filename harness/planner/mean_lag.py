"""The mean lag of a job in closed form, without simulating it: what `cadence table --of staleness` derives
(results/reference/simulated/staleness.md)."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from harness.config import LengthsConfig
from harness.cost_model.lengths import ResponseLengths

DRAWS, POINTS = 1 << 16, 1000
BALANCED = 0.1  # a share of the slower pool's seconds: nearer than that neither is the bottleneck
REGIMES = ("rollout is slower", "both balance", "training is slower")


@dataclass(frozen=True)
class Flow:
    """A job as the formulas know it. engines, slots: of each; batch: groups; group: samples; step_s, sample_s: of a
    decode step, and more of it for each sample that runs; train_s: of a batch; transfer_s: of weights, while engines
    and trainer stand; eta: iterations by which a group may be ahead; streamed: training in fifo order takes group after
    group as it is ready, else a batch once it is whole."""

    engines: int
    slots: int
    batch: int
    group: int
    lengths: LengthsConfig
    step_s: float
    sample_s: float
    train_s: float
    transfer_s: float
    eta: float
    streamed: bool = True

    @property
    def running(self) -> float:
        """Samples that run at a time where engines never wait: they take groups whole, so some slots are free."""
        return self.engines * (self.slots - (self.group - 1) / 2)

    @property
    def token_s(self) -> float:
        """Seconds from one token of a sample to its next, where engines never wait."""
        return self.step_s + self.sample_s * self.running / self.engines

    @property
    def generate_s(self) -> float:
        """Seconds in which engines that never wait generate a batch."""
        return self.batch * self.group * float(drawn(self.lengths, self.group).mean()) * self.token_s / self.running

    @property
    def period_s(self) -> float:
        """Seconds of an iteration: of the slower pool."""
        return max(self.generate_s, self.train_s) + self.transfer_s

    @property
    def tail(self) -> float:
        """The mean longest sample of a group over the mean one."""
        tokens = drawn(self.lengths, self.group)
        return float(tokens.max(axis=1).mean() / tokens.mean())

    @property
    def last_s(self) -> float:
        """Seconds from a batch's last group being ready until engines have its version."""
        return self.train_s / (self.batch if self.streamed else 1) + self.transfer_s

    @property
    def groups_s(self) -> np.ndarray:
        """Seconds from the beginning of a group to its last token, and pauses between, float64 [groups], ascending."""
        longest = np.sort(drawn(self.lengths, self.group).max(axis=1))
        return longest * self.token_s * self.period_s / (self.period_s - self.transfer_s)

    @property
    def regime(self) -> str:
        """The slower pool, in words."""
        apart = self.train_s / self.generate_s - 1
        return REGIMES[1] if abs(apart) < BALANCED else REGIMES[2] if apart > 0 else REGIMES[0]


@cache
def drawn(lengths: LengthsConfig, group: int) -> np.ndarray:
    """Tokens of many groups' samples, int64 [groups, group]."""
    return ResponseLengths(lengths, seed=1).of(np.arange(DRAWS)).reshape(-1, group)


def in_fifo_order(flow: Flow) -> float:
    """Mean lag of first tokens where groups are trained as they were admitted."""
    each_s, room_s = flow.train_s + flow.transfer_s, flow.eta * flow.period_s - flow.last_s
    if flow.train_s >= flow.generate_s or room_s <= 0:
        return flow.eta
    took = flow.groups_s
    before = np.arange(flow.batch * (int(took[-1] / (flow.period_s - each_s)) + 1))  # groups before the last of a batch
    trained = before / flow.batch if flow.streamed else before // flow.batch  # batches of those
    at, all_done = np.linspace(0.0, min(room_s, took[-1]), POINTS), np.ones(POINTS)
    for earlier_s in before * flow.period_s / flow.batch - trained * each_s:
        all_done *= np.searchsorted(took, at + earlier_s, side="right") / took.size
    return float(np.trapezoid(1 - all_done, at) + flow.last_s) / flow.period_s


def in_completion_order(flow: Flow) -> float:
    """The same where groups are trained as they are completed."""
    if flow.train_s >= flow.generate_s:
        return flow.eta
    last_s = flow.train_s / flow.batch + flow.transfer_s  # a group that is ready is trained at once, whole batch or not
    return min(flow.eta, (float(flow.groups_s.mean()) + last_s) / flow.period_s)


def by_applied_compute(flow: Flow) -> float:
    """The same by Applied Compute's formula (Dong, Goel and Yu, "Predicting and controlling staleness in fully
    asynchronous RL training", July 2026): C M / B + rho where rollout is slower, else C M / (rho B) + (2 q + rho - 1) /
    (2 rho), with as much room in the queue, q batches, as eta leaves."""
    rho = flow.train_s / flow.generate_s
    in_flight = flow.running * flow.tail / (flow.batch * flow.group)
    if rho < 1:
        return in_flight + rho
    room = max(1.0, 1 + flow.eta - in_flight / rho)
    return in_flight / rho + (2 * room + rho - 1) / (2 * rho)


def newer(flow: Flow) -> float:
    """Versions that come while a sample runs, mean over its tokens: half of those that come until its end."""
    seconds_a_token = flow.step_s * flow.period_s / (flow.period_s - flow.transfer_s)
    tokens, per_s = float(drawn(flow.lengths, flow.group).mean()), flow.batch * flow.group / flow.period_s
    some_run = per_s * tokens * seconds_a_token / (1 - per_s * tokens * flow.sample_s / flow.engines)  # Little's law
    return min(flow.running, some_run) / (2 * flow.batch * flow.group)
