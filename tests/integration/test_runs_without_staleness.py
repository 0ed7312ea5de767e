"""Real runs in which no sample may lag: same tokens, rewards and weights, to the bit, whatever the schedule."""

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from engines.torch.model import build_model
from harness.calibration.runs import base_job, calibrate_runs, read_run
from harness.cli import main as cli
from harness.comparison.equivalence import differences
from harness.comparison.promises import read_finished
from harness.config import ConfigError
from harness.config.compose import compose_job
from harness.driver.session import simulate
from harness.metrics.run_files import load_ledger, load_metrics, load_samples
from tests.support import invariants
from tests.support.forked_drivers import Drivers
from tests.support.random_models import random_folder
from tests.support.real_runs import FIRST_TIMEOUT_S, SMALL
from tests.support.text_folder import text_tokenizer

pytestmark = pytest.mark.timeout(FIRST_TIMEOUT_S)

RUNS = {
    "colocated": "schedule=colocate_sync cluster.devices=1",
    "separated": "schedule=separated_sync schedule.streaming=false",
    "separated_streaming": "schedule=separated_sync schedule.streaming=true cluster.delta_weights=true",
    "async_0": "schedule=fully_async schedule.max_staleness=0",
    "adaptive_0": "schedule=adaptive_staleness schedule.max_staleness=0",
    "lending_0": "schedule=lending schedule.max_staleness=0 schedule.patience_s=0.001 schedule.share=1",
    "windowed_0": "schedule=windowed schedule.max_staleness=0 algorithm.max_token_staleness=0",
    "rolling_0": "schedule=rolling_update schedule.max_staleness=0 cluster.devices=3 schedule.split.rollout=2",
    "partial_0": "schedule=partial_rollout_sync schedule.over=0 cluster.devices=1",
    "tail_0": "schedule=tail_rounds schedule.over=0 cluster.devices=1",
    "sorted_1_2_ranks": "schedule=sorted_batches schedule.batches=1 cluster.devices=2 algorithm.reference=true",
    "colocated_2_ranks": "schedule=colocate_sync cluster.devices=2 algorithm.reference=true",
    "async_0_2_ranks": (
        "schedule=fully_async schedule.max_staleness=0 schedule.split.rollout=1 cluster.devices=3 "
        "cluster.oversubscribe=true algorithm.reference=true"
    ),
}
"""On a training world of one, or of two, where sums over ranks round in another order, and where scoring and training
stream side by side over the same shards."""
ONE_RANK = ("colocated", "async_0")
"""The two that differ most: nothing side by side, and everything. What is between them is compared in `runs`."""
BOTH_WORLDS = (*ONE_RANK, "colocated_2_ranks", "async_0_2_ranks")


STEPS = "algorithm.micro_batch_groups=2 algorithm.mini_batches=4 algorithm.epochs=2"
OF_STEPS = {
    "clip": "algorithm.correction=clip",
    "decoupled": "algorithm.correction=decoupled algorithm.proximal=trainer",
    "scored": "algorithm.correction=decoupled_tis algorithm.recompute_log_probs=true",
}
"""Eight optimizer steps a batch: as rows arrive; near the policy before the first, by the trainer or by actor_fwd."""
RUNS_OF_STEPS = {
    f"{name}_{loss}": f"{RUNS[name]} {settings}"
    for loss, settings in OF_STEPS.items()
    for name in (BOTH_WORLDS[2:] if loss == "scored" else ONE_RANK)
}


@pytest.fixture(scope="module")
def runs(results: Path, drivers: Drivers) -> dict[str, Path]:
    return drivers.bench_all(results, {name: f"{SMALL} iterations=4 {settings}" for name, settings in RUNS.items()})


TEXT = ("colocated", "separated_streaming", "async_0")
"""Also with a Qwen2, byte pairs, a chat template, two tokens that end a response, rewards of processes, which cannot be
made of some samples, and advantages that would be others if groups came in other numbers."""


@pytest.fixture(scope="module")
def text_runs(results: Path, drivers: Drivers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("text")
    model = random_folder(text_tokenizer(folder / "model"), "qwen2", vocab_size=320, eos_token_id=[2, 0])
    rows = [{"prompt": f"Name {n} animals.", "answer": "cat"} for n in range(150)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = (
        f"model={model} task=data task.data={folder}/rows.jsonl task.max_prompt_tokens=64 task.max_response_tokens=12 "
        "task.reward=tests.support.rewards:letters_or_none algorithm.advantage=tests.support.advantages:touchy"
    )
    return drivers.bench_all(results / "text", {name: f"{SMALL} iterations=4 {task} {RUNS[name]}" for name in TEXT})


@pytest.mark.slow
@pytest.mark.parametrize("other", TEXT[1:])
def test_text_of_a_chat_model_changes_nothing_of_that(text_runs: dict[str, Path], other: str) -> None:
    run = text_runs[other]
    assert not differences(text_runs["colocated"], run)
    invariants.check_run(read_finished(run))
    samples = load_samples(run).to_pydict()
    assert set(samples["lag_worst"]) == {0} and len(set(samples["reward"])) > 10
    failed = [reward is None for reward in samples["reward"]]
    assert failed == samples["reward_failed"] and 0 < sum(failed) < len(failed) / 2
    assert failed == ["the reward is nan" in (why or "") for why in samples["failure"]]
    assert sum(row["reward/failed"] for row in load_metrics(run)) == sum(failed)
    assert set(samples["finish_reason"]) == {"stop", "length"}


@pytest.fixture(scope="module")
def runs_of_steps(results: Path, drivers: Drivers) -> dict[str, Path]:
    return drivers.bench_all(
        results / "steps", {name: f"{SMALL} iterations=3 {STEPS} {s}" for name, s in RUNS_OF_STEPS.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "ranks"), [("clip", ""), ("decoupled", ""), ("scored", "_2_ranks")])
def test_several_steps_a_batch_change_nothing_of_that(runs_of_steps: dict[str, Path], loss: str, ranks: str) -> None:
    one, other = (runs_of_steps[f"{name}{ranks}_{loss}"] for name in ("colocated", "async_0"))
    assert not differences(one, other)
    for run in (one, other):
        invariants.check_run(read_finished(run))


def equal_runs(drivers: Drivers, folder: Path, settings: str, names: Iterable[str]) -> list[Path]:
    """Of these of `RUNS`; all keep what is promised, and equal the first of as many ranks bit for bit."""
    runs = drivers.bench_all(folder, {name: f"{settings} {RUNS[name]}" for name in names})
    for name, run in runs.items():
        assert not differences(runs["colocated_2_ranks" if name.endswith("2_ranks") else "colocated"], run)
        invariants.check_run(read_finished(run))
    return list(runs.values())


NAMED = [("clip_cov", "batch_std"), ("m2po", "rloo"), ("clip", "reinforce_plus_plus"), ("decoupled_tis", "max_rl")]
"""A loss and advantages, of whole batches or not. What each does to a batch that comes in another order or in
other parts is known without a run (tests/harness/rl, tests/engines/torch)."""


@pytest.mark.slow
@pytest.mark.parametrize("named", NAMED, ids=", ".join)
def test_losses_and_advantages_change_nothing_of_that(results: Path, drivers: Drivers, named: tuple[str, str]) -> None:
    """Groups of four, of which `torch.std` is another alone than beside others."""
    own = "algorithm.correction={} algorithm.advantage={}".format(*named)
    weighed = "algorithm.kl_coef=0.01 algorithm.kl_unbiased=true algorithm.aggregation=sequence_mean_token_sum"
    settings = f"{SMALL} iterations=2 algorithm.group_size=4 algorithm.recompute_log_probs=true {weighed} {own}"
    for run in equal_runs(drivers, results / "_".join(named), settings, ONE_RANK):
        assert all(0 < row["train/grad_norm"] < math.inf for row in load_metrics(run))


@pytest.mark.slow
def test_parts_of_rewards_change_nothing_of_that(results: Path, drivers: Drivers) -> None:
    own = "task.reward=tests.support.rewards:graded algorithm.advantage=gdpo algorithm.options.parts.short=0.5"
    for run in equal_runs(drivers, results / "parts", f"{SMALL} iterations=2 {own}", ONE_RANK):
        assert all(0 < row["train/grad_norm"] < math.inf for row in load_metrics(run))


@pytest.mark.slow
def test_experts_that_rollout_chose_are_those_of_training_whatever_is_replayed(results: Path, drivers: Drivers) -> None:
    own = f"{SMALL} iterations=2 model=tiny-moe algorithm.recompute_log_probs=true training.routing_replay="
    one, *others = (
        run for switch in ("false", "true") for run in equal_runs(drivers, results / switch, own + switch, ONE_RANK)
    )
    for run in others:
        assert not differences(one, run)
    for run in others[-2:]:
        assert [row["router/rerouted"] for row in load_metrics(run)] == [0.0, 0.0]


@pytest.mark.slow
def test_a_filter_changes_nothing_of_that(results: Path, drivers: Drivers) -> None:
    """Which groups are trained, and what places of refused ones are dealt instead, does not depend on who is faster."""
    filtered = "algorithm.filter=tests.support.filters:even algorithm.over_sampling=1.5"
    filtered += " task.on_failed_score=redeal task.reward=tests.support.rewards:right_or_none"
    for run in equal_runs(drivers, results / "filtered", f"{SMALL} iterations=4 {filtered}", BOTH_WORLDS):
        counts = load_ledger(run)
        assert counts["trained"] == 4 * 128 and counts["dropped_filtered"] > 100 and counts["dropped_failed"] > 0
        assert sum(row["reward/failed"] for row in load_metrics(run)) == 0
        assert max(row["filter/rounds"] for row in load_metrics(run)) > 1


LOOKUP = "task=lookup task.latency_s=0.005 task.reward=tests.support.rewards:letters"
"""Samples of several turns, each answered after a while."""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["task=reverse", LOOKUP], ids=["reverse", "lookup"])
def test_a_baseline_for_each_token_changes_nothing_of_that(results: Path, drivers: Drivers, task: str) -> None:
    """Made group by group of what actor_fwd computes micro-batch by micro-batch; also where an environment writes."""
    own = "algorithm.advantage=optimal_token_baseline algorithm.recompute_log_probs=true"
    settings = f"{SMALL} iterations=3 {task} {own}"
    worlds = BOTH_WORLDS[2:] if task != LOOKUP else (*ONE_RANK, "separated_streaming")
    for run in equal_runs(drivers, results / f"baseline_{task[5:11]}", settings, worlds):
        assert any(row["train/grad_norm"] > 0 for row in load_metrics(run))
        samples = load_samples(run).to_pydict()
        assert (max(samples["turns"]) > 1 and sum(samples["environment_tokens"]) > 0) == (task == LOOKUP)


@pytest.mark.slow
def test_a_greedy_response_to_compare_with_changes_nothing_of_that(results: Path, drivers: Drivers) -> None:
    settings = f"{SMALL} iterations=3 {LOOKUP} algorithm.advantage=remax"
    for run in equal_runs(drivers, results / "remax", settings, ONE_RANK):
        metrics = load_metrics(run)
        assert any(row["train/grad_norm"] > 0 and row["reward/baseline"] != row["reward/mean"] for row in metrics)
        assert metrics[-1]["ledger/dropped_baseline"] == 3 * 16


@pytest.mark.slow
def test_adapters_change_nothing_of_that(results: Path, drivers: Drivers) -> None:
    """With the base they stand beside as the reference."""
    own = "training.lora_rank=3 algorithm.kl_coef=0.01 algorithm.recompute_log_probs=true"
    for run in equal_runs(drivers, results / "lora", f"{SMALL} iterations=3 {own}", BOTH_WORLDS):
        assert [row["policy/kl_ref"] > 0 for row in load_metrics(run)] == [False, True, True]
        learnt = load_file(run / "model/adapter_model.safetensors")
        assert all(tensor.any() and ".lora_" in name for name, tensor in learnt.items())


WITH_CRITIC = "algorithm=ppo algorithm.micro_batch_groups=4"
CRITICS = {
    "whitened": "",
    "streaming": "algorithm.normalise_std=false algorithm.options.lam=0.95",
    "steps": "algorithm.mini_batches=2 algorithm.epochs=2",
}
WORLDS = {"whitened": BOTH_WORLDS, "streaming": ONE_RANK, "steps": BOTH_WORLDS[2:]}


@pytest.fixture(scope="module")
def runs_with_critic(results: Path, drivers: Drivers) -> dict[str, Path]:
    each = {f"{name}_{how}": f"{RUNS[name]} {CRITICS[how]}" for how, worlds in WORLDS.items() for name in worlds}
    each["apart"] = "schedule=separated_sync cluster.devices=3 schedule.split.rollout=1 schedule.split.critic=1"
    settings = {name: f"{SMALL} iterations=3 {WITH_CRITIC} {given}" for name, given in each.items()}
    return drivers.bench_all(results / "critic", settings)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "other"), [(how, name) for how in WORLDS for name in WORLDS[how] if "async" in name])
def test_a_critic_changes_nothing_of_that(runs_with_critic: dict[str, Path], how: str, other: str) -> None:
    same_world = "colocated_2_ranks" if other.endswith("2_ranks") else "colocated"
    one, run = runs_with_critic[f"{same_world}_{how}"], runs_with_critic[f"{other}_{how}"]
    assert not differences(one, run)
    invariants.check_run(read_finished(run))
    assert all(row["critic/lag_max"] == 0 and row["critic/grad_norm"] > 0 for row in load_metrics(run))


@pytest.mark.slow
def test_a_critic_on_devices_of_its_own_learns_the_same(runs_with_critic: dict[str, Path]) -> None:
    assert not differences(runs_with_critic["colocated_whitened"], runs_with_critic["apart"])
    weights = load_file(runs_with_critic["apart"] / "critic/model.safetensors")
    assert weights["score.weight"].any() and "lm_head.weight" not in weights


@pytest.mark.slow
def test_a_model_with_experts_changes_nothing_of_that(results: Path, drivers: Drivers, tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    settings = f"{SMALL} iterations=4 model={random_folder(tmp_path / 'experts', 'qwen3_moe', **sizes)}"
    equal_runs(drivers, results / "experts", settings, ONE_RANK)
    equal_runs(drivers, results / "spread", f"{settings} training.expert_parallel=2", BOTH_WORLDS[2:])


@pytest.mark.slow
def test_stages_change_nothing_of_that_nor_of_what_one_rank_trains(results: Path, drivers: Drivers) -> None:
    parts = "model.tied_embeddings=false training.tokens_per_micro_batch=200 algorithm.reference=true"
    settings = f"{SMALL} iterations=3 {parts}"
    staged = equal_runs(drivers, results / "stages", f"{settings} training.pipeline_parallel=2", BOTH_WORLDS[2:])
    (alone,) = equal_runs(drivers, results / "one_stage", settings, ONE_RANK[:1])
    assert not differences(alone, staged[0])


@pytest.mark.parametrize("other", [name for name in RUNS if not name.startswith("colocated")])
def test_without_staleness_every_schedule_is_bitwise_equal_to_colocate_sync(runs: dict[str, Path], other: str) -> None:
    same_world = "colocated_2_ranks" if other.endswith("2_ranks") else "colocated"
    assert not differences(runs[same_world], runs[other])


def test_the_equal_runs_move_and_a_difference_would_be_noticed(runs: dict[str, Path], tmp_path: Path) -> None:
    initial = build_model(compose_job([]).model).state_dict()
    final = load_file(runs["colocated"] / "model/model.safetensors")
    assert final and all(not torch.equal(weights, initial[name]) for name, weights in final.items())
    other = tmp_path / "other"
    shutil.copytree(runs["colocated"], other)
    for name in ("samples.parquet", "responses.parquet"):
        pq.write_table(pq.read_table(other / name).slice(1), other / name)
    (other / "metrics.jsonl").write_text(json.dumps(load_metrics(other)[0] | {"reward/mean": 2.0}) + "\n")
    weights = bytearray((other / "model/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model/model.safetensors").write_bytes(weights)
    assert len(differences(runs["colocated"], other)) == 6


@pytest.mark.parametrize("name", RUNS)
def test_no_sample_lags_and_all_are_trained_as_the_schedule_promises(runs: dict[str, Path], name: str) -> None:
    invariants.check_run(read_finished(runs[name]))
    samples = load_samples(runs[name]).to_pydict()
    assert set(samples["lag_worst"]) == {0} and set(samples["span"]) == {1}
    assert set(samples["fate"]) == {"trained"} and len(samples["fate"]) == 4 * 128
    assert load_ledger(runs[name])["admitted"] == 4 * 128


# -- what the same runs tell a calibration

SHOWN = ("decode_step_s", "prefill_s_per_token", "log_prob_s_per_token", "train_s_per_token", "train_step_s", "sync_s")


@pytest.mark.parametrize("name", ["colocated", "separated", "separated_streaming"])
def test_a_real_run_shows_what_its_pieces_cost(runs: dict[str, Path], name: str) -> None:
    base = base_job([])
    found = calibrate_runs([runs[name]], base, "mine")
    assert all(
        getattr(found.cost, shown) >= 0 and getattr(found.cost, shown) != getattr(base.cost, shown) for shown in SHOWN
    )
    assert found.cost.decode_step_s + found.cost.decode_step_s_per_sample > 0
    assert {phase.name for phase in found.phases} >= {"generation", "scoring", "training", "optimizer", "weights"}
    assert ("reload_s" in found.unseen) == (name != "colocated")


def test_costs_of_runs_are_simulated(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    two = [runs["colocated"], runs["separated"]]
    assert cli.main(["calibrate", *(f"run={run}" for run in two), "name=mine"]) == 0
    job = compose_job([f"cost={tmp_path / 'costs' / 'mine.yaml'}", "iterations=3", "cluster.devices=2"])
    both = calibrate_runs(two, base_job([]), "mine").cost
    for name, value in asdict(both).items():
        if isinstance(value, float):
            assert getattr(job.cost, name) == pytest.approx(value, rel=1e-5), name
    assert len(simulate(job, 0).timeline.iteration_ends) == 3


def test_only_finished_runs_are_read_and_names_name_files(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no finished run"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="name=a/b cannot name a folder"):
        calibrate_runs([runs["colocated"]], base_job([]), "a/b")
