"""What a weight update costs generation, on the virtual clock: tokens that busy engines would have made meanwhile.

    python -m tests.benchmarks.lost_tokens

Eight engines of a 7B model, always full; one update in the middle of a window that is long enough for what it sets
back. Costs are those of experiments/cost/roofline.yaml on an H100: assumptions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache

import numpy as np

from engines.simulated.rollout import SimulatedRollout
from harness.config import CostConfig
from harness.config.compose import compose_job
from harness.cost_model.cost import transfer_times
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.memory import JobLayout
from harness.cost_model.roofline import roofline
from harness.protocols import Completion, Request, StopMode
from harness.runtime.virtual_runtime import VirtualClock, run_virtual

ENGINES, SLOTS, GROUP = 8, 64, 8
UPDATE_AT_S, END_S = 200.0, 500.0

Update = Callable[[Sequence[SimulatedRollout], VirtualClock], Awaitable[None]]


def at_once(load_s: float, mode: StopMode, *, drop: bool = True) -> tuple[float, Update]:
    """All engines pause, load and go on."""

    async def update(engines: Sequence[SimulatedRollout], clock: VirtualClock) -> None:
        await asyncio.gather(*(engine.pause(mode) for engine in engines))
        await asyncio.gather(*(_load(engine, drop) for engine in engines))

    return load_s, update


def in_turn(load_s: float, mode: StopMode, cohorts: int) -> tuple[float, Update]:
    """One cohort after the other."""

    async def update(engines: Sequence[SimulatedRollout], clock: VirtualClock) -> None:
        for cohort in range(cohorts):
            part = engines[cohort::cohorts]
            await asyncio.gather(*(engine.pause(mode) for engine in part))
            await asyncio.gather(*(_load(engine) for engine in part))

    return load_s, update


async def _load(engine: SimulatedRollout, drop: bool = True) -> None:
    await engine.load_weights(1, iter(()))
    if drop:
        engine.drop_cache()
    await engine.resume()


async def tokens(load_s: float, update: Update | None) -> tuple[int, float]:
    """Tokens of all samples that ended by END_S or still ran then; seconds from the first pause to the last resume."""
    clock = VirtualClock(asyncio.get_running_loop())
    cost = costs()
    engines = [
        SimulatedRollout(
            cost,
            ResponseLengths(cost.lengths, seed),
            slots=SLOTS,
            group_size=GROUP,
            clock=clock,
            load_s=load_s,
            name=str(seed),
        )
        for seed in range(ENGINES)
    ]
    taking = [asyncio.create_task(_keep_full(engine)) for engine in engines]
    await clock.sleep(UPDATE_AT_S)
    start = clock.now()
    if update is not None:
        await update(engines, clock)
    took = clock.now() - start
    await clock.sleep(END_S - clock.now())
    for engine in engines:
        await engine.pause("abort")
    await asyncio.gather(*taking)
    return sum(int(task.result()) for task in taking), took


async def _keep_full(engine: SimulatedRollout) -> int:
    """Submit as samples end, until they are aborted; tokens of all of them."""
    prompt, made, sample = np.array([512]), 0, 0
    engine.submit([Request(number, prompt) for number in range(2 * SLOTS)])
    sample, open_samples = 2 * SLOTS, 2 * SLOTS
    ending = False
    while open_samples:
        done: list[Completion] = await engine.finished()
        made += sum(int(completion.tokens.sum()) for completion in done)
        open_samples -= len(done)
        ending = ending or any(completion.finish_reason == "abort" for completion in done)
        if not ending and engine.waiting < SLOTS:
            engine.submit([Request(sample + number, prompt) for number in range(GROUP)])
            sample, open_samples = sample + GROUP, open_samples + GROUP
    return made


@cache
def costs() -> CostConfig:
    config = compose_job(["model=qwen7b"])
    return roofline(config.model, config.device, config.cost, JobLayout())


def cases() -> dict[str, tuple[float, Update]]:
    cost = costs()

    def load_s(transport: str) -> float:
        return transfer_times(cost, transport).load_s

    return {
        "collective, all at once, drained": at_once(load_s("collective"), "wait"),
        "collective, all at once, in flight": at_once(load_s("collective"), "keep"),
        "host_staged, all at once, in flight": at_once(load_s("host_staged"), "keep"),
        "host_staged, all at once, cache kept": at_once(load_s("host_staged"), "keep", drop=False),
        "host_staged, in 2 cohorts, in flight": in_turn(load_s("host_staged"), "keep", 2),
        "host_staged, engine by engine, in flight": in_turn(load_s("host_staged"), "keep", ENGINES),
        "host_staged, in 2 cohorts, drained": in_turn(load_s("host_staged"), "wait", 2),
    }


def table() -> str:
    undisturbed, _ = run_virtual(tokens(0.0, None))
    rate = undisturbed / END_S
    lines = [
        f"tokens lost by one update of {ENGINES} simulated engines ({rate:,.0f} tokens/s); the KV cache is dropped",
        f"{'how':<42}{'tokens lost':>12}{'as seconds':>12}{'lasts, s':>10}{'paused at once':>16}",
    ]
    for name, (load_s, update) in cases().items():
        made, took = run_virtual(tokens(load_s, update))
        lost = undisturbed - made
        paused = ENGINES // 2 if "2 cohorts" in name else 1 if "engine by engine" in name else ENGINES
        lines.append(f"{name:<42}{lost:>12,}{lost / rate:>12.2f}{took:>10.2f}{paused:>16}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
