"""Simulated chaos. One seed: a random job, faults while it runs, the same command again until it has ended, and what is
promised of it then; many seeds: in as many processes as there are cores, within a time; and what came of it."""

import asyncio
import gc
import io
import json
import os
import shutil
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.compute as pc
from rich.console import Console

from harness.acceptance.chaos.faults import (
    AttemptFaults,
    Fault,
    damage,
    damaged_checkpoints,
    draw_faults,
    finished_with,
    version_of,
    whole_checkpoints,
)
from harness.acceptance.chaos.jobs import random_job
from harness.acceptance.chaos.processes import DRIVER, FaultyRuntime, Process
from harness.checks.job import plan_job
from harness.config import CheckpointConfig, CostConfig, JobConfig, RestartsConfig
from harness.config.compose import make_schedule, plain
from harness.config.machine import NO_MACHINE
from harness.config.registries import SCHEDULES
from harness.driver.assemble import assemble
from harness.driver.backends import RunSpec, clock_of, open_backend
from harness.driver.checkpoint_files import CHECKPOINTS
from harness.driver.earlier import EarlierAttempt
from harness.driver.endings import left_in, losses_in
from harness.driver.listeners import IterationListener
from harness.driver.restarts import Restarts
from harness.driver.session import Session
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import markdown_table
from harness.metrics.run_files import RunDirectory, load_metrics, load_samples
from harness.rpc.children import parallel_as_completed
from harness.runtime.interrupts import run_in
from harness.runtime.runtime import parts_of
from harness.runtime.virtual_runtime import Deadlock, VirtualLoop
from harness.weight_sync.membership import MembershipConflict

_IN_MEMORY = Path("/dev/shm")
_OF_SEVERAL_TURNS = 0.3  # of the jobs that would have some: their events take most of the time
_CUT = "cut"
_MOST_S = 10.0  # that a process stands still; a batch takes about one


@dataclass
class Chaos:
    """The outcome of a seed. struck: faults that happened, by what; told: a line each; problems: broken promises."""

    seed: int
    schedule: str
    attempts: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """Faults that happened."""
        return self.struck.total()


class _Severed(Exception):
    """The driver is no more."""


class _Livelock(Exception):
    """Raised for a run that goes on and on."""


class _CountingLoop(VirtualLoop):
    """Does some things before some of its turns. Raises _Livelock after so many."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.turns, self.limit = 0, limit
        self.planned: list[tuple[int, Callable[[], None]]] = []  # actions by the turn at which they happen

    def _run_once(self) -> None:
        self.turns += 1
        while self.planned and self.planned[0][0] <= self.turns:
            self.planned.pop(0)[1]()
        if self.turns > self.limit:
            self.limit = float("inf")
            raise _Livelock(self._explanation())
        super()._run_once()  # type: ignore[misc]


class _FaultySession(Session):
    """A session whose workers are processes that faults happen to."""

    runtime: FaultyRuntime

    def start(self, stack: ExitStack) -> None:
        self._backend = replace(open_backend(self.run, self.clock, stack), runtime=self.runtime)
        self._assembly = assemble(self.run, self._backend, self.recorder, self.recorder.recording)


@dataclass
class _Attempt:
    """One, in the folder of a run. last: no fault may end it."""

    config: JobConfig
    results: Path
    seed: int
    faults: Sequence[Fault]
    chaos: Chaos
    random: Random
    last: bool
    limit: float = float("inf")
    began: int = 0
    turns: int = 0
    ended: str = ""  # how, if not well

    def __post_init__(self) -> None:
        self._leave = self._cut = False
        self._session: _FaultySession | None = None
        self._spoiled: set[str] = set()
        self._copy = self.results.with_name("copy")
        self.folder = RunDirectory(self.results, "e", "c", 0).path
        self.output = io.StringIO()

    def run(self) -> None:
        """Raises what no fault should end in."""
        try:
            self._run()
        except _Severed:
            shutil.rmtree(self.folder)
            self._copy.rename(self.folder)
            self.ended = _CUT
        except Exception as failure:
            parts = list(parts_of(failure))
            lines = [left] if (left := left_in(parts)) is not None else losses_in(parts)
            if not lines or any(isinstance(part, Deadlock | _Livelock) for part in parts):
                raise
            self.ended = "; ".join(lines)
        if self.ended != _CUT:
            gc.collect()  # what nobody noticed is told now

    def _unnoticed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Would be a traceback. What is taken down here after a cut would not have been."""
        if not self._cut:
            self.chaos.problems.append(f"{context['message']}: {context.get('exception')!r}")

    def _run(self) -> None:
        config, schedule = self.config, make_schedule(self.config)
        plan = plan_job(config, schedule, NO_MACHINE)
        earlier = EarlierAttempt(Console(file=self.output, width=10_000), ignored=False)
        with RunDirectory(self.results, "e", "c", 0, earlier) as folder, ExitStack() as stack:
            self.began = 0 if earlier.checkpoint is None else earlier.checkpoint.version
            folder.write_config(plain(config))
            runner = stack.enter_context(asyncio.Runner(loop_factory=lambda: _CountingLoop(self.limit)))
            loop: Any = runner.get_loop()
            loop.set_exception_handler(self._unnoticed)
            clock = clock_of(plan, loop)
            spec = RunSpec(
                config,
                schedule,
                plan,
                config.model,
                self.seed,
                checkpoints=folder.path / CHECKPOINTS,
                resumed=earlier.checkpoint,
                leave=lambda: self._leave,
                restarts=Restarts(config.restarts.limit),
            )
            session = self._session = _FaultySession(spec, clock)
            session.runtime = FaultyRuntime(self.random)
            session.start(stack)
            session.recorder.listeners.append(IterationListener(folder.append_metrics))
            session.recorder.write_into(folder)
            loop.planned = [(fault.turn, lambda fault=fault: self._strike(fault)) for fault in self.faults]
            try:
                run_in(runner, session.connect())
                run_in(runner, session.measure())
            finally:
                self.turns, loop.planned = loop.turns, []
            session.recorder.write(folder)
            folder.finish()

    def _strike(self, fault: Fault) -> None:
        assert self._session is not None
        if told := self._happens(fault, self._session):
            self.chaos.struck[fault.what] += 1
            self.chaos.told.append(f"{self.chaos.attempts}: turn {fault.turn}: {told}")
            if fault.what == "cut":
                shutil.copytree(self.folder, self._copy)
                gc.collect()  # what nobody noticed until now is told
                self._cut = True
                raise _Severed

    def _happens(self, fault: Fault, session: _FaultySession) -> str:
        """Let a fault happen; returns a line on it, empty where it cannot."""
        processes = session.runtime.processes
        if fault.what == "cut":
            return "the driver is killed"
        if fault.what == "asked to leave":
            self._leave = True
            return "the driver gets SIGTERM"
        if fault.what in ("leaves", "joins"):
            return self._request(fault, session)
        if fault.what == "dies":
            there = [one for one in processes.values() if one.name != DRIVER and not one.died]
            return _killed(there[fault.whom % len(there)]) if there else ""
        if fault.what == "engine dies":
            return self._kill_engine(fault, session)
        there = [one for one in processes.values() if not one.died]
        process, seconds = there[fault.whom % len(there)], fault.size**3 * _MOST_S
        if fault.what == "stands still":
            process.stand_still(seconds)
            return f"{process.name} stands still for {seconds:.3g} s"
        if fault.what == "is slow":
            process.be_slow(seconds, seconds / 10)
            return f"{process.name} is slow for {seconds:.3g} s"
        if self.last and (process.name in self._spoiled or process.torn_transfers):
            return ""
        self._spoiled.add(process.name)
        process.torn_transfers = 1 + int(fault.size * (2 if self.last else 3))
        return f"the next {process.torn_transfers} transfers to {process.name} break off"

    def _request(self, fault: Fault, session: _FaultySession) -> str:
        fleet = session.assembly.job.rollout.fleet
        names = [member.name for member in fleet.membership.members if member.kind == "engine"]
        name, what = names[fault.whom % len(names)], "leave" if fault.what == "leaves" else "join"
        with suppress(MembershipConflict):  # it has not left, or is the last
            fleet.membership.request(name, what)  # type: ignore[arg-type]
            return f"{name} is to {what}"
        return ""

    def _kill_engine(self, fault: Fault, session: _FaultySession) -> str:
        working = session.assembly.job.rollout.fleet.working
        if not working:
            return ""
        handle: Any = working[fault.whom % len(working)]
        staying = [one for one in working if not one.process.died and one is not handle]  # type: ignore[attr-defined]
        starting = session.assembly.coordinator.plan is None  # then a death ends the run, whatever is set
        ends = starting or self.config.cluster.on_lost_engine == "end" or session.run.schedule.colocated or not staying
        return "" if self.last and ends else _killed(handle.process)


def _killed(process: Process) -> str:
    process.die("killed by signal 9")
    return f"{process.name} is killed"


def play(seed: int, folder: Path) -> Chaos:
    """Play all of one seed, in an empty folder."""
    random = Random(seed)
    schedule = list(SCHEDULES)[seed % len(SCHEDULES)]
    chaos = Chaos(seed, schedule)
    config = _job(schedule, random)
    try:
        whole = _Attempt(config, folder / "whole", seed, (), chaos, random, last=True)
        whole.run()
        if not whole.ended:
            _break(config, folder / "broken", chaos, random, whole)
        else:
            chaos.problems.append(f"without any fault it ended: {whole.ended}")
    except Exception as failure:
        (first, *_) = parts_of(failure)
        chaos.problems.append(f"{type(first).__name__}: {first}")
    return chaos


def _job(schedule: str, random: Random) -> JobConfig:
    config = random_job(schedule, random.choice)
    assert isinstance(config.cost, CostConfig)
    turns = config.cost.turns if random.random() < _OF_SEVERAL_TURNS else None
    return replace(
        config,
        iterations=random.randint(3, 7),
        cost=replace(config.cost, turns=turns),
        checkpoint=CheckpointConfig(every=random.randint(1, 3), keep=random.randint(1, 3)),
        restarts=RestartsConfig(limit=random.choice((0, 1, 3))),
        cluster=replace(config.cluster, on_lost_engine=random.choice(("go_on", "go_on", "end"))),
    )


def _break(config: JobConfig, results: Path, chaos: Chaos, random: Random, whole: _Attempt) -> None:
    """The same job again with faults, as often as it takes."""
    damaged: dict[str, int] = {}
    *ending, last = draw_faults(random, whole.turns)
    for number, drawn in enumerate([*ending, last]):
        chaos.attempts = number
        limit = 20 * whole.turns + 20_000
        attempt = _Attempt(config, results, chaos.seed, drawn.faults, chaos, random, drawn is last, limit)
        (*_, expected) = (0, *(version_of(path) for path in whole_checkpoints(attempt.folder, damaged)))
        to_be_named = [
            path.name for path in damaged_checkpoints(attempt.folder, damaged) if version_of(path) > expected
        ]
        attempt.run()
        said = attempt.output.getvalue()
        if attempt.began != expected:
            chaos.problems.append(f"attempt {number} began with version {attempt.began}, not with {expected}: {said}")
        chaos.problems += [f"{one} was damaged, and is not named" for one in to_be_named if one not in said]
        if not attempt.ended:
            chaos.problems += _after(attempt.folder, whole.folder)
            return
        chaos.told.append(f"{number}: ended: {attempt.ended}")
        _damage(attempt.folder, drawn, chaos, random, damaged)
    chaos.problems.append(f"the last attempt, which nothing was to end, ended: {attempt.ended}")


def _damage(run: Path, drawn: AttemptFaults, chaos: Chaos, random: Random, damaged: dict[str, int]) -> None:
    """Checkpoints, the newest first."""
    for what in drawn.damaged:
        if whole := whole_checkpoints(run, damaged):
            chaos.struck[f"checkpoint: {what}"] += 1
            chaos.told.append(damage(whole[-1], what, random, damaged))


def _after(broken: Path, whole: Path) -> list[str]:
    """Problems of a run that was broken and came to its end, beside one that was not."""
    run, problems = finished_with(broken)
    schedule, config, lines = make_schedule(run.config), run.config, load_metrics(broken)
    times = [line["seconds"] for line in lines]
    if times != sorted(times):
        problems.append(f"the time axis goes back: {times}")
    if schedule.order == "fifo" and {s.sample_id for s in run.trained} != _trained(whole):
        problems.append("other samples were trained than without faults")
    if config.algorithm.filters:
        refused = sum(line["filter/refused"] for line in lines) * run.group
        if refused != run.counts["dropped_filtered"]:
            problems.append(
                f"metrics.jsonl has {refused:.0f} refused samples, the ledger {run.counts['dropped_filtered']}"
            )
    return problems


def _trained(run: Path) -> set[int]:
    samples = load_samples(run)
    return set(samples.filter(pc.equal(samples["fate"], "trained"))["sample_id"].to_pylist())


def play_in_a_folder(seed: int) -> Chaos:
    """Play a seed in a folder of its own, which is deleted; in memory, where there is such a place."""
    with TemporaryDirectory(prefix="chaos-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as folder:
        return play(seed, Path(folder))


_GRACE_S = 120.0  # seconds that a seed may take beyond the limit: then what waits for it says so


@dataclass
class ChaosCampaign:
    """Simulated chaos over many seeds. skipped: seeds for which no time was left."""

    first: int
    seeds: int
    done: list[Chaos] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0

    @property
    def faults(self) -> int:
        """Faults that happened in all runs."""
        return sum(one.faults for one in self.done)

    @property
    def struck(self) -> Counter[str]:
        """Faults that happened, by kind."""
        return sum((one.struck for one in self.done), Counter())

    @property
    def failed(self) -> list[Chaos]:
        """Runs that broke a promise."""
        return [one for one in self.done if one.problems]


def run_campaign(campaign: ChaosCampaign, limit_s: float, progress: Callable[[str], None] = lambda said: None) -> None:
    """Plays its seeds; none is begun after `limit_s`. What is done is in it, also where this is interrupted."""
    started = time.monotonic()
    until = started + limit_s  # all processes of a machine read the same
    numbers = list(range(campaign.first, campaign.first + campaign.seeds))
    play = partial(_play_in_time, until=until)
    for _, chaos in parallel_as_completed(
        play, numbers, processes=os.cpu_count() or 1, timeout_s=limit_s + _GRACE_S, what="simulated chaos"
    ):
        if chaos is None:
            campaign.skipped += 1
            continue
        insort(campaign.done, chaos, key=lambda one: one.seed)
        campaign.seconds = time.monotonic() - started
        progress(f"{len(campaign.done)} seeds, {campaign.faults:,} faults, {len(campaign.failed)} failed")


def _play_in_time(seed: int, *, until: float) -> Chaos | None:
    if time.monotonic() > until:
        return None
    with redirect_stderr(StringIO()):  # lines on samples whose tools hang, of which there are many
        return play_in_a_folder(seed)


def repeat_command(seed: int) -> str:
    """The command that repeats one seed."""
    return f"cadence chaos first={seed} seeds=1"


def write_campaign(campaign: ChaosCampaign, folder: Path) -> list[Path]:
    """simulated.json and simulated.md."""
    folder.mkdir(parents=True, exist_ok=True)
    struck = dict(campaign.struck.most_common())
    found = {
        "first": campaign.first,
        "seeds": len(campaign.done),
        "skipped": campaign.skipped,
        "seconds": round(campaign.seconds, 1),
        "faults": campaign.faults,
        "struck": struck,
        "failed": [{"seed": one.seed, "problems": one.problems, "told": one.told} for one in campaign.failed],
    }
    paths = [folder / "simulated.json", folder / "simulated.md"]
    write_text(paths[0], json.dumps(found, indent=1) + "\n")
    write_text(paths[1], page(campaign))
    return paths


def page(campaign: ChaosCampaign) -> str:
    """A page of Markdown: a table of schedules, and each failure with the command that repeats it."""
    schedules: dict[str, list[Chaos]] = {}
    for one in campaign.done:
        schedules.setdefault(one.schedule, []).append(one)
    rows = []
    for name, its in sorted(schedules.items()):
        counts = (len(its), sum(1 + one.attempts for one in its), sum(one.faults for one in its))
        rows.append([name, *(f"{count:,}" for count in counts), f"{sum(bool(one.problems) for one in its)}"])
    struck = [[what, f"{count:,}"] for what, count in campaign.struck.most_common()]
    lines = ["# Simulated faults", "", summary(campaign)]
    lines += ["", markdown_table(("schedule", "runs", "attempts", "faults", "failed"), rows)]
    lines += ["", markdown_table(("fault", "times"), struck)]
    for one in campaign.failed:
        lines += ["", f"Seed {one.seed}, {one.schedule}: `{repeat_command(one.seed)}`", ""]
        lines += [f"- {line}" for line in (*one.told, *one.problems)]
    return "\n".join(lines) + "\n"


def summary(campaign: ChaosCampaign) -> str:
    """One line on all runs."""
    left = f"; {campaign.skipped} seeds were not begun in time" if campaign.skipped else ""
    return (
        f"{campaign.faults:,} faults in {len(campaign.done):,} simulated runs, {campaign.seconds:.0f} s: "
        f"{len(campaign.failed)} broke a promise{left}"
    )
