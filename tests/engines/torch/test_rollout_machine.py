"""The embedded engine under whatever a role may ask of it, in any order: hypothesis looks for one that breaks it."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness.protocols import Request, Sampling, StopMode
from tests.contract.registered import TORCH
from tests.contract.subject import Collected, Subject
from tests.support.examples import examples

SAMPLING = Sampling(max_tokens=9, stop_tokens=(3, 14, 15))


class EngineMachine(RuleBasedStateMachine):
    """What goes in comes out: once, whole, and with the version that sampled each token."""

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.requests: dict[int, Request] = {}
        self.paused = self.asleep = self.incomplete = False
        self.run(self._start())

    async def _start(self) -> None:
        self.subject = await Subject.started(TORCH, tied=True)
        self.subject.sample_by(SAMPLING)
        self.engine, self.version = self.subject.engine, 0
        self.samples = Collected(self.engine)
        self.taking = asyncio.create_task(self.samples.take())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def with_news() -> None:
            await work
            await asyncio.sleep(0)

        self.runner.run(with_news())

    @property
    def still(self) -> bool:
        return self.paused or not (self.engine.running or self.engine.waiting)

    @property
    def working(self) -> bool:
        """What is submitted may begin, or waits for `resume`."""
        return not self.asleep and (self.paused or not self.incomplete)

    @precondition(lambda self: self.working)
    @rule(number=st.integers(1, 12))
    def submit(self, number: int) -> None:
        requests = self.subject.requests(number)
        self.requests.update({request.sample_id: request for request in requests})
        self.samples.submit(requests)

    @precondition(lambda self: self.working and self.samples.aborted)
    @rule()
    def continue_what_was_aborted(self) -> None:
        self.samples.submit([replace(self.requests[a.sample_id], partial=a) for a in self.samples.aborted])

    @precondition(lambda self: not self.asleep)
    @rule(turns=st.integers(1, 12))
    def let_it_work(self, turns: int) -> None:
        async def work() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(work())

    @precondition(lambda self: not self.asleep)
    @rule(mode=st.sampled_from(["keep", "wait", "abort"]))
    def pause(self, mode: StopMode) -> None:
        assume(mode != "wait" or not self.incomplete)  # what runs would have to go on
        self.paused = True
        self.run(self.engine.pause(mode))
        assert mode == "keep" or not self.engine.running
        assert mode != "abort" or not self.engine.waiting

    @precondition(lambda self: not self.asleep and not self.incomplete)
    @rule()
    def resume(self) -> None:
        self.paused = False
        self.run(self.engine.resume())

    @precondition(lambda self: not self.asleep and self.incomplete)
    @rule()
    def resume_in_vain(self) -> None:
        """With weights of two versions."""
        with pytest.raises(RuntimeError, match="in part only"):
            self.run(self.engine.resume())

    @precondition(lambda self: self.still)
    @rule()
    def load(self) -> None:
        self.version += 1
        self.run(self.subject.take(self.version))
        self.incomplete = False
        self.engine.drop_cache()

    @precondition(lambda self: self.still)
    @rule(tensors=st.integers(0, 20))
    def load_in_vain(self, tensors: int) -> None:
        """Some tensors of the next version, and no more."""
        weights = [pair for pair, _ in zip(self.subject.weights(self.version + 1), range(tensors), strict=False)]

        async def load() -> None:
            try:
                await self.engine.load_weights(self.version + 1, weights)
            except ValueError:
                return
            raise AssertionError(f"{tensors} tensors were taken for a whole set")

        self.run(load())
        self.incomplete = self.incomplete or tensors > 0

    @precondition(lambda self: not self.asleep)
    @rule()
    def drop_cache(self) -> None:
        self.engine.drop_cache()

    @precondition(lambda self: self.still and not self.asleep)
    @rule()
    def sleep(self) -> None:
        self.asleep = True
        self.run(self.engine.sleep())

    @precondition(lambda self: self.asleep)
    @rule()
    def wake(self) -> None:
        self.asleep = False
        self.run(self.engine.wake())

    @invariant()
    def every_sample_is_somewhere(self) -> None:
        told = len(self.samples.done) + len(self.samples.aborted)
        untold = len(self.requests) - told - self.engine.running - self.engine.waiting
        assert untold >= 0 and self.engine.running <= self.engine.slots
        assert self.engine.version == self.version
        assert not self.taking.done(), "finished() ended, by an error or without one"

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            try:
                self.run(self._finish())
            finally:
                self.runner.close()

    async def _finish(self) -> None:
        await self.engine.wake()
        if self.incomplete:
            self.version += 1
            await self.subject.take(self.version)
        await self.engine.resume()
        done = await self.samples.all()
        if self.samples.aborted:
            self.samples.submit([replace(self.requests[a.sample_id], partial=a) for a in self.samples.aborted])
            done = await self.samples.all()
        self.taking.cancel()
        assert set(done) == set(self.requests)
        for sample_id, completion in done.items():
            self.subject.assert_sampled_by_its_versions(self.requests[sample_id], completion)


EngineMachine.TestCase.settings = settings(
    max_examples=examples(30),
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],  # a busy machine; an engine asleep
)
TestEngineMachine = EngineMachine.TestCase
