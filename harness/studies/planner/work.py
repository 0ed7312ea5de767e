"""What an iteration keeps each pool busy with, in seconds: at least (for bounds), likely (for what to try first)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from engines.simulated.decoding import decoded_s
from harness.config import CostConfig
from harness.cost_model.cost import Transport, offload_s, transfer_times
from harness.cost_model.step_time import DecodeCost
from harness.studies.planner.draws import Draws

_LOOKED_AT = 2  # engines whose share of a batch is decoded to see how long it takes


@dataclass(frozen=True)
class Crew:
    """The workers of a candidate. running: samples that an engine has running at most; rows: samples of a micro-batch
    on all ranks, and on all scorers; stages: of scoring; apart: these have a pool of their own.

    fresh_from: groups of a batch from this one on lag by floor(eta) iterations at most, those before by ceil(eta).
    together: batches that are generated as one.
    """

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
    transport: Transport


@dataclass(frozen=True)
class Work:
    """Seconds of one iteration. All are means over batches.

    generate_s: of the rollout pool, its engines full as long as there is anything to do; batch_s: of one batch, from
    empty engines to empty engines; longest_s, fresh_s: of its longest response, alone, and of the longest in its fresh
    part; score_s, train_s: of the pools that do it; micro_s: scoring and training of the smallest micro-batch, which
    nothing shortens for the last response; step_s: of the optimizer; send_s, load_s: of a weight update; offload_s: of
    a device that is given back.
    """

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

    @property
    def actor_s(self) -> float:
        """Of the actor's devices, transfers aside."""
        return self.train_s + self.step_s + (0.0 if self.apart else self.score_s)

    @property
    def scorers_s(self) -> float:
        """Of a pool that only scores."""
        return self.score_s if self.apart else 0.0

    @property
    def publish_s(self) -> float:
        """Of an update that everybody waits for."""
        return max(self.send_s, self.load_s)


def least_work(cost: CostConfig, crew: Crew, draws: Draws) -> Work:
    """No run of this job on these workers needs less, whatever the schedule.

    Decode steps: with n samples running, of c tokens, one lasts decode_step_s + max(decode_weights_s, n p) + c q, and
    makes n tokens. A batch of T tokens needs T / `running` steps at least, and as many as keep c below the KV cache.
    """
    steps = draws.tokens / crew.running
    if cost.kv_tokens is not None:
        steps = max(steps, draws.cached_steps / cost.kv_tokens)
    busy_s = (
        steps * cost.decode_step_s
        + max(steps * cost.decode_weights_s, draws.tokens * cost.decode_step_s_per_sample)
        + draws.cached_steps * cost.decode_s_per_cached_token
        + draws.samples * DecodeCost.of(cost).prefill(draws.prompt)
    )
    longest_s = _alone_s(cost, draws.prompt, draws.longest())
    generate_s = busy_s / crew.engines
    train = _train_s(cost, draws, crew.rows, crew.ranks)
    score = _score_s(cost, draws, crew.scored_rows, crew.scorers) * crew.stages
    times = transfer_times(cost, crew.transport)
    return Work(
        generate_s=generate_s,
        batch_s=cost.generate_s + max(generate_s, longest_s),
        longest_s=longest_s,
        fresh_s=_alone_s(cost, draws.prompt, draws.longest(crew.fresh_from)),
        score_s=_total(score),
        train_s=_total(train),
        micro_s=float(train.min()) + (float(score.min()) if crew.stages else 0.0),
        step_s=cost.train_step_s,
        send_s=times.send_s,
        load_s=times.load_s,
        offload_s=offload_s(cost),
        apart=crew.apart,
    )


def likely_work(cost: CostConfig, crew: Crew, draws: Draws, *, streaming: bool) -> Work:
    """As it will probably be. streaming: engines are refilled from the next batch, else they run empty between two."""
    work = least_work(cost, crew, draws)
    if not streaming:
        mean_s, last_s = _decoded(DecodeCost.of(cost), crew.engines, crew.running, crew.together, draws)
        return replace(work, generate_s=mean_s, batch_s=max(work.batch_s, cost.generate_s + last_s))
    context = draws.cached_steps / draws.tokens
    running = crew.running if cost.kv_tokens is None else min(crew.running, cost.kv_tokens / (context + 1))
    running = max(1.0, min(running, 2 * draws.samples / crew.engines))
    steps = draws.tokens / running
    step_s = cost.decode_step_s + max(cost.decode_weights_s, running * cost.decode_step_s_per_sample)
    cached_s = draws.cached_steps * cost.decode_s_per_cached_token
    again_s = running * context * cost.prefill_s_per_token  # the cache of all that runs, after an update
    prefill_s = draws.samples * DecodeCost.of(cost).prefill(draws.prompt)
    generate_s = (steps * step_s + cached_s + prefill_s) / crew.engines + again_s
    return replace(work, generate_s=max(work.generate_s, generate_s), batch_s=max(work.batch_s, generate_s))


@lru_cache(maxsize=4096)
def _decoded(cost: DecodeCost, engines: int, running: int, together: int, draws: Draws) -> tuple[float, float]:
    """Seconds for each batch until an engine has done its share of so many as one, groups dealt out in turn: a mean
    over some engines, and of the last one among them, that with the longest response included."""
    groups = draws.lengths[:together].reshape(-1, draws.group_size)
    longest = int(groups.max(axis=1).argmax()) % engines
    looked_at = {longest, *range(min(engines, len(groups), _LOOKED_AT))}
    ends = []
    for engine in looked_at:
        its = groups[engine::engines].ravel().tolist()
        ends.append(decoded_s(cost, its, prompt=draws.prompt, slots=running))
    return float(np.mean(ends)) * min(1.0, len(groups) / engines) / together, max(ends) / together


def _alone_s(cost: CostConfig, prompt: int, tokens: int) -> float:
    """A response on an engine of its own."""
    decode = DecodeCost.of(cost)
    return decode.prefill(prompt) + decode.steps(tokens, 1, prompt) if tokens else 0.0


def _train_s(cost: CostConfig, draws: Draws, rows: int, ranks: int) -> np.ndarray:
    """Seconds of every micro-batch: [batches, micro-batches]."""
    parts_s = draws.slowest_s(rows, ranks, s_per_token=cost.train_s_per_token, s_per_pair=cost.train_s_per_pair)
    return cost.call_s + cost.train_call_s + parts_s


def _score_s(cost: CostConfig, draws: Draws, rows: int, scorers: int) -> np.ndarray:
    parts_s = draws.slowest_s(rows, scorers, s_per_token=cost.log_prob_s_per_token, s_per_pair=cost.log_prob_s_per_pair)
    return cost.call_s + cost.log_prob_call_s + parts_s


def _total(seconds: np.ndarray) -> float:
    """Of a batch, a mean over batches."""
    return float(seconds.sum(axis=1).mean())
