"""What only the embedded engine promises, to the bit; what every engine does is held in tests/contract."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.torch.kv_slots import SlotModel
from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from harness.config import ModelConfig
from harness.protocols import Completion, Request, Sampling
from tests.contract.reference import weights_of
from tests.support.role_setting import TickingClock
from tests.support.sample_records import trained_record

TINY = ModelConfig("tiny", 64, 2, 4, 2, 16, 256, 32, True, 128)
UNTIED = replace(TINY, name="untied", tied_embeddings=False, vocabulary=50, heads=8, ff=96, layers=3)
SAMPLING = Sampling(max_tokens=20)


def make_engine(
    sampling: Sampling = SAMPLING, slots: int = 4, seed: int = 0, config: ModelConfig = TINY
) -> TorchRollout:
    engine = TorchRollout(build_model(config), sampling=sampling, slots=slots, seed=seed, clock=TickingClock())
    return engine


def requests(count: int, config: ModelConfig = TINY, longest: int = 40) -> list[Request]:
    rng = np.random.default_rng(5)
    return [Request(i, rng.integers(1, config.vocabulary, rng.integers(1, longest + 1))) for i in range(count)]


async def drain(engine: TorchRollout) -> dict[int, Completion]:
    done = []
    while engine.running or engine.waiting:
        done += await engine.finished()
    return {completion.sample_id: completion for completion in done}


def assert_bitwise_equal(ours: Completion, theirs: Completion) -> None:
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.log_probs.tobytes() == theirs.log_probs.tobytes()
    assert ours.finish_reason == theirs.finish_reason


# --- what a sample is does not depend on its company ---------------------------------------------------------------


async def assert_company_changes_nothing(config: ModelConfig, sampling: Sampling, slots: int, count: int) -> None:
    """Each sample alone in an engine, against all in one engine in random order at random times."""
    todo = requests(count, config)
    alone = make_engine(sampling, slots, config=config)
    expected: dict[int, Completion] = {}
    for request in todo:
        alone.submit([request])
        expected |= await drain(alone)

    rng = random.Random(slots)
    rng.shuffle(todo)
    engine = make_engine(sampling, slots, config=config)
    done: dict[int, Completion] = {}
    while len(done) < len(expected):
        for _ in range(rng.choice([0, 0, 1, 3, 20])):
            if todo:
                engine.submit([todo.pop()])
        if engine.running or engine.waiting:
            done |= {completion.sample_id: completion for completion in await engine.finished()}
    for sample_id, completion in expected.items():
        assert_bitwise_equal(done[sample_id], completion)


@pytest.mark.parametrize("slots", [5, 40])
async def test_a_sample_is_bitwise_the_same_alone_and_among_random_others(slots: int) -> None:
    await assert_company_changes_nothing(TINY, Sampling(max_tokens=60, stop_tokens=(0,)), slots, 45)


@pytest.mark.slow
async def test_company_changes_nothing_in_another_model_with_top_p() -> None:
    await assert_company_changes_nothing(UNTIED, Sampling(max_tokens=40, stop_tokens=(0,), top_p=0.9), 40, 45)


@pytest.mark.slow
async def test_company_changes_nothing_with_two_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        await assert_company_changes_nothing(TINY, Sampling(max_tokens=5), 40, 41)
    finally:
        torch.set_num_threads(before)


async def test_a_long_context_beside_it_does_not_change_a_sample() -> None:
    config = replace(TINY, max_length=640)
    long = Request(0, np.arange(1, 301) % 31 + 1)
    middle = Request(1, np.arange(1, 385) % 29 + 1)
    expected: dict[int, Completion] = {}
    for request in (long, middle):
        engine = make_engine(Sampling(max_tokens=150), config=config)
        engine.submit([request])
        expected |= await drain(engine)
    engine = make_engine(Sampling(max_tokens=150), config=config)
    engine.submit([long, middle])
    for sample_id, completion in (await drain(engine)).items():
        assert_bitwise_equal(completion, expected[sample_id])


async def test_different_seeds_draw_different_tokens() -> None:
    drawn = []
    for seed in (0, 1):
        engine = make_engine(seed=seed)
        engine.submit(requests(1))
        drawn.append((await drain(engine))[0].tokens.tolist())
    assert drawn[0] != drawn[1]


# --- pausing -------------------------------------------------------------------------------------------------------


async def test_pause_wait_finishes_what_runs_also_where_nobody_waits_for_it() -> None:
    engine = make_engine()
    engine.submit(requests(6))
    engine.step()
    await engine.pause("wait")
    assert (engine.running, engine.waiting) == (0, 2)
    assert sorted(completion.sample_id for completion in await engine.finished()) == [0, 1, 2, 3]


async def played(engine: TorchRollout, count: int, config: ModelConfig, *, keep: bool) -> dict[int, Completion]:
    """Samples of up to five turns, each of which is answered by one to five tokens, some at once, some later."""
    sent = {request.sample_id: request for request in requests(count, config)}
    engine.submit(list(sent.values()))
    done: dict[int, Completion] = {}
    turns = dict.fromkeys(sent, 1)
    away: list[Request] = []
    while len(done) < count:
        if engine.running or engine.waiting:
            for turn in await engine.finished():
                answer = np.arange(1, 2 + (turn.sample_id + turns[turn.sample_id]) % 5)
                if turn.finish_reason != "stop" or turns[turn.sample_id] == 5 or len(turn.tokens) > 70:
                    done[turn.sample_id] = turn
                    continue
                turns[turn.sample_id] += 1
                longer = replace(
                    turn,
                    tokens=np.concatenate([turn.tokens, answer]),
                    log_probs=np.concatenate([turn.log_probs, np.zeros(len(answer), np.float32)]),
                    versions=np.concatenate([turn.versions, np.zeros(len(answer), np.int32)]),
                )
                away.append(replace(sent[turn.sample_id], partial=longer))
        if not keep:
            engine.drop_cache()
        if len(away) > 6 or not (engine.running or engine.waiting):
            engine.submit(away[::-1])
            away = []
    assert max(turns.values()) > 2
    return done


@pytest.mark.parametrize(
    "config", [TINY, UNTIED, replace(TINY, sliding_window=8, sliding_layers=2, architecture="qwen2", qk_norm=False)]
)
@pytest.mark.parametrize("slots", [3, 20])
async def test_what_a_turn_left_in_its_slot_gives_the_bits_of_computing_it_again(
    config: ModelConfig, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 14 samples: all that come back where there is room, and those that nobody has taken the slot of."""
    sampling = Sampling(max_tokens=80, stop_tokens=(0, 1, 2, 3))
    extended: list[int] = []
    extend = SlotModel.extend
    monkeypatch.setattr(SlotModel, "extend", lambda self, what: (extended.append(len(what)), extend(self, what))[1])
    computed_again = await played(make_engine(sampling, slots, config=config), 14, config, keep=False)
    assert sum(extended) == 0
    kept = await played(make_engine(sampling, slots, config=config), 14, config, keep=True)
    assert sum(extended) > (10 if slots > 14 else -1)
    for sample_id, completion in computed_again.items():
        assert_bitwise_equal(kept[sample_id], completion)


async def test_nothing_of_a_turn_under_old_weights_is_left_after_an_update() -> None:
    sampling = Sampling(max_tokens=60, stop_tokens=tuple(range(16)))
    engine, fresh = make_engine(sampling), make_engine(sampling)
    request = requests(1)[0]
    first = None
    for _ in range(2):  # from the second time on it is known that there are turns
        engine.submit([request])
        first = (await drain(engine))[0]
        engine.submit([replace(request, partial=first)])
        await drain(engine)
    engine.submit([request])
    await drain(engine)
    weights = {name: 0.9 * tensor for name, tensor in build_model(TINY).state_dict().items()}
    for each in (engine, fresh):
        await each.load_weights(1, weights.items())
        each.submit([replace(request, partial=first)])
    assert_bitwise_equal((await drain(engine))[0], (await drain(fresh))[0])


# --- weights -------------------------------------------------------------------------------------------------------


async def test_before_the_first_tensor_a_load_that_fails_changes_nothing() -> None:
    def gone() -> Iterator[tuple[str, torch.Tensor]]:
        raise ConnectionError("the trainer is gone")
        yield

    engine = make_engine()
    with pytest.raises(ConnectionError):
        await engine.load_weights(1, gone())
    engine.submit(requests(1))
    assert set((await drain(engine))[0].versions) == {0}


async def test_new_weights_take_the_place_of_the_old_in_the_same_memory() -> None:
    engine, source = make_engine(), build_model(TINY, seed=1)
    places = {name: parameter.data_ptr() for name, parameter in engine._model.named_parameters()}
    await engine.load_weights(1, weights_of(source))
    assert places == {name: parameter.data_ptr() for name, parameter in engine._model.named_parameters()}
    for name, parameter in source.named_parameters():
        assert torch.equal(engine._model.get_parameter(name), parameter), name


async def test_one_error_names_all_that_does_not_fit_and_the_iterable_is_read_to_its_end() -> None:
    weights = dict(weights_of(build_model(TINY)))
    del weights["model.norm.weight"]
    weights = {"strange.weight": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(2, 3)} | {
        name: tensor for name, tensor in weights.items() if name != "model.embed_tokens.weight"
    }
    left = iter(weights.items())
    engine = make_engine()
    with pytest.raises(ValueError) as caught:
        await engine.load_weights(1, left)
    for part in (
        "strange.weight is unknown",
        "model.embed_tokens.weight has shape (2, 3), not (32, 64)",
        "model.norm.weight is missing",
    ):
        assert part in str(caught.value)
    assert next(left, None) is None
    assert engine.version == 0


@pytest.mark.parametrize("with_head", [True, False])
async def test_a_tied_head_may_be_given_or_absent(with_head: bool) -> None:
    source = build_model(TINY, seed=1)
    weights = dict(source.named_parameters(remove_duplicate=not with_head))
    assert ("lm_head.weight" in weights) == with_head
    engine = make_engine()
    await engine.load_weights(1, weights.items())
    assert engine.version == 1


async def test_an_untied_head_may_not_be_absent() -> None:
    engine = make_engine(config=UNTIED)
    weights = dict(weights_of(build_model(UNTIED)))
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match="lm_head.weight is missing"):
        await engine.load_weights(1, weights.items())


async def test_weights_that_are_not_finite_stop_generation() -> None:
    engine = make_engine()
    await engine.load_weights(1, ((name, tensor * torch.nan) for name, tensor in weights_of(build_model(TINY))))
    engine.submit(requests(1))
    with pytest.raises(FloatingPointError, match="version 1"):
        await engine.finished()


async def test_caches_that_are_kept_are_as_old_as_the_versions_of_their_samples_say() -> None:
    """What a run reports (harness/metrics/samples.py) against the weights that filled each place of the cache."""
    engine = make_engine(Sampling(max_tokens=12, stop_tokens=()), slots=3)
    made: dict[tuple[int, int], int] = {}  # of slots and places in them
    ages: dict[int, list[float]] = {}
    prefill, decode, move = engine._cache.prefill, engine._cache.decode, engine._cache.move

    def prefilled(contexts: Sequence[tuple[int, Sequence[int]]]) -> None:
        made.update({(row, at): engine.version for row, context in contexts for at in range(len(context))})
        prefill(contexts)

    def decoded(tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        for row, (sample, at) in enumerate(zip(engine._running, positions, strict=True)):
            made[row, at] = engine.version
            behind = [made[row, place] for place in range(at + 1)]
            ages.setdefault(sample.sample_id, []).append(engine.version - float(np.mean(behind)))
        return decode(tokens, positions)

    def moved(source: int, target: int) -> None:
        made.update({(target, at): version for (row, at), version in made.items() if row == source})
        move(source, target)

    engine._cache.prefill, engine._cache.decode, engine._cache.move = prefilled, decoded, moved  # type: ignore[method-assign]
    todo = requests(6, longest=5)
    engine.submit(todo)
    for version in range(1, 8):
        for _ in range(3):
            engine.step()
        await engine.pause("keep")
        await engine.load_weights(version, weights_of(build_model(TINY)))
        await engine.resume()
    done = await drain(engine)
    assert max(np.mean(of_one) for of_one in ages.values()) > 0.5
    for request in todo:
        versions, prompt = done[request.sample_id].versions.tolist(), len(request.prompt)
        told = trained_record(versions, max(versions), prompt_tokens=prompt, keeps_cache=True).cache_age
        assert told == pytest.approx(np.mean(ages[request.sample_id]))
