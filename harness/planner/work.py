"""The work of each pool in an iteration, in seconds: at least (for bounds), likely (for what to try first).

Both are computed from the response lengths that the run will draw."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np

from engines.simulated.decoding import decoded_s
from harness.config import CostConfig, JobConfig
from harness.cost_model.cost import DecodeCost, offload_s, transfer_times, unit_samples
from harness.cost_model.lengths import ResponseLengths

_LOOKED_AT = 2  # engines whose share of a batch is decoded to see how long it takes


@dataclass(frozen=True, eq=False)
class LengthSamples:
    """The lengths of a job's first batches, as its run will draw them. responses: tokens, int64 [batches, samples of a
    batch], in the order of sample ids; prompt: tokens."""

    responses: np.ndarray
    prompt: int
    group_size: int

    @classmethod
    def of(cls, config: JobConfig, seed: int, batches: int) -> Self:
        """Draw the lengths of the first `batches` batches."""
        algorithm, cost = config.algorithm, config.cost
        lengths = ResponseLengths.of_job(config, seed).batches(0, batches, algorithm.batch_samples)
        return cls(lengths, cost.prompt_tokens, algorithm.group_size)

    @cached_property
    def tokens(self) -> float:
        """Response tokens of a batch, a mean over batches."""
        return float(self.responses.sum(axis=1).mean())

    @cached_property
    def samples(self) -> int:
        """Samples of a batch."""
        return int(self.responses.shape[1])

    @cached_property
    def cached_steps(self) -> float:
        """Tokens in the KV caches, summed over a batch's decode steps, which read the prompt and all tokens before."""
        tokens = self.responses.astype(np.float64)
        return float((tokens * self.prompt + tokens * (tokens - 1) / 2).sum(axis=1).mean())

    @lru_cache(maxsize=64)  # noqa: B019  # they live as long as a search
    def longest(self, first_group: int = 0) -> int:
        """The longest response of a batch, its groups from `first_group` on; of that batch in which it is shortest.
        0 where there are none."""
        responses = self.responses[:, first_group * self.group_size :]
        return int(responses.max(axis=1).min()) if responses.size else 0

    def slowest_s(self, rows: int, parts: int, *, s_per_token: float, s_per_pair: float) -> np.ndarray:
        """Seconds of every micro-batch of `rows` samples, at least: float [batches, micro-batches]. A sample of t
        tokens, prompt and response, takes t s_per_token + t**2 s_per_pair. However samples are shared
        (`harness.cost_model.cost.rank_shares`), the slowest part takes the mean, and no less than what stays
        together."""
        (tokens, pairs), begins = self._units(rows, parts)
        seconds = tokens * s_per_token + pairs * s_per_pair
        evenly: np.ndarray = np.add.reduceat(seconds, begins, axis=1) / parts
        return np.maximum(evenly, np.maximum.reduceat(seconds, begins, axis=1))

    @lru_cache(maxsize=1024)  # noqa: B019  # they live as long as a search
    def _units(self, rows: int, parts: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Tokens and squares of lengths of what stays together, [batches, units], and the first of each micro-batch."""
        lengths = self.responses + self.prompt
        together = unit_samples(rows, parts, self.group_size) if self.samples % rows == 0 else 1
        units = lengths.reshape(len(lengths), -1, together)
        return (units.sum(axis=2), (units * units).sum(axis=2)), np.arange(0, units.shape[1], rows // together)


@dataclass(frozen=True)
class PoolLayout:
    """The workers of a candidate. running: samples that an engine has running at most; rows: samples of a micro-batch
    on all ranks, and on all scorers; stages: of scoring; apart: these have a pool of their own.

    fresh_from: groups of a batch from this one on lag by floor(eta) iterations at most, those before by ceil(eta).
    together: batches that are generated as one. epochs, steps: passes and optimizer steps over a batch; freezes: the
    trainer scores it before. sender_links: of `transfer_times`; lent: engines on training devices."""

    engines: int
    running: int
    ranks: int
    rows: int
    scorers: int
    scored_rows: int
    stages: int
    apart: bool
    fresh_from: int
    together: int
    transport: str
    sender_links: float = 1.0
    epochs: int = 1
    steps: int = 1
    freezes: bool = False
    lent: int = 0


@dataclass(frozen=True)
class IterationWork:
    """Seconds of one iteration. All are means over batches.

    generate_s: of the rollout pool, its engines full as long as there is anything to do; batch_s: of one batch, from
    empty engines to empty engines; longest_s, fresh_s: of its longest response, alone, and of the longest in its fresh
    part; score_s, train_s: of the pools that do it; micro_s: scoring and training of the smallest micro-batch, which
    nothing shortens for the last response; step_s: of the optimizer's last step; send_s, load_s: of a weight update;
    offload_s: of a device that is given back. lent: engines on training devices, for each of the pool."""

    generate_s: float
    batch_s: float
    longest_s: float
    fresh_s: float
    score_s: float
    train_s: float
    micro_s: float
    step_s: float
    send_s: float
    load_s: float
    offload_s: float
    apart: bool
    lent: float = 0.0

    @property
    def actor_s(self) -> float:
        """Seconds of the actor's devices, transfers aside."""
        return self.train_s + self.step_s + (0.0 if self.apart else self.score_s)

    @property
    def scorers_s(self) -> float:
        """Seconds of a pool that only scores."""
        return self.score_s if self.apart else 0.0

    @property
    def publish_s(self) -> float:
        """Seconds of an update that all wait for."""
        return max(self.send_s, self.load_s)


def least_work(cost: CostConfig, pools: PoolLayout, lengths: LengthSamples) -> IterationWork:
    """The least work of any run of this job on these workers, whatever the schedule. Decode steps: with n samples
    running, of c tokens, one lasts decode_step_s + max(w(n), n p) + c q, and makes n tokens. A batch of T tokens needs
    T / `running` steps at least, and as many as keep c below the KV cache. What w(n) has of experts grows ever slower
    with n, so that fewer samples a step read no fewer in all."""
    decode, least = DecodeCost.of(cost), lengths.tokens / pools.running
    steps = least
    if cost.kv_tokens is not None:
        steps = max(steps, lengths.cached_steps / cost.kv_tokens)
    prefill_s = _prefill_s(cost, lengths)
    beside_s = 0.0 if cost.step_tokens is None else prefill_s
    busy_s = (
        steps * cost.decode_step_s
        + max(
            steps * cost.decode_weights_s + least * (decode.weights(pools.running) - cost.decode_weights_s),
            lengths.tokens * cost.decode_step_s_per_sample + beside_s,
        )
        + lengths.cached_steps * cost.decode_s_per_cached_token
        + (prefill_s - beside_s)
    )
    longest_s = _alone_s(cost, lengths.prompt, lengths.longest())
    generate_s = busy_s / pools.engines
    train = _train_s(cost, lengths, pools.rows, pools.ranks)
    score = _score_s(cost, lengths, pools.scored_rows, pools.scorers) * pools.stages
    train_s = pools.epochs * _total(train) + (pools.steps - 1) * cost.train_step_s
    if pools.freezes:
        train_s += _total(_score_s(cost, lengths, pools.rows, pools.ranks))
    times = transfer_times(cost, pools.transport, pools.sender_links, pools.ranks)
    return IterationWork(
        generate_s=generate_s,
        batch_s=cost.generate_s + max(generate_s, longest_s),
        longest_s=longest_s,
        fresh_s=_alone_s(cost, lengths.prompt, lengths.longest(pools.fresh_from)),
        score_s=_total(score),
        train_s=train_s,
        micro_s=float(train.min()) + (float(score.min()) if pools.stages else 0.0),
        step_s=cost.train_step_s,
        send_s=times.send_s,
        load_s=times.load_s,
        offload_s=offload_s(cost),
        apart=pools.apart,
        lent=pools.lent / pools.engines,
    )


def likely_work(cost: CostConfig, pools: PoolLayout, lengths: LengthSamples, *, streaming: bool) -> IterationWork:
    """Work as it will probably be. streaming: engines are refilled from the next batch, else they run empty."""
    work = least_work(cost, pools, lengths)
    if not streaming:
        mean_s, last_s = _decoded(DecodeCost.of(cost), pools.engines, pools.running, pools.together, lengths)
        return replace(work, generate_s=mean_s, batch_s=max(work.batch_s, cost.generate_s + last_s))
    context = lengths.cached_steps / lengths.tokens
    running = pools.running if cost.kv_tokens is None else min(pools.running, cost.kv_tokens / (context + 1))
    running = max(1.0, min(running, 2 * lengths.samples / pools.engines))
    steps = lengths.tokens / running
    step_s = cost.decode_step_s + max(DecodeCost.of(cost).weights(running), running * cost.decode_step_s_per_sample)
    cached_s = lengths.cached_steps * cost.decode_s_per_cached_token
    again_s = running * context * cost.prefill_s_per_token  # the cache of all that runs, after an update
    prefill_s = _prefill_s(cost, lengths)
    generate_s = (steps * step_s + cached_s + prefill_s) / pools.engines + again_s
    return replace(work, generate_s=max(work.generate_s, generate_s), batch_s=max(work.batch_s, generate_s))


@lru_cache(maxsize=4096)
def _decoded(
    cost: DecodeCost, engines: int, running: int, together: int, lengths: LengthSamples
) -> tuple[float, float]:
    """Seconds for each batch until an engine has done its share of so many as one, groups dealt out in turn: a mean
    over some engines, and of the last one among them, that with the longest response included."""
    groups = lengths.responses[:together].reshape(-1, lengths.group_size)
    longest = int(groups.max(axis=1).argmax()) % engines
    looked_at = {longest, *range(min(engines, len(groups), _LOOKED_AT))}
    ends = []
    for engine in looked_at:
        share = groups[engine::engines].ravel().tolist()
        ends.append(decoded_s(cost, share, prompt=lengths.prompt, slots=running, group_size=lengths.group_size))
    return float(np.mean(ends)) * min(1.0, len(groups) / engines) / together, max(ends) / together


def _alone_s(cost: CostConfig, prompt: int, tokens: int) -> float:
    """A response on an engine of its own."""
    decode = DecodeCost.of(cost)
    prefill_s = 0.0 if cost.prefix_caching else decode.joined_s(decode.prefill(prompt), prompt, 1)
    return prefill_s + decode.steps(tokens, 1, prompt) if tokens else 0.0


def _prefill_s(cost: CostConfig, lengths: LengthSamples) -> float:
    """Prompts of a batch, those that groups share once."""
    times = lengths.samples // lengths.group_size if cost.prefix_caching else lengths.samples
    return times * DecodeCost.of(cost).prefill(lengths.prompt)


def _train_s(cost: CostConfig, lengths: LengthSamples, rows: int, ranks: int) -> np.ndarray:
    """Seconds of every micro-batch: [batches, micro-batches]."""
    parts_s = lengths.slowest_s(rows, ranks, s_per_token=cost.train_s_per_token, s_per_pair=cost.train_s_per_pair)
    return cost.call_s + cost.train_call_s + parts_s


def _score_s(cost: CostConfig, lengths: LengthSamples, rows: int, scorers: int) -> np.ndarray:
    parts_s = lengths.slowest_s(
        rows, scorers, s_per_token=cost.log_prob_s_per_token, s_per_pair=cost.log_prob_s_per_pair
    )
    return cost.call_s + cost.log_prob_call_s + parts_s


def _total(seconds: np.ndarray) -> float:
    """Seconds of a batch, a mean over batches."""
    return float(seconds.sum(axis=1).mean())
