import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from harness.protocols import Completion, Request, RolloutEngine, Sampling, Span
from harness.transfer_queue import Column
from harness.workers.rollout import RolloutRole
from harness.workers.sample_flow import EngineSamples
from harness.workers.turns import DeviceTurns
from schedules.protocol import PauseMode
from tests.support.role_setting import (
    GROUP,
    ROWS,
    TASK,
    CountingQueue,
    FixedWeights,
    HandEngine,
    rollout_role,
    settle,
    torch_engine,
)


async def test_the_first_sample_of_each_group_is_drawn_greedily_where_others_are_compared_with_it() -> None:
    """By the same engine, in the same steps; also what a pause gave up, and begins again."""
    plain = await _said(None, abort=False)
    for abort in (False, True):
        mixed = await _said(Sampling(12, temperature=0.0, stop_tokens=TASK.stop_tokens), abort=abort)
        for row in range(ROWS):
            tokens, log_probs = mixed[row]
            assert (log_probs == [0.0] * len(tokens)) == (row % GROUP == 0), "what is drawn greedily is certain"
            if row % GROUP:
                assert mixed[row] == plain[row], "to the bit what it would be without"


class KeepingQueue(CountingQueue):
    """Remembers tokens and log-probs of every response."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[int, tuple[list[int], list[float]]] = {}

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        if "response" in columns:
            parts = (columns[name].rows() for name in ("response", "log_probs"))  # type: ignore[union-attr]
            said = ((tokens.tolist(), log_probs.tolist()) for tokens, log_probs in zip(*parts, strict=True))
            self.said |= zip(rows, said, strict=True)
        await super().put(partition, rows, columns)


async def _said(greedy: Sampling | None, *, abort: bool) -> dict[int, tuple[list[int], list[float]]]:
    queue, engine = KeepingQueue(), torch_engine(slots=8)
    await queue.admit(0)
    role = rollout_role(engine, queue, greedy=greedy)
    running = asyncio.create_task(role.generate(0))
    if abort:
        await settle(5)  # a few tokens of the first groups
        await role.pause("abort")
        await role.resume(below=ROWS // GROUP)
    await running
    assert len(queue.said) == ROWS
    return queue.said


async def generating(**told: int) -> tuple[CountingQueue, HandEngine, RolloutRole, asyncio.Task[Any]]:
    """A role at the batch of a queue, with all that its engine takes in flight; told: slots, and the role's index."""
    queue, engine = CountingQueue(), HandEngine(told.pop("slots", ROWS))
    await queue.admit(0)
    role = rollout_role(engine, queue, **told)  # type: ignore[arg-type]
    running = asyncio.create_task(role.generate(0))
    await settle()
    return queue, engine, role, running


async def streaming(engine: RolloutEngine, **told: bool) -> tuple[CountingQueue, RolloutRole, asyncio.Task[list[Span]]]:
    """A role that has weights to join, and streams the only batch of a queue; told: of `rollout_role`."""
    queue = CountingQueue()
    await queue.admit(0)
    await queue.close()
    role = rollout_role(engine, queue, **told)  # type: ignore[arg-type]
    await role.use(FixedWeights())
    return queue, role, asyncio.create_task(role.stream())


async def finish_all(engine: HandEngine, running: asyncio.Task[Any]) -> None:
    while not running.done():
        engine.finish(list(engine.held))
        await settle()


@pytest.mark.parametrize("shares_device", [True, False])
async def test_an_engine_that_shares_its_device_takes_it_for_a_batch_and_gives_it_back(shares_device: bool) -> None:
    queue, engine = CountingQueue(), HandEngine()
    _: RolloutEngine = engine
    await queue.admit(0)
    engine.awake = not shares_device
    running = asyncio.create_task(rollout_role(engine, queue, shares_device=shares_device).generate(0))
    await settle()
    assert engine.awake and engine.running == ROWS
    engine.finish(list(engine.held))
    await running
    assert engine.awake is not shares_device


async def test_an_engine_that_sleeps_since_its_start_wakes_where_it_streams() -> None:
    engine = HandEngine()
    await engine.sleep()
    _, _, running = await streaming(engine, shares_device=True)
    await settle()
    assert engine.awake and engine.running == ROWS
    engine.finish(list(engine.held))
    await running


async def test_several_batches_as_one_fill_the_slots_and_leave_others_their_share() -> None:
    queue, engine = CountingQueue(), HandEngine(slots=ROWS + GROUP)
    for iteration in range(3):
        await queue.admit(iteration)
    running = asyncio.create_task(rollout_role(engine, queue).generate(0, 2))
    await settle()
    assert engine.held == list(range(ROWS + GROUP)), "samples of the second batch run beside those of the first"
    await finish_all(engine, running)
    assert queue.written() == list(range(2 * ROWS)), "and none of the third"
    queue, early, late = CountingQueue(), HandEngine(slots=2 * ROWS), HandEngine(slots=2 * ROWS)
    half = ROWS // 2 // GROUP * GROUP
    for iteration in range(2):
        await queue.admit(iteration)
    first = asyncio.create_task(rollout_role(early, queue, index=0, share=half).generate(0, 2))
    await settle()
    assert early.running == 2 * half
    second = asyncio.create_task(rollout_role(late, queue, index=1, share=half).generate(0, 2))
    await settle()
    assert late.running == 2 * ROWS - 2 * half
    early.finish(list(early.held))
    late.finish(list(late.held))
    await asyncio.gather(first, second)


async def test_an_engine_gets_whole_groups_and_no_more_than_it_has_slots_for() -> None:
    _, engine, _, running = await generating(slots=2 * GROUP + 1)
    assert engine.batches == [list(range(2 * GROUP))]
    engine.finish([0, 1, 2])  # with the spare slot, room for one group
    await settle()
    assert engine.batches[1:] == [list(range(2 * GROUP, 3 * GROUP))]
    await finish_all(engine, running)
    assert all(len(batch) % GROUP == 0 and batch[0] % GROUP == 0 for batch in engine.batches)


async def test_a_completion_that_finishes_while_a_put_is_under_way_is_written_exactly_once() -> None:
    queue, engine, _, running = await generating()
    queue.gate.clear()
    engine.finish([0, 1])
    await queue.putting.wait()
    engine.finish([2])
    await settle()
    engine.finish([3, 4])
    await settle()
    assert queue.responses == [[0, 1]]
    queue.gate.set()
    await settle()
    assert queue.responses == [[0, 1], [2, 3, 4]]
    engine.finish(list(engine.held))
    await running
    assert queue.written() == list(range(ROWS))


async def test_generate_does_not_return_before_the_last_put_has_ended() -> None:
    queue, engine, _, running = await generating()
    queue.gate.clear()
    engine.finish(list(engine.held))
    await settle()
    assert not running.done() and engine.awake
    queue.gate.set()
    await running


async def test_stream_waits_for_its_last_samples_after_the_queue_is_exhausted() -> None:
    engine = HandEngine()
    _, _, running = await streaming(engine)
    await settle()
    engine.finish(engine.held[:-1])
    await settle()
    assert not running.done()
    engine.finish(list(engine.held))
    await running


async def test_no_group_starts_at_or_beyond_the_dispatch_limit() -> None:
    queue, engine = CountingQueue(), HandEngine()
    await queue.admit(0)
    await queue.close()
    role = rollout_role(engine, queue)
    await role.set_dispatch_limit(below=2)
    running = asyncio.create_task(role.stream())
    await settle()
    assert engine.held == list(range(2 * GROUP))
    engine.finish(list(engine.held))
    await settle()
    assert engine.held == []
    await role.set_dispatch_limit(below=3)
    await settle()
    assert engine.held == list(range(2 * GROUP, 3 * GROUP))
    await role.set_dispatch_limit(below=ROWS // GROUP)
    engine.finish(list(engine.held))
    await settle()
    engine.finish(list(engine.held))
    await running


@pytest.mark.parametrize("mode", get_args(PauseMode))
@pytest.mark.parametrize("staged", [False, True])
async def test_weights_that_arrive_mid_stream_are_stamped_on_tokens(mode: PauseMode, staged: bool) -> None:
    engine = torch_engine(slots=ROWS)
    queue, role, running = await streaming(engine)
    while not queue.responses:
        await settle(1)
    assert engine.running, "all finished at once: the test shows nothing"
    if staged:
        (span,) = await role.stage(1)
        assert (span.kind, span.version, span.iteration) == ("stage_weights", 1, 0)
        assert engine.version == 0 and engine.running, "staging disturbs nothing"
    await role.pause(mode)
    assert bool(engine.running) is (mode == "keep")
    spans = await (role.swap(1) if staged else role.load(1))
    await role.resume(below=ROWS // GROUP)
    await running
    assert (spans[-1].kind, spans[-1].version, spans[-1].iteration) == ("load_weights", 1, 0)
    versions = list(queue.versions.values())
    assert len(versions) == ROWS
    assert all(row == sorted(row) and set(row) <= {0, 1} for row in versions)
    assert any(set(row) == {0, 1} for row in versions) is (mode in ("keep", "carry"))


async def test_groups_that_arrive_during_a_pause_start_under_the_new_weights() -> None:
    engine = torch_engine(slots=ROWS)
    queue, role, running = await streaming(engine)
    await role.pause("keep")
    await settle()
    assert (engine.running, engine.waiting) == (0, ROWS)
    await role.load(1)
    await role.resume(below=ROWS // GROUP)
    spans = await running
    assert all(set(versions) == {1} for versions in queue.versions.values())
    assert [span.version for span in spans] == [1], "an engine that stands still is not busy, whatever waits in it"


async def test_groups_that_are_not_done_are_put_off_whole_and_begin_again_under_the_new_weights() -> None:
    engine = torch_engine()
    queue, role, running = await streaming(engine, puts_off=True)
    while not queue.versions:
        await settle(1)
    await settle(6)  # the next ones have begun
    await role.set_dispatch_limit(0)
    await role.put_off()
    done = {row // GROUP for row in queue.versions}
    assert 0 < len(done) < ROWS // GROUP and len(queue.versions) == len(done) * GROUP, "samples leave with their group"
    await role.load(1)
    await role.resume(below=100, above=ROWS // GROUP)
    await settle()
    assert engine.running + engine.waiting == 0, "they are below what it may start"
    await role.set_dispatch_limit(100)
    await running
    assert all(set(versions) == {int(row // GROUP not in done)} for row, versions in queue.versions.items())
    generated, again = await role.tokens()
    assert again > 0 and generated == again + sum(len(versions) for versions in queue.versions.values())


async def test_spans_taken_in_the_middle_of_work_reach_up_to_now_and_go_on_from_there() -> None:
    _, engine, role, running = await generating()
    (first,) = await role.take_spans()
    assert first.end > first.start
    engine.finish(list(engine.held))
    (second,) = await running
    assert second.start == first.end and second.end > second.start
    assert await role.take_spans() == []


async def test_each_loop_says_what_it_waits_for() -> None:
    queue, engine, role, running = await generating(slots=GROUP, index=2)
    assert sorted(await role.waiting()) == [
        "rollout[2].drain waits for the engine to finish samples",
        "rollout[2].feed waits for a free slot",
        "rollout[2].write waits for finished samples",
    ]
    await finish_all(engine, running)
    assert await role.waiting() == []
    streaming = asyncio.create_task(role.stream())
    await settle()
    assert "rollout[2].feed waits for groups of any batch" in await role.waiting()
    await queue.close()
    await streaming


async def test_an_engine_that_fails_ends_the_role_with_its_error() -> None:
    queue, engine = CountingQueue(), HandEngine()
    await queue.admit(0)

    async def broken() -> list[object]:
        raise FloatingPointError("log-probabilities are not finite")

    engine.finished = broken
    with pytest.RaisesGroup(pytest.RaisesExc(FloatingPointError, match="not finite")):
        await rollout_role(engine, queue).generate(0)


def test_an_engine_too_small_for_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="engine.slots=3 is less than a group of 4"):
        rollout_role(HandEngine(slots=3), None)


@pytest.mark.parametrize("paused", [False, True])
async def test_who_retires_takes_no_more_finishes_what_it_has_and_takes_again_once_enlisted(paused: bool) -> None:
    queue, engine = CountingQueue(), HandEngine(slots=2 * GROUP)
    await queue.admit(0)
    role = rollout_role(engine, queue)
    await role.use(FixedWeights())
    running = asyncio.create_task(role.stream())
    await settle()
    if paused:
        await role.pause("keep")
    retiring = asyncio.create_task(role.retire())
    await settle()
    assert not engine.paused, "what it has is to be finished, paused or not"
    engine.finish(engine.held[:GROUP])
    await settle()
    assert engine.running == GROUP and not retiring.done() and not running.done()
    engine.finish(list(engine.held))
    await asyncio.gather(retiring, running)
    await role.generate(0)
    assert sum(map(len, queue.responses)) == 2 * GROUP, "retired, it takes nothing"
    await role.rejoin()
    await role.load(1)
    again = asyncio.create_task(role.generate(0))
    await finish_all(engine, again)
    assert queue.written() == list(range(ROWS))


async def test_what_another_had_when_it_was_gone_is_generated_without_what_it_had_written() -> None:
    queue, engines = CountingQueue(), [HandEngine(slots=2 * GROUP), HandEngine(slots=ROWS)]
    await queue.admit(0)
    roles = [rollout_role(engine, queue, index=index) for index, engine in enumerate(engines)]
    dead = asyncio.create_task(roles[0].generate(0))
    await settle()
    alive = asyncio.create_task(roles[1].generate(0))
    await settle()
    engines[0].finish([0, 1, GROUP])
    await settle()
    engines[1].finish(list(engines[1].held))
    await alive
    dead.cancel()
    await queue.release("rollout[0]")
    again = asyncio.create_task(roles[1].generate(0))
    await settle()
    assert engines[1].held == [row for row in range(2 * GROUP) if row not in (0, 1, GROUP)]
    engines[1].finish(list(engines[1].held))
    await again
    assert queue.written() == list(range(ROWS))


async def test_a_load_waits_for_a_batch_that_is_taken_over() -> None:
    queue, engine = CountingQueue(), HandEngine()
    await queue.admit(0)
    role = rollout_role(engine, queue)
    await role.use(FixedWeights())
    running = asyncio.create_task(role.generate(0))
    await settle()
    loading = asyncio.create_task(role.load(1))
    await settle()
    assert engine.version == 0
    engine.finish(list(engine.held))
    await asyncio.gather(running, loading)
    assert engine.version == 1


# -- its device


async def test_an_engine_that_streams_holds_its_device_from_its_first_sample_until_it_is_idle_or_paused() -> None:
    queue, engine, device = CountingQueue(), HandEngine(), DeviceTurns()
    role = rollout_role(engine, queue, turns=device)
    running = asyncio.create_task(role.stream())
    await settle()
    assert device.holder is None, "it has nothing to do"
    rows = await queue.admit(0)
    await settle()
    assert device.holder == "rollout[0].generate" and engine.running == ROWS
    await role.pause("keep")
    assert device.holder is None and engine.running == ROWS
    await role.use(FixedWeights())
    await role.load(1)
    assert device.holder is None
    await role.resume(below=100)
    assert device.holder == "rollout[0].generate"
    engine.finish(rows[:GROUP])
    await settle()
    assert device.holder == "rollout[0].generate"
    engine.finish(rows[GROUP:])
    await settle()
    assert device.holder is None
    await queue.close()
    await running


@pytest.mark.parametrize("then", ["goes on", "is paused", "retires"])
async def test_samples_that_wait_for_a_device_with_their_engine_are_generated_whatever_it_is_asked(then: str) -> None:
    queue, engine, device = CountingQueue(), HandEngine(), DeviceTurns("device 2")
    role = rollout_role(engine, queue, turns=device)
    rows = await queue.admit(0)
    async with device.turn("reference[0].work"):
        running = asyncio.create_task(role.stream())
        await settle()
        assert engine.running == 0
        assert "rollout[0].generate waits for device 2, which reference[0].work holds" in await role.waiting()
        asked = asyncio.create_task(role.pause("wait") if then == "is paused" else asyncio.sleep(0))
        if then == "retires":
            asked = asyncio.create_task(role.retire())
        await settle()
    await settle()
    assert engine.running == ROWS
    assert device.holder == (None if then == "is paused" else "rollout[0].generate")
    if then == "is paused":
        await asked
        await role.resume(below=100)
        assert device.holder == "rollout[0].generate"
    engine.finish(rows)
    await settle()
    await asked
    assert device.holder is None and queue.written() == rows
    await queue.close()
    await running


async def test_an_engine_that_wakes_for_a_batch_holds_its_device_until_it_sleeps() -> None:
    queue, engine, device = CountingQueue(), HandEngine(), DeviceTurns()
    role = rollout_role(engine, queue, shares_device=True, turns=device)
    engine.awake = False
    async with device.turn("actor[0].train"):
        running = asyncio.create_task(role.generate(0))
        await settle()
        assert not engine.awake
    await settle()
    assert engine.awake and device.holder == "rollout[0].generate", "idle, and nobody else may come in between"
    rows = await queue.admit(0)
    await settle()
    engine.finish(rows)
    await running
    assert not engine.awake and device.holder is None
    running = asyncio.create_task(role.generate(1))
    await settle()
    running.cancel()
    await asyncio.wait([running])
    assert device.holder is None, "a batch that is broken off leaves the device to others"


PAIR = 2
PROMPT = np.array([7, 8])


def out(sample: int, reason: str) -> Completion:
    tokens = np.array([1])
    return Completion(sample, tokens, np.zeros(1, np.float32), np.zeros(1, np.int32), reason, 0.0, 1.0)  # type: ignore[arg-type]


def having(samples: EngineSamples, *ids: int) -> EngineSamples:
    samples.submitted([samples.request(sample, PROMPT) for sample in ids])
    return samples


def test_what_a_pause_took_back_begins_again_from_its_prompt_in_the_order_in_which_it_came() -> None:
    samples = having(EngineSamples(PAIR, greedy=Sampling(5)), 0, 1, 2, 3)
    samples.taking_back = True
    assert [done.sample_id for done in samples.finished([out(3, "abort"), out(1, "stop")])] == [1]
    assert not samples.all_taken_back(busy=0) and samples.all_taken_back(busy=2)
    samples.finished([out(2, "abort"), out(0, "abort")])
    assert samples.all_taken_back(busy=0)
    again = samples.given_up()
    assert [(request.sample_id, request.partial) for request in again] == [(0, None), (2, None), (3, None)]
    assert [request.sampling is not None for request in again] == [True, True, False], "the first of each group"
    assert 1 not in samples and 0 not in samples, "until it is submitted again"


def test_what_a_pause_took_back_to_carry_it_goes_on_from_the_tokens_that_it_has() -> None:
    samples = having(EngineSamples(PAIR), 0, 1)
    samples.taking_back = True
    none = replace(out(1, "abort"), tokens=np.array([], int))
    samples.finished([none, out(0, "abort")])
    first, second = samples.carried()
    assert first.partial is not None and (first.sample_id, first.partial.length) == (0, 1)
    assert (second.sample_id, second.partial) == (1, None), "it had none"
    samples.taking_back = False
    samples.submitted([first, second])
    samples.finished([replace(out(0, "stop"), tokens=np.array([1, 5])), out(1, "stop")])
    assert (samples.generated, samples.begun_again) == (3, 0), "no token twice"


def test_an_abort_is_what_a_sample_said_where_no_pause_takes_back() -> None:
    samples = having(EngineSamples(PAIR), 0)
    (done,) = samples.finished([out(0, "abort")])
    assert done.finish_reason == "abort" and 0 not in samples


def test_a_sample_between_two_turns_begins_again_with_its_next_one_and_only_once() -> None:
    samples = having(EngineSamples(PAIR, several_turns=True), 0, 1)
    samples.finished([out(0, "stop")])  # it is at its tools
    assert samples.counted(busy=1) == 2, "which counts, too"
    samples.taking_back = True
    samples.finished([out(1, "abort")])
    assert [request.sample_id for request in samples.given_up()] == [1]
    assert samples.begins_again(0) and not samples.begins_again(1)
    samples.submitted([Request(0, PROMPT)])
    assert not samples.begins_again(0)
    samples.finished([out(0, "stop")])
    samples.ended(0)
    assert samples.playing == {1} and samples.counted(busy=0) == 1
