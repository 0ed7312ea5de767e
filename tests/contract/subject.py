"""The engine in a test: one that runs, the models behind its versions, and what a rollout role does with it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from harness.protocols import Completion, Request, RolloutEngine, Sampling, StopMode
from harness.runtime.runtime import RealClock
from tests.contract.engine_under_test import Capability, EngineUnderTest, Setting
from tests.contract.reference import TOLERANCE, VOCABULARY, log_probs_of, make_model, reference_model, weights_of

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

WAIT_S = 120.0
"""Longest wait for news that is due: what an engine on a busy machine never needs."""
SLOTS = 8
LOAD = 4 * SLOTS
SEED = 7
NAME = "under test"
VARIED = Sampling(max_tokens=48, stop_tokens=(3, 14, 15, 65, 92))
"""Responses of all lengths, so that some are in mid-flight whenever another is done."""


class Subject:
    """Tests see its `engine`, give it work by `generate`, `collecting` or `busy`, and new weights by `update`.

    The weights of version `v` are those of `reference_model(v)`, for the initial ones and all later ones. `load` is how
    many samples keep the engine busy for a while.
    """

    def __init__(self, engine: RolloutEngine, under_test: EngineUnderTest, tied: bool) -> None:
        self.engine, self.under_test, self.tied = engine, under_test, tied
        self._sample_ids = count()
        self.sampling = Sampling(max_tokens=1)
        self.load = LOAD

    @classmethod
    async def started(cls, under_test: EngineUnderTest, tied: bool) -> Subject:
        setting = Setting(
            model=make_model(0, tied),
            sampling=Sampling(max_tokens=1),
            slots=SLOTS,
            seed=SEED,
            clock=RealClock.starting_now(),
            device=torch.device("cpu"),
            name=NAME,
        )
        async with asyncio.timeout(under_test.start_timeout_s):
            return cls(await under_test.start(setting), under_test, tied)

    def needs(self, *capabilities: Capability) -> None:
        """Skip the test where the engine says that it cannot do this, with its reason."""
        for capability in capabilities:
            if (reason := self.under_test.cannot.get(capability)) is not None:
                pytest.skip(f"{self.under_test.name} does without {capability!r}: {reason}")

    @property
    def compares_tokens(self) -> bool:
        return "tokens" not in self.under_test.cannot

    def sample_by(self, sampling: Sampling) -> None:
        """How what is submitted from now on is sampled. The engine has to be idle."""
        self.sampling = sampling
        self.under_test.sample_by(self.engine, sampling)

    def requests(self, number: int, prompt_tokens: int | None = None) -> list[Request]:
        """Samples that no test had before. Prompts are of 1 to 48 tokens unless told; they follow from the sample."""
        return [self._request(next(self._sample_ids), prompt_tokens) for _ in range(number)]

    def _request(self, sample_id: int, prompt_tokens: int | None) -> Request:
        random = np.random.default_rng([SEED, sample_id])
        prompt = random.integers(0, VOCABULARY, prompt_tokens or int(random.integers(1, 49)))
        return Request(sample_id, self.under_test.prompt(prompt))

    def many(self) -> list[Request]:
        """Samples for the engine to be busy with."""
        return self.requests(self.load)

    def same_prompt(self, request: Request, number: int) -> list[Request]:
        """Other samples of the prompt of `request`."""
        return [Request(next(self._sample_ids), request.prompt) for _ in range(number)]

    async def generate(self, requests: Sequence[Request]) -> dict[int, Completion]:
        """All of them, from submission to the last token, by sample."""
        async with self.collecting(requests) as samples:
            return await samples.all()

    @asynccontextmanager
    async def collecting(self, requests: Sequence[Request]) -> AsyncIterator[Collected]:
        """Submit, and take what the engine finishes for as long as the block lasts."""
        samples = Collected(self.engine)
        taking = asyncio.create_task(samples.take())
        try:
            samples.submit(requests)
            yield samples
        finally:
            taking.cancel()
            await asyncio.wait([taking])

    @asynccontextmanager
    async def busy(self, requests: Sequence[Request] = ()) -> AsyncIterator[Collected]:
        """With many samples of all lengths, or these, of which the first is done."""
        self.sample_by(VARIED)
        async with self.collecting(requests or self.many()) as samples:
            await samples.until(1)
            yield samples

    async def update(self, mode: StopMode = "keep", *, drop_cache: bool = True) -> int:
        """What a role does between two versions: pause, load the next one, drop the cache, go on. The new version."""
        version = self.engine.version + 1
        async with waiting_for(f"the update to version {version}"):
            await self.engine.pause(mode)
            await self.take(version)
            if drop_cache:
                self.engine.drop_cache()
            await self.engine.resume()
        return version

    async def take(self, version: int) -> None:
        await self.engine.load_weights(version, self.weights(version))
        assert self.engine.version == version

    def weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return weights_of(self.model(version))

    def model(self, version: int) -> Qwen3ForCausalLM:
        return reference_model(version, self.tied)

    def assert_sampled_by_its_versions(self, request: Request, completion: Completion) -> None:
        """It is whole, and each log-probability is that of a forward of the version that the token names."""
        stopped = np.isin(completion.tokens, self.sampling.stop_tokens)
        assert not stopped[:-1].any(), f"sample {completion.sample_id} went on after a stop token"
        if completion.finish_reason != "cut":
            assert completion.finish_reason == ("stop" if stopped[-1] else "length")
        assert completion.finish_reason == "cut" or stopped[-1] or len(completion.tokens) == self.sampling.max_tokens
        for version in np.unique(completion.versions).tolist():
            own = completion.versions == version
            expected = log_probs_of(self.model(version), request.prompt, completion.tokens, self.sampling)
            np.testing.assert_allclose(
                completion.log_probs[own],
                expected[own],
                rtol=0,
                atol=TOLERANCE,
                err_msg=f"log-probs of sample {completion.sample_id} that are marked as version {version}",
            )

    async def reset(self) -> None:
        """Idle, awake, running, complete weights that no test had before: whatever a test left behind."""
        async with waiting_for("the engine to be as new"):
            await self.engine.wake()
            await self.engine.pause("abort")
            await self.take(self.engine.version + 1)
            self.engine.drop_cache()
            self.sample_by(Sampling(max_tokens=1))
            self.load = LOAD
            await self.engine.resume()
            # What the engine still has to tell comes before, or with, a sample that is new.
            (last,) = self.requests(1)
            self.engine.submit([last])
            while last.sample_id not in {completion.sample_id for completion in await self.engine.finished()}:
                pass

    def processes(self) -> Sequence[int]:
        return self.under_test.processes(self.engine)


class Collected:
    """What one engine finished. `take` consumes it, and unblocks `until` and `all`; it ends when it is cancelled."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._expected: set[int] = set()
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self.done: dict[int, Completion] = {}
        self.aborted: list[Completion] = []
        """What came back with reason "abort", and was not submitted again."""

    def submit(self, requests: Sequence[Request]) -> None:
        again = {request.sample_id for request in requests}
        self.aborted = [completion for completion in self.aborted if completion.sample_id not in again]
        self._expected |= again
        self._engine.submit(requests)

    def expect(self, sample_ids: Iterable[int]) -> None:
        """Wait for these too, which someone else submitted."""
        self._expected |= set(sample_ids)

    async def take(self) -> None:
        try:
            while True:
                for completion in await self._engine.finished():
                    self._add(completion)
                self._news.set()
        except Exception as failure:
            self._failure = failure
            self._news.set()

    def _add(self, completion: Completion) -> None:
        sample_id = completion.sample_id
        assert sample_id in self._expected, f"sample {sample_id} was finished, and never submitted"
        returned = {aborted.sample_id for aborted in self.aborted} | set(self.done)
        assert sample_id not in returned, f"sample {sample_id} was returned twice"
        if completion.finish_reason == "abort":
            self.aborted.append(completion)
        else:
            self.done[sample_id] = completion

    async def until(self, number: int) -> None:
        """Wait until so many samples have come back, aborted ones too. Raises what the engine raised."""
        async with waiting_for(f"{number} of {len(self._expected)} samples"):
            while len(self.done) + len(self.aborted) < number:
                self._news.clear()
                if self._failure is not None:
                    raise self._failure
                await self._news.wait()

    async def all(self) -> dict[int, Completion]:
        """Wait for everything that was submitted; what was not aborted, by sample."""
        await self.until(len(self._expected))
        return self.done

    async def failure(self) -> Exception:
        """Wait until `finished` raises."""
        async with waiting_for("the engine to say that something is wrong"):
            while self._failure is None:
                self._news.clear()
                await self._news.wait()
        return self._failure


@asynccontextmanager
async def waiting_for(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(WAIT_S) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise TimeoutError(f"waited {WAIT_S:.0f} s for {what}") from None


# -- tests that interrupt an engine, which a fast engine or a slow test may be too late for

LOADS = (LOAD, 4 * LOAD, 16 * LOAD)


class TooLate(Exception):
    """The engine was through with its work before the test could interrupt it."""


def too_late_unless(in_time: object) -> None:
    if not in_time:
        raise TooLate


def in_flight(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A test of what happens to running samples: where it came too late, it starts again with four times the load."""

    @functools.wraps(test)
    async def run(subject: Subject, **parameters: Any) -> None:
        for subject.load in LOADS:
            try:
                return await test(subject, **parameters)
            except TooLate:
                await subject.reset()
        pytest.fail(f"the engine had done {subject.load} samples before it could be interrupted")

    return run
