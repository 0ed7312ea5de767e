"""A job that only writes down what a schedule asks of it."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from schedules import Schedule
from schedules.protocol import PauseMode

STAGES = ("reward", "advantages", "reference", "actor_fwd")


class Log:
    """Calls as they begin and end, such as "train 3" and "train 3 done"."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.under_way: set[str] = set()

    @contextmanager
    def call(self, line: str) -> Iterator[set[str]]:
        """Yields what was under way when the call came."""
        before = set(self.under_way)
        self.lines.append(line)
        self.under_way.add(line)
        yield before
        self.under_way.discard(line)
        self.lines.append(f"{line} done")

    def at(self, line: str) -> int:
        assert self.lines.count(line) == 1, f"{line}: {self.lines.count(line)} times in {self.lines}"
        return self.lines.index(line)

    def of(self, *verbs: str) -> list[str]:
        return [line for line in self.lines if line.startswith(verbs) and not line.endswith("done")]


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class FakePrompts:
    """Drops as many groups as `drops` says, call by call."""

    log: Log
    drops: list[int] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def admit(self, below: int) -> None:
        with self.log.call(f"admit {below}"):
            await turns()

    async def drop(self, started_below: int) -> int:
        with self.log.call(f"drop {started_below}"):
            await turns()
        return self.drops.pop(0) if self.drops else 0

    async def close(self) -> None:
        with self.log.call("close"):
            self.closed.set()


@dataclass
class FakeRollout:
    log: Log
    closed: asyncio.Event
    engines: int = 4
    name: str = ""
    fills_s: float = 0.0

    def split(self, cohorts: int | None = None) -> Sequence["FakeRollout"]:
        if cohorts is not None and cohorts > self.engines:
            raise ValueError(f"{self.engines} engines cannot be dealt out into {cohorts} cohorts")
        return [FakeRollout(self.log, self.closed, 1, f"{k}: ") for k in range(cohorts or self.engines)]

    async def generate(self, iteration: int, batches: int = 1) -> None:
        what = str(iteration) if batches == 1 else f"{iteration}-{iteration + batches - 1}"
        with self.log.call(f"{self.name}generate {what}"):
            await turns(7 * batches)

    async def stream(self) -> None:
        with self.log.call(f"{self.name}stream"):
            await self.closed.wait()

    async def completed(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        with self.log.call(f"complete {iteration}"):
            await turns(7)

    async def filled(self, groups: int) -> None:
        with self.log.call(f"fill {groups}"):
            await asyncio.sleep(self.fills_s)

    async def set_dispatch_limit(self, below: int) -> None:
        with self.log.call(f"limit {below}"):
            await turns()

    async def pause(self, mode: PauseMode) -> None:
        with self.log.call(f"{self.name}pause {mode}"):
            await turns()

    async def put_off(self) -> None:
        with self.log.call(f"{self.name}put off"):
            await turns()

    async def resume(self, below: int, above: int = 0) -> None:
        with self.log.call(f"{self.name}resume {f'{above} to ' if above else ''}{below}"):
            await turns()

    async def hand_over(self, to: "FakeRollout") -> None:
        with self.log.call(f"{self.name}hand over"):
            self.closed.set()
            await turns()
            self.closed.clear()


@dataclass
class FakeStage:
    log: Log
    name: str
    closed: asyncio.Event

    async def process(self, iteration: int) -> None:
        with self.log.call(f"{self.name} {iteration}"):
            await turns(5)

    async def stream(self) -> None:
        with self.log.call(f"{self.name} streams"):
            await self.closed.wait()


@dataclass
class FakeTrainer:
    log: Log
    fail_at: int | None = None
    first: list[list[tuple[int, int]]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def waited(self) -> float:
        """Of the batch before, where a test says so."""
        return self.waits[len(self.first) - 1] if self.waits else 0.0

    async def train(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        self.first.append(list(first))
        with self.log.call(f"train {iteration}"):
            await turns(5)
            if iteration == self.fail_at:
                raise ArithmeticError(f"the loss of iteration {iteration} is not finite")


@dataclass
class FakeWeights:
    """A staged version arrives `transfer` turns later."""

    log: Log
    transfer: int = 10
    events: defaultdict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    async def publish(self, version: int) -> None:
        with self.log.call(f"publish {version}"):
            await turns()

    async def mark_version(self, version: int) -> None:
        with self.log.call(f"mark {version}"):
            await turns()

    async def start_transfer(self, version: int) -> None:
        with self.log.call(f"send {version}"):
            if version > 1:
                await self.events[version - 1].wait()
        asyncio.get_running_loop().create_task(self._travel(version))  # noqa: RUF006

    async def _travel(self, version: int) -> None:
        await turns(self.transfer)
        self.log.lines.append(f"here {version}")
        self.events[version].set()

    async def wait_arrived(self, version: int) -> None:
        await self.events[version].wait()

    async def swap(self, rollout: FakeRollout, version: int) -> None:
        with self.log.call(f"{rollout.name}swap {version}"):
            await turns()

    async def swap_newest(self, rollout: FakeRollout) -> int:
        version = max(number for number, arrived in self.events.items() if arrived.is_set())
        await self.swap(rollout, version)
        return version


class FakeJob:
    """`schedules.protocol.Job`."""

    def __init__(self, *, iterations: int = 4, batch: int = 8, fail_at: int | None = None, engines: int = 4) -> None:
        self.log = Log()
        self.iterations, self.batch = iterations, batch
        self.prompts = FakePrompts(self.log)
        closed = self.prompts.closed
        self.rollout = FakeRollout(self.log, closed, engines)
        self.lent = FakeRollout(self.log, asyncio.Event(), engines, "lent: ")
        self.stages: Sequence[FakeStage] = [FakeStage(self.log, name, closed) for name in STAGES]
        self.trainer = FakeTrainer(self.log, fail_at)
        self.weights = FakeWeights(self.log)

    async def play(self, schedule: Schedule) -> Log:
        """Runs the schedule to its end, and gives what was asked for."""
        async with asyncio.timeout(60):
            await schedule.run(self)  # type: ignore[arg-type]
        return self.log
