"""A system that was measured, as draws of all that is not said of it: priors, narrowed by the rows that are given.

Importance sampling in two stages (Gelman et al., "Bayesian data analysis", section 10.4). Quantities are drawn from
their priors; where a row gives a figure, the equation of the table is solved for the quantity that nobody measures (the
share of the peak that a phase reaches, the time of engines over the roofline's), and the draw weighs as much as the
prior says of that solution. A row is one run, whose noise is drawn too. What several rows say of one quantity, and
statistics of lengths, weigh by how far they are from the draw. Then draws are taken in proportion to their weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harness.config import ConfigError, CostConfig, JobConfig, LengthsConfig, RooflineConfig
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.memory import JobLayout
from harness.cost_model.roofline import roofline
from harness.cost_model.shape import forward_flops_per_token
from harness.prediction.evidence import StepRow, Workload
from harness.prediction.generation import batch_seconds, clipped_share, clipped_tail, longest, uncapped_mean
from harness.prediction.priors import Draws, Priors

Given = Literal["sync", "train"]  # rows that are read: synchronous ones only, or the training phases of the others too
FIRST, SECOND = 4096, 512  # draws of the first stage, and of the second, in which batches are generated
OLD, REFERENCE, UPDATE = "old_log_prob_s", "ref_log_prob_s", "update_s"

TRAINED = (OLD, REFERENCE, "log_probs_s", UPDATE)  # training phases, as rows have them
PASSES = {OLD: 1, REFERENCE: 1, UPDATE: 3}  # forward passes that a phase computes as much as
_SEEDS = 8  # of batches
FAR = 4.0
"""Standard deviations from what priors expect, from which on a row is called implausible: one system in 16,000."""

FEW = 5  # independent draws, below which an interval is called one of too few


def check_given(text: str) -> Given:
    """Raises ConfigError for what is neither."""
    if text == "train":
        return "train"
    if text == "sync":
        return "sync"
    raise ConfigError(f"given={text} is unknown; use train, or sync for predictions from synchronous rows only")


@dataclass(frozen=True)
class Around:
    """Seconds of a synchronous row besides its phases, float64 [n] each. before: in which a batch that is generated as
    a whole is set up; serial: the trainer's; hidden: by schedules that overlap; sharing: only where devices are shared;
    step_s: of the row."""

    before: Draws
    serial: Draws
    hidden: Draws
    sharing: Draws
    step_s: Draws


@dataclass(frozen=True)
class System:
    """Draws of a software and its workload, float64 [n] each, all of the same draws in the same order.

    job: of the first row. quantities: by their names in experiments/priors.yaml, and `response_mean`. uncapped: mean of
    the log-normal before the cap. work: of each phase, seconds on as many devices as the first row trains on, as it
    shares them. around: by the label of the row. missing: phases that no row gives. effective: of
    so many independent draws are these worth. longer: so many times as long as `batch_seconds` says a batch takes.
    implausible: what no system is expected to be like, in words; "" where there is none."""

    rows: tuple[StepRow, ...]
    workload: Workload
    job: JobConfig
    quantities: Mapping[str, Draws]
    uncapped: Draws
    work: Mapping[str, Draws]
    around: Mapping[str, Around]
    missing: frozenset[str]
    effective: float
    longer: float
    implausible: str = ""

    def nearest(self, row: StepRow) -> StepRow:
        """The given row that is nearest in devices."""
        return min(self.rows, key=lambda other: abs(math.log(other.devices / row.devices)))

    def phase_s(self, name: str, devices: int, shared: bool) -> Draws:
        """Seconds of a phase on so many devices."""
        q, own = self.quantities, self.rows[0]
        fixed = q["update_fixed" if name == UPDATE else "scoring_fixed"]
        alone = q["alone_over_shared" if name == UPDATE else "scoring_alone"]
        seconds: Draws = self.work[name] * _scaling(fixed, own.train_devices, devices)
        return seconds * alone ** (float(own.shared) - float(shared))

    def lengths(self, draw: int, drift: float = 1.0) -> LengthsConfig:
        """Lengths of a draw."""
        return lengths_of(self.quantities, self.uncapped * drift, self.workload.cap or 1, draw)

    def engine(self, job: JobConfig, draw: int, *, shared: bool) -> CostConfig:
        """Costs of an engine of a draw."""
        return slower(
            engine_cost(job, self.quantities, draw, shared=shared), float(self.quantities["engine_time"][draw])
        )


def lengths_of(quantities: Mapping[str, Draws], uncapped: Draws, cap: int, draw: int) -> LengthsConfig:
    """Lengths of a draw."""
    mean, sigma, common = (float(values[draw]) for values in (uncapped, quantities["tail"], quantities["common"]))
    return LengthsConfig(kind="lognormal", mean=max(1.0, mean), sigma=sigma, common=common, cap=cap)


def engine_cost(job: JobConfig, quantities: Mapping[str, Draws], draw: int, *, shared: bool) -> CostConfig:
    """Costs of an engine by the roofline of a draw."""
    factors = replace(
        factors_of(job),
        decode_share=float(quantities["decode_share"][draw]),
        decode_step_s=float(quantities["decode_step_s"][draw]),
        forward_share=float(quantities["forward_share"][draw]),
        prompt_tokens=max(1, round(float(quantities["prompt_tokens"][draw]))),
    )
    layout = JobLayout(engine_devices=job.engine.tensor_parallel, colocated=shared)
    return roofline(job.model, job.device, factors, layout)


def slower(cost: CostConfig, times: float) -> CostConfig:
    """The same engine, which takes so many times as long for everything."""
    return replace(
        cost,
        decode_step_s=times * cost.decode_step_s,
        decode_weights_s=times * cost.decode_weights_s,
        decode_experts_s=times * cost.decode_experts_s,
        decode_step_s_per_sample=times * cost.decode_step_s_per_sample,
        decode_s_per_cached_token=times * cost.decode_s_per_cached_token,
        prefill_s_per_token=times * cost.prefill_s_per_token,
        prefill_s_per_pair=times * cost.prefill_s_per_pair,
    )


def factors_of(config: JobConfig) -> RooflineConfig:
    """The roofline's factors. Raises ConfigError where costs are given: a prediction stands on a roofline."""
    if not isinstance(config.cost, RooflineConfig):
        raise ConfigError(f"cost={config.cost.name} is given; a table is predicted over cost=roofline: take it out")
    return config.cost


def engines_of(row: StepRow, config: JobConfig) -> int:
    """Rollout engines of a row. Raises ConfigError where its devices do not make whole ones."""
    together = config.engine.tensor_parallel
    if row.rollout_devices % together:
        raise ConfigError(
            f"{row.label}: engine.tensor_parallel={together} does not divide rollout_gpus={row.rollout_devices}"
        )
    return row.rollout_devices // together


def _scaling(fixed: Draws, before: int, now: int) -> Draws:
    scaling: Draws = fixed + (1 - fixed) * before / now
    return scaling


class Narrowing:
    """One system's draws and weights, from priors to a `System`. Its attributes are what its steps share."""

    def __init__(
        self,
        rows: Sequence[StepRow],
        workload: Workload,
        job: JobConfig,
        priors: Priors,
        known: Mapping[str, float],
        wide: bool,
        longer: float,
        seed: int,
    ) -> None:
        self.rows, self.workload, self.job, self.priors = tuple(rows), workload, job, priors
        shares = ("forward_share", "train_share", "engine_time")
        self.wider = dict.fromkeys(shares, priors.unsaid) if wide else {}
        self.known, self.longer = known, longer
        self.q = priors.draw(FIRST, seed, known, self.wider)
        self.noise = priors.quantities["run_noise"].normal[1]  # of a phase's logarithm
        self.log_weight = np.zeros(FIRST)
        self.work: dict[str, Draws] = {}
        self.uncapped = np.zeros(FIRST)  # mean of lengths before the cap
        self.generated = np.zeros((len(self.rows), FIRST))  # seconds of generating sequences, by row
        self.missing = set[str]()  # phases that no row gives
        self.solved = set[str]()  # quantities that an equation of the table gives
        self.scale = np.zeros(FIRST)  # of what no row gives, in deviations from what priors expect
        self.random = np.random.default_rng(seed)

    @property
    def first(self) -> StepRow:
        """The row that phases are of."""
        return self.rows[0]

    @property
    def cap(self) -> int:
        """Tokens of the longest response."""
        assert self.workload.cap is not None, "workloads are filled"
        return self.workload.cap

    @property
    def samples(self) -> int:
        """Samples of a batch."""
        return self.job.algorithm.batch_samples

    def weigh(self, name: str, solution: Draws) -> None:
        """Put a quantity at what an equation of the table says; draws weigh what its prior says of that. The equation
        is of the logarithm of seconds, which fall as a share s of the peak grows, and priors of shares are of log-odds:
        d log-odds(s) / d log(s) = 1 / (1 - s) turns the one density into the other."""
        one = self.priors.quantities[name]
        if one.kind == "share":
            self.log_weight += np.where(solution < 1, 0.0, -20.0 * solution)
            solution = np.clip(solution, 1e-4, 0.98)
            self.log_weight -= np.log1p(-solution)
        self.log_weight += one.log_density(solution, self.wider.get(name, 0.0))
        self.q[name] = solution
        self.solved.add(name)

    def near(self, difference: Draws, deviation: float | Draws) -> None:
        """Weigh by a difference of logarithms: Student's t of four degrees of freedom, as rows have outliers."""
        self.log_weight += -2.5 * np.log1p((difference / deviation) ** 2 / 4)

    def in_common(self, logs: Sequence[Draws]) -> Draws:
        """Return what runs have in common, by the logarithm that each of them says, float64 [n]: their mean, but for
        the noise of so many runs. Runs that lie apart weigh."""
        mean: Draws = np.mean(logs, axis=0)
        for one in logs if len(logs) > 1 else ():
            self.near(one - mean, self.noise)
        noise = self.noise / math.sqrt(len(logs)) * self.random.standard_normal(len(mean))
        common: Draws = np.exp(mean + noise)
        return common

    def lengths(self) -> None:
        """Mean and tail of responses: as said, or from the prior; statistics of their lengths weigh."""
        said, cap = self.workload, self.cap
        if said.prompt_mean is not None:
            self.q["prompt_tokens"] = np.full(FIRST, said.prompt_mean)
        mean = said.response_mean
        timed = self.first.generate_s or self.first.rollout_s
        if mean is None and said.tokens_per_s is not None and timed:
            mean = said.tokens_per_s * timed / self.samples
        if mean is not None and not 1 <= mean < cap:
            raise ConfigError(
                f"{self.first.label}: responses of {mean:,.0f} tokens in the mean are not below cap={cap:,}; correct "
                "response_mean, tokens_per_s or cap"
            )
        self.q["response_mean"] = cap * self.q["response_share"] if mean is None else np.full(FIRST, float(mean))
        if said.clipped_share and mean is not None and mean <= said.clipped_share * cap:
            raise ConfigError(
                f"{self.first.label}: responses of {mean:,.0f} tokens in the mean cannot be with "
                f"clipped_share={said.clipped_share:g} of them at cap={cap:,}; correct one"
            )
        if solved := bool(said.clipped_share) and "tail" not in self.known:
            self.weigh("tail", clipped_tail(self.q["response_mean"], said.clipped_share or 0.0, cap))
        self.uncapped = uncapped_mean(self.q["response_mean"], self.q["tail"], cap)
        if said.clipped_share is not None and not solved:
            share = clipped_share(self.uncapped, self.q["tail"], cap)
            least = 1 / self.samples
            self.near(np.log((share + least) / (said.clipped_share + least)), 0.2)
        if said.response_max is not None:
            self.near(np.log(longest(self.uncapped, self.q["tail"], cap, self.samples) / said.response_max), 0.1)

    def phases(self) -> None:
        """Seconds of each phase in the first row, and how it scales; a phase that no row gives by the roofline."""
        runs = {OLD: self.workload.recompute_log_probs, REFERENCE: self.workload.reference}
        scored = [name for name in runs if runs[name]]
        for name in (*scored, UPDATE):
            given = [(row, seconds) for row in self.rows if (seconds := phase_of(row, name, len(scored))) is not None]
            passes = PASSES[name]
            share = "train_share" if name == UPDATE else "forward_share"
            tokens = self.samples * (self.q["prompt_tokens"] + self.q["response_mean"])
            least = passes * tokens * forward_flops_per_token(self.job.model) / self.job.device.flops
            least = least / self.first.train_devices  # seconds at the peak
            slower_by = self.q["alone_over_shared"] if name == UPDATE and self.first.shared else 1.0
            if not given or not any(seconds for _, seconds in given):
                self.work[name] = least / self.q[share] / slower_by if not given else np.zeros(FIRST)
                self.missing |= set() if given else {name}
                continue
            self.work[name] = self.in_common(
                [math.log(max(seconds, 1e-9)) - np.log(self._scaling(name, row)) for row, seconds in given]
            )
            solution = least / np.maximum(self.work[name], 1e-9) / slower_by
            if name != REFERENCE or OLD not in scored:
                self.weigh(share, solution)

    def alone(self, asked: Sequence[StepRow]) -> None:
        """Weigh by what training phases of other rows say of training on devices of their own."""
        if not self.first.shared:
            return
        for name, quantity in ((UPDATE, "alone_over_shared"), (OLD, "scoring_alone")):
            given = [(row, s) for row in asked if not row.shared and (s := getattr(row, name))]
            if name not in self.work or not given or quantity in self.known:
                continue
            shared = self.work[name] * self.q["drift"]  # seconds on shared devices at the lengths of these rows
            self.weigh(
                quantity, self.in_common([math.log(s) - np.log(shared * self._scaling(name, row)) for row, s in given])
            )

    def keep(self, count: int) -> float:
        """Take so many draws by weight (systematic resampling). Returns how many independent ones they are worth."""
        weights = np.exp(self.log_weight - self.log_weight.max())
        weights /= weights.sum()
        places = (np.arange(count) + self.random.random()) / count
        chosen = np.minimum(np.searchsorted(np.cumsum(weights), places), len(weights) - 1)
        self.random.shuffle(chosen)
        self.q = {name: values[chosen] for name, values in self.q.items()}
        self.work = {name: values[chosen] for name, values in self.work.items()}
        self.uncapped, self.generated = self.uncapped[chosen], self.generated[:, chosen]
        self.log_weight, self.scale = np.zeros(count), self.scale[chosen]
        return float(1 / (weights**2).sum())

    def generation(self) -> None:
        """Weigh by seconds of generating sequences, where rows say them."""
        made = np.empty_like(self.generated)
        for draw in range(made.shape[1]):
            lengths = lengths_of(self.q, self.uncapped, self.cap, draw)
            drawn = ResponseLengths(lengths, draw % _SEEDS, self.job.algorithm.group_size).batches(0, 1, self.samples)[
                0
            ]
            for place, row in enumerate(self.rows):
                cost = engine_cost(self.job, self.q, draw, shared=row.shared)
                engines, slots = engines_of(row, self.job), self.job.engine.slots
                made[place, draw] = batch_seconds(cost, drawn, engines=engines, slots=slots)
        made *= self.longer
        logs = [
            np.log(seconds / of)
            for row, of in zip(self.rows, made, strict=True)
            if (seconds := self._generate_s(row)) is not None
        ]
        if logs:
            self.weigh("engine_time", self.in_common(logs))
        else:
            self.missing.add("generate_s")
        self.generated = made * self.q["engine_time"]

    def fill(self) -> None:
        """Let phases that no row gives share what steps leave, in proportion to what the roofline says of them; it
        weighs how many times as long they all take then."""
        logs = []
        for place, row in enumerate(self.rows):
            known, unknown = self._parts(place, row)
            if row.step_s is not None and self.missing:
                left = (1 - self.q["rest_share"]) * row.step_s - known
                logs.append(np.log(np.maximum(left, 0.005 * row.step_s) / unknown))
        if not logs:
            return
        scale = self.in_common(logs)
        expected, deviation = self._expected()
        self.near(np.log(scale) - expected, deviation)
        self.scale = (np.log(scale) - expected) / deviation
        for name in self.missing & self.work.keys():
            self.work[name] = self.work[name] * scale
        if "generate_s" in self.missing:
            self.q["engine_time"] = self.q["engine_time"] * scale
            self.generated = self.generated * scale

    def _expected(self) -> tuple[Draws, Draws]:
        """Logarithm of the common factor of phases that no row gives, as priors have it in each draw, and its standard
        deviation: of independent normal logarithms of seconds, given what these are to each other."""
        of = {"generate_s": "engine_time", UPDATE: "train_share"}
        weighted, precision = np.zeros((2, len(self.log_weight)))
        for name in sorted({of.get(phase, "forward_share") for phase in self.missing}):
            one, value = self.priors.quantities[name], self.q[name]
            mean, spread = one.normal
            longer = -(1 - value) if one.kind == "share" else np.ones_like(value)  # see `weigh`
            deviation = longer * math.hypot(spread, self.wider.get(name, 0.0))
            precision += deviation**-2
            weighted -= longer * (one.scaled(value) - mean) * deviation**-2
        return weighted / precision, precision**-0.5

    def implausible(self, effective: float) -> str:
        """Say what of the rows no system is expected to be like, or that hardly a draw fits them; "" where all is as
        it may be: draws would be weighed all the same, however far they are."""
        found = []
        for name in sorted(self.solved):
            one, wider, value = self.priors.quantities[name], self.wider.get(name, 0.0), float(np.median(self.q[name]))
            if -2 * one.log_density(np.array(value), wider) > FAR**2:
                low, high = one.of(np.array([-2.0, 2.0]), wider)
                found.append(f"{name} is {value:.2g}, not {low:.2g} to {high:.2g}")
        rests = self.priors.quantities["rest_share"]
        for place, row in enumerate(self.rows):
            known, unknown = self._parts(place, row)
            rest = 0.0 if row.step_s is None else float(np.median(1 - (known + unknown) / row.step_s))
            if 0 < rest < 1 and rest > rests.typical and -2 * rests.log_density(np.array(rest)) > FAR**2:
                found.append(f"phases leave {rest:.1%} of the step of {row}")
        if abs(far := float(np.median(self.scale))) > FAR:
            way = "longer" if far > 0 else "shorter"
            found.append(f"phases without a time would be {way} than in any system")
        if effective < FEW:
            found.append(f"draws are worth {effective:.1f} independent ones")
        return "implausible, check seconds, lengths, model and device: " + "; ".join(found) if found else ""

    def _generate_s(self, row: StepRow) -> Draws | float | None:
        if row.generate_s is None and row.rollout_s is not None:
            return row.rollout_s * (1 - self.q["around_share"])
        return row.generate_s

    def _parts(self, place: int, row: StepRow) -> tuple[Draws, Draws]:
        """Seconds of the phases that a row gives, and of those that it does not."""
        known, unknown = np.zeros((2, len(self.log_weight)))
        for name, work in self.work.items():
            seconds = phase_of(row, name, len(self.work) - 1)
            if seconds is None:
                unknown += work * self._scaling(name, row)
            else:
                known += seconds
        share = self.q["around_share"]
        if row.rollout_s is not None:
            known += row.rollout_s
        elif row.generate_s is not None:
            known += row.generate_s / (1 - share)
        else:
            unknown += self.generated[place] / (1 - share)
        named = (row.reward_s, row.sync_s, row.serial_s, row.overlappable_s, row.sharing_only_s)
        return known + sum(seconds for seconds in named if seconds is not None), unknown

    def around(self, place: int, row: StepRow) -> Around:
        """Seconds of a row besides its phases: as named, and what phases leave of the step, by shares of the prior."""
        q, share, shared = self.q, self.q["around_share"], float(row.shared)
        known, unknown = self._parts(place, row)
        step = (known + unknown) / (1 - q["rest_share"]) if row.step_s is None else np.full(len(known), row.step_s)
        rest = np.maximum(0.0, step - known - unknown)
        generate = self.generated[place] if row.generate_s is None else row.generate_s
        if row.rollout_s is None:
            before = share / (1 - share) * generate
        elif row.generate_s is None:
            before = share * row.rollout_s
        else:
            before = np.full(len(known), max(0.0, row.rollout_s - row.generate_s))
        serial = q["rest_serial"] * rest
        hidden = (rest - serial) * q["rest_hidden"]
        sharing = shared * (rest - serial - hidden)
        return Around(
            before=before * (1 - shared * q["around_sharing"]),
            serial=rest - hidden - sharing + (row.serial_s or 0.0),
            hidden=hidden + (row.overlappable_s or 0.0) + (row.reward_s or 0.0),
            sharing=sharing
            + shared * (before * q["around_sharing"] + (row.sync_s or 0.0))
            + (row.sharing_only_s or 0.0),
            step_s=step,
        )

    def _scaling(self, name: str, row: StepRow) -> Draws:
        """Seconds of a phase in this row over those in the first."""
        fixed = self.q["update_fixed" if name == UPDATE else "scoring_fixed"]
        return _scaling(fixed, self.first.train_devices, row.train_devices)


def phase_of(row: StepRow, name: str, scored: int) -> float | None:
    """Seconds of a phase as a row gives them; both scorings have their part where they were timed together."""
    seconds: float | None = getattr(row, name)
    if seconds is None and name != UPDATE and row.log_probs_s is not None:
        return row.log_probs_s / scored
    return seconds


def narrow(narrowing: Narrowing, asked: Sequence[StepRow], given: Given, count: int) -> System:
    """A system from its rows: so many draws. asked: rows of it that are to be predicted, of which training phases are
    read where `given` says so. Raises ConfigError where rows contradict what is known."""
    narrowing.lengths()
    narrowing.phases()
    if given == "train":
        narrowing.alone(asked)
    narrowing.keep(SECOND)
    narrowing.generation()
    narrowing.fill()
    effective = narrowing.keep(count)
    return System(
        rows=narrowing.rows,
        workload=narrowing.workload,
        job=narrowing.job,
        quantities=narrowing.q,
        uncapped=narrowing.uncapped,
        work=narrowing.work,
        around={row.label: narrowing.around(place, row) for place, row in enumerate(narrowing.rows)},
        missing=frozenset(narrowing.missing),
        effective=effective,
        longer=narrowing.longer,
        implausible=narrowing.implausible(effective),
    )
