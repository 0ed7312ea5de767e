from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import Store

from engines.torch.fsdp import FSDPEngine
from engines.torch.model import build_model
from engines.torch.scoring import TorchLogProb
from harness.config import Layout, TrainingConfig
from harness.config.registries import AGGREGATIONS
from harness.cost_model.shape import parameters
from harness.protocols import TrainBatch
from harness.transfer_queue import Ragged
from harness.weight_sync.plan import plan_transfer
from tests.support.fsdp_samples import (
    CPU,
    FREE,
    SAMPLES,
    SMALL,
    World,
    assert_close,
    batch_of,
    computed,
    free,
    gradients,
    plain_backward,
    plain_gradients,
    received,
    same_bits,
    save,
    scores,
    token_count,
    train,
    weights,
)
from tests.support.losses import CUTTABLE
from tests.support.processes import run_ranks

ALL = range(SAMPLES)
BFLOAT16 = replace(SMALL, dtype="bfloat16")


@pytest.mark.parametrize("correction", CUTTABLE)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_gradients_are_those_of_the_mean_of_samples_taken_alone(world: World, correction: str, layout: str) -> None:
    algorithm = free(correction, temperature=0.7)
    engine = world.engine(algorithm, TrainingConfig(layout=layout))
    norm = train(engine, [ALL[:8], ALL[8:]])
    expected = plain_gradients(ALL, algorithm)
    assert_close(gradients(engine), expected, rtol=1e-5)
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(expected.values())), rel=1e-5)


@pytest.mark.parametrize("correction", ["none", "clip", "decoupled", "tis", "mis", "gspo"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_tokens_of_an_environment_are_read_but_teach_nothing(world: World, correction: str, layout: str) -> None:
    algorithm = free(correction)
    batch = batch_of(ALL)
    mask = np.random.default_rng(0).random(len(batch.responses.values)) < 0.6
    mask[np.cumsum(batch.responses.lengths) - batch.responses.lengths] = True  # a response begins with the policy
    behaviour = Ragged(np.where(mask, batch.behaviour_log_probs.values, np.float32(0)), batch.responses.lengths)
    masked = replace(batch, behaviour_log_probs=behaviour, mask=Ragged(mask, batch.responses.lengths))
    engine = world.engine(algorithm, TrainingConfig(layout=layout))
    told = computed(engine.accumulate(masked))
    computed(engine.step())
    assert_close(gradients(engine), plain_gradients(ALL, algorithm, mask=mask), rtol=1e-5)
    assert told["tokens"] == mask.sum() < len(mask)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_what_is_masked_counts_in_no_mean_and_a_response_masked_whole_as_not_there(world: World, kind: str) -> None:
    """As old tokens of responses that live through updates: their beginnings, or all of them."""
    algorithm, batch = replace(FREE, aggregation=kind, entropy_coef=0.3), batch_of(ALL)
    masks = [np.arange(n) >= old * n // 3 for old, n in enumerate(batch.responses.lengths.tolist(), start=-1)]
    assert any(not mask.any() for mask in masks) and any(mask.all() for mask in masks)
    masked = Ragged.from_rows(masks)
    engine = world.engine(algorithm)
    parts = (ALL[:3], ALL[3:8], ALL[8:])
    train(engine, [replace(batch_of(part), mask=masked.take(part)) for part in parts])
    assert_close(gradients(engine), plain_gradients(ALL, algorithm, mask=masked.values), rtol=1e-5)


@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_an_aggregation_does_not_depend_on_how_a_batch_is_cut(world: World, kind: str, entropy_coef: float) -> None:
    algorithm = replace(FREE, aggregation=kind, entropy_coef=entropy_coef)
    expected = plain_gradients(ALL, algorithm)
    for parts in ([ALL], [ALL[:3], ALL[3:8], ALL[8:]]):
        engine = world.engine(algorithm)
        train(engine, parts)
        assert_close(gradients(engine), expected, rtol=1e-5)


@pytest.mark.parametrize("measure", ["token_ratio", "geometric_ratio"])
@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean_token_mean"])
def test_what_is_rejected_is_as_if_it_had_never_been_sampled(world: World, kind: str, measure: str) -> None:
    """However the batch is cut; and with everything that else is part of the loss."""
    settings = replace(FREE, aggregation=kind, entropy_coef=0.2)
    algorithm = replace(settings, rejection={measure: (0.85, 1.2)})
    found = []
    for parts in ([ALL], [ALL[:3], ALL[3:8], ALL[8:]]):
        engine = world.engine(algorithm)
        sums = [computed(engine.accumulate(batch_of(part))) for part in parts]
        computed(engine.step())
        found.append((sum(one["rejected"] for one in sums), gradients(engine)))
    (rejected, whole), (again, cut) = found
    assert 0 < rejected == again < token_count(ALL)
    assert_close(cut, whole, rtol=1e-5)
    batch = batch_of(ALL)
    scored = computed(world.engine(algorithm).scorer().log_probs(batch.prompts, batch.responses))
    ratios = [np.exp(a - b) for a, b in zip(scored.rows(), batch.behaviour_log_probs.rows(), strict=True)]
    if measure == "geometric_ratio":
        ratios = [np.full_like(one, np.exp(np.log(one).mean())) for one in ratios]
    kept = Ragged.from_rows([(one >= 0.85) & (one <= 1.2) for one in ratios])
    engine = world.engine(settings)
    train(engine, [replace(batch, mask=kept)])
    assert_close(whole, gradients(engine), rtol=1e-5)


def test_a_kl_that_is_in_the_reward_is_not_in_the_loss(world: World) -> None:
    ways = ({"kl_in": "reward"}, {"kl_coef": 0.0}, {}, {"kl_unbiased": True})
    norms = [train(world.engine(replace(FREE, **settings)), [ALL]) for settings in ways]
    assert norms[0] == norms[1] and len(set(norms)) == 3


def test_a_mask_that_is_true_throughout_changes_no_bit(world: World) -> None:
    batch = batch_of(ALL)
    every = Ragged(np.ones(len(batch.responses.values), np.bool_), batch.responses.lengths)
    told = []
    for given in (batch, replace(batch, mask=every)):
        engine = world.engine(FREE)
        told.append((computed(engine.accumulate(given)), computed(engine.step()), weights(engine)))
    (sums, norm, after), (masked_sums, masked_norm, masked_after) = told
    assert (sums, norm) == (masked_sums, masked_norm)
    assert same_bits(after, masked_after)


def test_a_proximal_policy_by_lag_is_between_the_one_that_sampled_and_the_one_in_training(world: World) -> None:
    """As with these log-probs given; at lag 0 it is the one that sampled, so that what is left is PPO's clip."""
    algorithm = free("decoupled", proximal="log_linear", recompute_log_probs=False)
    batch = replace(batch_of(ALL), old_log_probs=None)
    lags = np.arange(len(batch.responses.values), dtype=np.int32) % 4
    log_probs = scores(world.engine(algorithm).scorer(), ALL)
    share = (lags / (lags + 1)).astype(np.float32)
    between = (1 - share) * batch.behaviour_log_probs.values + share * log_probs
    given = Ragged(between, batch.responses.lengths)
    pairs = [
        (replace(batch, lags=Ragged(lags, batch.responses.lengths)), algorithm),
        (replace(batch, old_log_probs=given), free("decoupled")),
        (batch, algorithm),
        (batch, replace(FREE, correction="clip")),
    ]
    found = []
    for part, settings in pairs:
        engine = world.engine(settings)
        train(engine, [part])
        found.append(gradients(engine))
    by_lag, by_hand, at_lag_0, clipped = found
    assert_close(by_lag, by_hand, rtol=1e-5)
    assert_close(at_lag_0, clipped, rtol=1e-6)


def test_with_the_trainer_as_the_proximal_policy_recomputed_log_probs_do_not_matter(world: World) -> None:
    algorithm = free("decoupled", proximal="trainer", recompute_log_probs=False)
    batch = batch_of(ALL)
    without = replace(batch, old_log_probs=None)
    masked = replace(FREE, correction="mis", options={"low": 0.0, "high": 1.2})
    pairs = ((algorithm, batch), (algorithm, without), (masked, without))
    norms = [train(world.engine(settings), [given]) for settings, given in pairs]
    assert norms[0] == norms[1] == pytest.approx(norms[2], rel=1e-6)


def test_a_step_is_that_of_plain_adamw_after_clipping(world: World) -> None:
    algorithm = replace(FREE, betas=(0.9, 0.95), grad_clip=0.05, weight_decay=0.1)
    engine = world.engine(algorithm)
    norm = train(engine, [ALL[:8], ALL[8:]])
    model = plain_backward(ALL, algorithm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)) > 0.05, "nothing was clipped"
    optimizer.step()
    assert norm > 0.05
    before = dict(build_model(SMALL).named_parameters())
    for name, parameter in model.named_parameters():
        moved, expected = weights(engine)[name] - before[name], parameter - before[name]
        torch.testing.assert_close(moved, expected.detach(), rtol=0, atol=1e-3 * 1e-3)  # 0.1 % of the learning rate


def test_nothing_of_one_step_is_left_for_the_next(world: World) -> None:
    still = replace(FREE, learning_rate=0.0)
    twice, once = world.engine(still), world.engine(still)
    train(twice, [ALL[8:]])
    assert train(twice, [ALL[:8]]) == train(once, [ALL[:8]])


def test_the_kl_term_needs_a_coefficient_and_a_reference(world: World) -> None:
    without = train(world.engine(replace(FREE, kl_coef=0.0)), [ALL])
    assert train(world.engine(FREE), [ALL]) != without
    assert train(world.engine(FREE), [replace(batch_of(ALL), ref_log_probs=None)]) == without


def test_only_tokens_of_the_recomputed_version_are_compared_with_the_engine(world: World) -> None:
    batch = batch_of(ALL)
    old_versions = np.where(np.arange(SAMPLES) < 5, 0, 1).astype(np.int32)  # tokens are of version 0
    scored = replace(batch, old_log_probs=batch.behaviour_log_probs, old_versions=old_versions)
    told = computed(world.engine(FREE).accumulate(scored))
    assert told["mismatch_tokens"] == batch.responses.lengths[:5].sum()
    assert told["mismatch"] == 0


def test_a_bfloat16_model_keeps_float32_weights_that_small_steps_can_move(world: World) -> None:
    engine = world.engine(replace(FREE, learning_rate=1e-6), model=BFLOAT16)
    before = weights(engine)
    train(engine, [ALL])
    after = weights(engine)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_bfloat16_model_is_sent_in_bfloat16_in_half_the_bytes(world: World) -> None:
    engine = world.engine(FREE, model=BFLOAT16)
    train(engine, [ALL])
    plan, wide = (plan_transfer(weights.items(), 1 << 12) for weights in (engine.named_parameters(), engine.masters))
    assert sum(spec.bytes for bucket in plan.buckets for spec in bucket.tensors) == 2 * parameters(BFLOAT16)
    assert sum(spec.bytes for bucket in wide.buckets for spec in bucket.tensors) == 4 * parameters(BFLOAT16)
    arrived = received(engine.named_parameters(), 0, 1)
    assert {tensor.dtype for tensor in arrived.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, weights(engine)[name].bfloat16()) for name, tensor in arrived.items())


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_recomputing_activations_changes_no_bit(world: World, layout: Layout) -> None:
    recomputing = world.engine(FREE, TrainingConfig(layout=layout, recompute_activations=True))
    keeping = world.engine(FREE, TrainingConfig(layout=layout))
    assert train(recomputing, [ALL[:8], ALL[8:]]) == train(keeping, [ALL[:8], ALL[8:]])
    assert same_bits(weights(recomputing), weights(keeping))


def test_recomputing_activations_runs_each_layer_twice(world: World) -> None:
    calls: dict[bool, int] = {True: 0, False: 0}
    for recompute in calls:
        engine = world.engine(FREE, TrainingConfig(recompute_activations=recompute))

        def count(*_: object, recompute: bool = recompute) -> None:
            calls[recompute] += 1

        engine._scorer.model.model.layers[0].mlp.register_forward_pre_hook(count)
        train(engine, [ALL])
    assert calls == {True: 2, False: 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # TorchDynamo looks at every attribute, old ones too
@pytest.mark.parametrize(
    ("dtype", "layout", "rtol"), [("float32", "padded", 1e-5), ("float32", "packed", 1e-5), ("bfloat16", "packed", 0.1)]
)
def test_compiled_blocks_have_the_gradients_of_others(world: World, dtype: str, layout: str, rtol: float) -> None:
    """Within the tolerance that other orders of sums have in this file; in bfloat16 within 8 roundings of 2^-8 in a
    row, in each of 2 layers forward and back, that add up as a random walk: 2^-8 sqrt(32) = .02, of a tensor's norm,
    and so .1 of its largest element."""
    model, found = replace(SMALL, dtype=dtype), []
    for compiled in (True, False):
        engine = world.engine(FREE, TrainingConfig(layout=layout, compile=compiled), model=model)  # type: ignore[arg-type]
        train(engine, [ALL[:3], ALL[3:8], ALL[8:]])  # no size twice
        found.append((gradients(engine), scores(engine.scorer(), ALL)))
    (ours, our_scores), (theirs, their_scores) = found
    assert_close(ours, theirs, rtol)
    np.testing.assert_allclose(our_scores, their_scores, rtol=rtol)
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs), "nothing was compiled"


def test_packed_and_padded_micro_batches_say_the_same_of_themselves(world: World) -> None:
    batch = batch_of(ALL)
    batch = replace(batch, old_log_probs=batch.ref_log_probs, old_versions=np.zeros(SAMPLES, np.int32))
    packed, padded = (
        computed(world.engine(FREE, TrainingConfig(layout=layout)).accumulate(batch)) for layout in ("packed", "padded")
    )
    assert packed == pytest.approx(padded, rel=1e-5)


ADAMW = replace(FREE, betas=(0.9, 0.95), weight_decay=0.1, grad_clip=0.5)
FIRST, SECOND, THIRD = (range(start, start + 5) for start in (0, 5, 10))


def same_state(one: FSDPEngine, other: FSDPEngine) -> bool:
    return same_bits(weights(one), weights(other)) and same_bits(gradients(one), gradients(other))


def test_a_state_before_the_first_step_can_be_saved(world: World, tmp_path: Path) -> None:
    engine, resumed = world.engine(ADAMW), world.engine(ADAMW)
    save(engine, tmp_path / "start")
    train(resumed, [FIRST])
    computed(resumed.load(tmp_path / "start"))
    assert train(engine, [SECOND]) == train(resumed, [SECOND]) and same_state(engine, resumed)


def test_a_bfloat16_model_is_saved_in_float32(world: World, tmp_path: Path) -> None:
    model = replace(SMALL, dtype="bfloat16")
    engine, resumed = (world.engine(replace(ADAMW, learning_rate=1e-6), model=model) for _ in range(2))
    train(engine, [FIRST])
    save(engine, tmp_path / "there")
    computed(resumed.load(tmp_path / "there"))
    assert same_state(engine, resumed)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights(resumed).values())


def test_a_state_is_not_overwritten_and_one_without_files_is_not_read(world: World, tmp_path: Path) -> None:
    engine = world.engine(ADAMW)
    with pytest.raises(FileNotFoundError, match="holds 0 of the files of any ranks"):
        computed(engine.load(tmp_path))
    save(engine, tmp_path)
    with pytest.raises(FileExistsError, match="rank-00000.safetensors is there already; save into a new folder"):
        save(engine, tmp_path)


def test_another_models_state_is_refused(world: World, tmp_path: Path) -> None:
    save(world.engine(ADAMW), tmp_path / "there")
    wider = world.engine(ADAMW, model=replace(SMALL, ff=96))
    with pytest.raises(ValueError, match=r"of another model: weight\..*_proj.* has shape \[.*\] there, \[.*\] here"):
        computed(wider.load(tmp_path / "there"))


@pytest.mark.parametrize("damage", [lambda data: data[:-8], lambda data: b"\x00" * 40, lambda data: data[:100]])
def test_a_damaged_file_of_a_state_is_named(world: World, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    save(world.engine(ADAMW), tmp_path)
    file = tmp_path / "rank-00000.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match="rank-00000.safetensors holds no state of training"):
        computed(world.engine(ADAMW).load(tmp_path))


# -- micro-batches by tokens, steps that are skipped, the learning rate: alone, and in a world of two ranks

LIMIT = 40  # tokens; samples have 2 to 19
SHARES = [
    sorted(ALL, key=lambda sample: len(batch_of([sample]).responses.values))[start : start + 8] for start in (0, 8)
]
"""Of two ranks: the short samples, and the long ones."""


def counted(engine: Any) -> list[list[int]]:
    """Grows by the tokens of each sample of each forward pass."""
    passes: list[list[int]] = []
    lay_out = engine._scorer.lay_out

    def counting(prompts: Ragged, responses: Ragged, *others: Any) -> Any:
        passes.append((prompts.lengths + responses.lengths).tolist())
        return lay_out(prompts, responses, *others)

    engine._scorer.lay_out = counting
    return passes


def broken(batch: TrainBatch) -> TrainBatch:
    """Its loss is NaN."""
    return replace(batch, advantages=np.full(len(batch.advantages), np.nan, np.float32))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_parts_of_a_micro_batch_have_its_gradient_and_say_the_same_of_themselves(world: World, layout: str) -> None:
    whole = world.engine(FREE, TrainingConfig(layout=layout))
    cut = world.engine(FREE, TrainingConfig(layout=layout, tokens_per_micro_batch=LIMIT))
    passes = counted(cut)
    told = [computed(engine.accumulate(batch_of(ALL))) for engine in (whole, cut)]
    norms = [computed(engine.step())["grad_norm"] for engine in (whole, cut)]
    assert len(passes) > 3 and sum(map(len, passes)) == SAMPLES
    assert told[0] == pytest.approx(told[1], rel=1e-5) and norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_close(gradients(cut), gradients(whole), rtol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_scoring_in_parts_finds_the_same_beside_the_trainer_as_a_reference_and_alone(world: World, layout: str) -> None:
    limited = TrainingConfig(layout=layout, tokens_per_micro_batch=LIMIT)

    def scorers(training: TrainingConfig) -> list[Any]:
        alone = TorchLogProb(build_model(SMALL), temperature=1.0, device=CPU, training=training)
        return [world.engine(FREE, training).scorer(), world.reference(training=training), alone]

    for cut, whole in zip(scorers(limited), scorers(TrainingConfig(layout=layout)), strict=True):
        tokens = counted(cut)
        np.testing.assert_allclose(scores(cut, ALL), scores(whole, ALL), rtol=0, atol=2e-6)
        assert len(tokens) > 3 and sum(map(len, tokens)) == SAMPLES
        assert all((sum(of) if layout == "packed" else max(of) * len(of)) <= LIMIT for of in tokens)


def one_rank_of_two(store: Store, rank: int) -> tuple[list[int], dict[str, torch.Tensor], list[dict[str, float]]]:
    """Passes of a step in parts, and of scoring by trainer and reference; gradients of that step; then what the steps
    said of which one was broken on rank 0 only."""
    with World(store, rank, 2) as world:
        limited = TrainingConfig(tokens_per_micro_batch=LIMIT)
        engine, reference = world.engine(FREE, limited), world.reference(training=limited)
        passes = [counted(engine), counted(reference)]
        for scorer in (engine.scorer(), reference):
            alone = TorchLogProb(build_model(SMALL), temperature=1.0, device=CPU)
            np.testing.assert_allclose(scores(scorer, SHARES[rank]), scores(alone, SHARES[rank]), rtol=0, atol=2e-6)
        train(engine, [SHARES[rank]])
        found = gradients(engine)
        before, said = weights(engine), []
        for bad in (True, False):
            batch = batch_of(SHARES[rank])
            computed(engine.accumulate(broken(batch) if bad and rank == 0 else batch))
            said.append(computed(engine.step()))
            assert same_bits(before, weights(engine)) == bad, (
                "only a step that is skipped leaves the weights as they are"
            )
        return [len(each) for each in passes], found, said


def test_two_ranks_make_as_many_passes_and_skip_the_same_steps(world: World) -> None:
    ranks = run_ranks(one_rank_of_two, 2)
    whole = world.engine(FREE)
    train(whole, [ALL])
    (trainers, references), there = (passes for passes, _, _ in ranks)
    assert [trainers, references] == there
    assert references > 3 and trainers == 4 * references, "the trainer scored once, and took part in three steps"
    for _, found, said in ranks:
        assert_close(found, gradients(whole), rtol=1e-5)
        assert [step["skipped"] for step in said] == [1.0, 0.0]


def test_each_step_has_the_rate_of_its_place_in_the_run_also_after_a_checkpoint(world: World, tmp_path: Path) -> None:
    algorithm = replace(FREE, learning_rate=1.0, warmup_steps=2, decay="linear")
    engine, resumed = (
        FSDPEngine(build_model(SMALL), algorithm, mesh=world.mesh, device=CPU, steps=5) for _ in range(2)
    )

    def rate(engine: FSDPEngine) -> float:
        computed(engine.accumulate(batch_of(ALL)))
        return computed(engine.step())["learning_rate"]

    assert [rate(engine) for _ in range(3)] == [0.5, 1.0, 1.0]
    save(engine, tmp_path / "third")
    computed(resumed.load(tmp_path / "third"))
    assert [rate(resumed) for _ in range(2)] == [0.5, 0.0]
