"""What can be known before a job starts to be impossible, on machines that are made up here."""

import sys
import sysconfig
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.checks.job import JobPlan, only_simulated, plan_job, settled_evaluation
from harness.checks.layout import device_roles
from harness.cli import main as cli
from harness.config import ConfigError, EngineConfig, TrainingConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import Machine
from harness.cost_model.job_cost import layout_of, simulated_cost
from harness.cost_model.memory import JobLayout
from harness.cost_model.shape import parameters
from harness.planner.candidates import grid
from harness.planner.memory import planned_memory, refusal
from harness.tasks import make_task
from tests.support.losses import WHOLE_BATCH

GIB = 1 << 30
CORES = Machine(cores=8, gpus=0, gpu_bytes=0)
WITH_REFERENCE = "algorithm.reference=true"
MANY_CORES = Machine(cores=64, gpus=0, gpu_bytes=0)


def plan(*settings: str, machine: Machine = CORES) -> JobPlan:
    config = compose_job(settings)
    return plan_job(config, make_schedule(config), machine)


def refused(*settings: str, machine: Machine = CORES) -> str:
    """What is said where it is to run for real."""
    with pytest.raises(ConfigError) as caught:
        plan("backend=real", *settings, machine=machine)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 GiB in all."""
    memory = psutil.virtual_memory()._replace(total=24 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_without_held_out_problems_or_packages_there_is_a_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(machine=Machine(2, 0, 0))
    assert not found.gpu and dict(found.placement.devices) == {"rollout": (0,), "actor": (1,), "actor_fwd": (1,)}
    rows = "".join(f'{{"prompt": "a{n}", "answer": "b"}}\n' for n in range(32))
    (tmp_path / "rows.jsonl").write_text(rows)
    config = compose_job(["backend=real", "task=data", f"task.data={tmp_path}/rows.jsonl", "task.held_out_share=0"])
    assert settled_evaluation(config, make_task(config)).every == 0
    monkeypatch.setattr("engines.vllm.options.find_spec", lambda package: None)
    assert refused("engine=vllm").startswith("engine.name=vllm: it needs vllm, which this Python lacks; ")
    assert plan("engine=vllm", "backend=virtual").backend == "virtual"


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ("backend=real", 24),
        ("backend=real iterations=6", 4),
        ("backend=real engine.keep_cache=true iterations=60", 60),
        ("backend=real eval.every=7", 7),
        ("backend=real eval.every=0", 0),
        ("backend=real smoke=true", 0),
        ("backend=virtual", 0),
    ],
)
def test_what_is_a_result_is_evaluated_six_times_unless_the_user_says_otherwise(settings: str, every: int) -> None:
    config = compose_job(settings.split())
    task = make_task(config) if plan(*settings.split()).backend == "real" else None
    assert settled_evaluation(config, task).period == every


def test_roles_are_there_that_the_algorithm_wants() -> None:
    config = compose_job(["algorithm.recompute_log_probs=false"])
    assert device_roles(config) == ("rollout", "actor")
    assert set(plan_job(config, make_schedule(config), CORES).placement.devices) == {"rollout", "actor"}
    for settings, there in (
        ((), False),
        (("algorithm.kl_coef=0.1",), True),
        (("algorithm.kl_coef=0.1", "algorithm.reference=false"), True),
        (("algorithm.reference=true",), True),
    ):
        assert ("reference" in device_roles(compose_job(settings))) == there
        assert ("reference" in plan(*settings).placement.devices) == there


def test_a_batch_that_ranks_and_micro_batches_do_not_divide_says_what_does() -> None:
    told = refused("algorithm.micro_batch_groups=7")
    assert told == (
        "algorithm.batch_groups=16 does not divide into micro-batches of 7 groups on 1 training rank; "
        "set algorithm.micro_batch_groups to one of 1, 2, 4, 8, 16"
    )
    assert refused("algorithm.mini_batches=3") == (
        "algorithm.mini_batches=3 does not cut algorithm.batch_groups=16 into equal parts of whole groups; "
        "set it to one of 1, 2, 4, 8, 16"
    )
    assert refused("algorithm.mini_batches=4") == (
        "algorithm.batch_groups=16 in algorithm.mini_batches=4 does not divide into micro-batches of 8 groups on 1 "
        "training rank; set algorithm.micro_batch_groups to one of 1, 2, 4"
    )
    plan("algorithm.mini_batches=4", "algorithm.micro_batch_groups=4", "algorithm.epochs=2")
    pool = ("schedule=colocate_sync", "algorithm.batch_groups=12")
    assert refused(*pool, "cluster.devices=4").endswith("ranks; set algorithm.micro_batch_groups to one of 1, 3")
    assert refused(*pool, "cluster.devices=5").endswith("; make algorithm.batch_groups a multiple of 5")
    plan(*pool, "cluster.devices=4", "algorithm.micro_batch_groups=3")
    settings = ("schedule.order=completion", "cluster.devices=4", "algorithm.micro_batch_groups=4")
    plan(*settings)
    assert "does not divide into micro-batches" in refused(*settings, "algorithm.batch_groups=6")


def test_a_loss_of_whole_batches_gets_whole_mini_batches_or_is_refused() -> None:
    loss = ("algorithm.correction=m2po", "algorithm.mini_batches=4")
    assert refused(*loss, "algorithm.micro_batch_groups=2") == (
        "algorithm.correction=m2po looks at a whole mini-batch, and micro-batches have algorithm.micro_batch_groups=2 "
        "groups of 4; set it to 4"
    )
    plan(*loss, "algorithm.micro_batch_groups=4")
    assert refused(*loss, "algorithm.micro_batch_groups=4", "schedule.order=completion").startswith(
        "algorithm.correction=m2po looks at a whole mini-batch, and schedule.order=completion trains what is"
    )


@pytest.mark.parametrize("loss", WHOLE_BATCH)
def test_no_loss_of_whole_batches_is_cut_by_ranks_or_by_tokens(loss: str) -> None:
    chosen = f"algorithm.correction={loss}"
    sized = "algorithm.micro_batch_groups=16"  # of which two ranks have no whole number: not what is to be changed
    assert refused(chosen, "schedule=colocate_sync", "cluster.devices=2", sized).endswith("or choose another")
    assert refused(chosen, "schedule=colocate_sync", "cluster.devices=2") == (
        f"algorithm.correction={loss} looks at a whole batch, which 2 training ranks share; train on one device, or "
        "choose another"
    )
    whole = (chosen, "algorithm.micro_batch_groups=16")
    assert refused(*whole, "training.tokens_per_micro_batch=64").endswith("may cut; set it to null")


def test_advantages_of_a_whole_batch_a_kl_target_and_spares_need_batches_in_order() -> None:
    settings = ("schedule=fully_async", "algorithm.advantage=reinforce_plus_plus")
    plan(*settings)
    told = refused(*settings, "schedule.order=completion")
    assert told.startswith("algorithm.advantage=reinforce_plus_plus compares all rewards of a batch, and with ")
    assert told.endswith("set schedule.order=fifo")
    followed = ("algorithm.kl_target=0.1", "algorithm.kl_coef=0.05")
    assert "set algorithm.kl_in=reward and algorithm.kl_coef above 0" in refused(*followed)
    settings = ("schedule=fully_async", "algorithm.kl_in=reward", *followed)
    assert "reference" in plan(*settings).placement.devices
    told = refused(*settings, "schedule.order=completion")
    assert told.startswith("algorithm.kl_target=0.1 is followed from batch to batch, and with ")
    filtered = ("schedule=fully_async", "algorithm.filter=zero_variance")
    plan(*filtered, "algorithm.over_sampling=1.5")
    assert refused("algorithm.over_sampling=1.5").endswith("filter=zero_variance, or algorithm.over_sampling=1")
    assert refused("algorithm.over_sampling=0.5").startswith("algorithm.over_sampling=0.5 is too small; use at least 1")
    completion = refused(*filtered, "algorithm.over_sampling=1.5", "schedule.order=completion")
    assert completion.endswith("set algorithm.over_sampling=1, or schedule.order=fifo")
    remax = ("algorithm.advantage=remax", "schedule=fully_async")
    for order in ("fifo", "completion"):
        plan(*remax, f"schedule.order={order}")
    for backend in ("auto", "virtual"):
        kl = (f"backend={backend}", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1")
        assert refused(*remax, *kl).endswith("as algorithm.kl_in=reward needs; set algorithm.kl_in=loss")


def test_what_reads_probabilities_needs_the_role_that_computes_them() -> None:
    settings = ("algorithm.advantage=optimal_token_baseline", "algorithm.recompute_log_probs=false")
    for told in (refused(*settings), refused("backend=virtual", *settings)):
        assert told == (
            "algorithm.advantage=optimal_token_baseline is made of the probabilities that the actor_fwd role computes "
            "at every token; set algorithm.recompute_log_probs=true, or algorithm.advantage=opo"
        )
    for order in ("fifo", "completion"):
        plan("schedule=fully_async", settings[0], f"schedule.order={order}", "algorithm.options.zero_tail=false")
    assert "algorithm.options.zero_tail" in refused(settings[0], "algorithm.options.zero_tail=3")
    settings = ("algorithm.correction=decoupled", "algorithm.recompute_log_probs=false")
    for told in (refused(*settings), refused("backend=virtual", *settings)):
        assert told.startswith("algorithm.correction=decoupled needs the actor_fwd role")
        assert told.endswith("set algorithm.recompute_log_probs=true, or algorithm.proximal=trainer or log_linear")
    plan(*settings, "algorithm.proximal=trainer")


def test_a_critic_learns_what_the_actor_does_in_order_on_ranks_that_share_the_batch() -> None:
    critic = ("schedule=fully_async", "algorithm=ppo")
    assert plan(*critic).placement.share("critic", "actor")
    for order in ("algorithm.normalise_std=false", "algorithm.normalise_std=true"):
        assert "set schedule.order=fifo" in refused(*critic, order, "schedule.order=completion")
    apart = ("schedule.split.rollout=1", "schedule.split.critic=3", "cluster.devices=5")
    assert refused(*critic, *apart, "algorithm.micro_batch_groups=4").startswith(
        "algorithm.batch_groups=16 does not divide into micro-batches of 4 groups on 3 critic ranks; "
    )
    assert "algorithm.options.lam" in refused(*critic, "algorithm.options.lam=2")


def test_more_devices_than_cores_or_gpus_are_refused_with_a_number_that_works() -> None:
    told = refused("schedule=colocate_sync", "cluster.devices=9")
    assert told.startswith("the job needs 9 devices, this machine has 8 cores; set cluster.devices=8, or cluster.over")
    plan("schedule=colocate_sync", "cluster.devices=16", "cluster.oversubscribe=true", "algorithm.micro_batch_groups=1")
    told = refused("schedule=colocate_sync", "cluster.devices=8", "cluster.threads_per_device=2")
    assert told.startswith("the job needs 8 devices of 2 threads, this machine has 8 cores; set cluster.devices=4, or")
    # The default split needs two: on one core, DEVICES=1 would only lead to the next refusal.
    told = refused(machine=Machine(1, 0, 0))
    assert told == ("the job needs 2 devices, this machine has 1 core; cluster.oversubscribe=true to share cores")
    told = refused("cluster.devices=4", machine=Machine(64, 2, 80 * GIB))
    assert told.startswith("the job needs 4 devices, this machine has 2 GPUs; set cluster.devices=2, or ")
    assert refused(machine=Machine(64, 1, 80 * GIB)) == (
        "the job needs 2 devices, this machine has 1 GPU; schedule=colocate_sync, whose roles take turns on one, or "
        "cluster.kind=cpu to use cores"
    )
    assert not plan("cluster.kind=cpu", machine=Machine(64, 1, 80 * GIB)).gpu
    assert refused("cluster.kind=gpu") == "cluster.kind=gpu: this machine has no GPU; set cluster.kind=cpu"


def test_gpus_that_are_shared_or_divided_are_trials_and_join_no_group() -> None:
    one = Machine(16, 1, 80 * GIB)
    job = ("schedule=fully_async", "cluster.kind=gpu", "cluster.devices=2", "cluster.oversubscribe=true")
    assert plan(*job, "smoke=true", machine=one).trial and not plan("cluster.devices=2").trial
    assert refused(*job, machine=one).endswith("is a trial, which measures nothing; set smoke=true")
    assert "and there are 2; leave it out" in refused(*job, "smoke=true", machine=Machine(16, 2, 80 * GIB))
    ranks = refused(*job, "smoke=true", "cluster.devices=3", "schedule.split.rollout=1", machine=one)
    assert ranks.startswith("cluster.oversubscribe=true: training world has 2 ranks on one GPU, which NCCL joins to no")
    large = refused(*job, "smoke=true", "model=qwen7b", "model.checkpoint=null", machine=one)
    assert "processes that share the GPU need" in large and "may use 72.0 GiB" in large
    divided = Machine(cores=64, gpus=2, gpu_bytes=40 * GIB, divided=True)
    said = refused(machine=divided)
    assert "(MIG)" in said and "'weights of actor[0]'" in said and "schedule=colocate_sync cluster.devices=1" in said
    assert plan("schedule=colocate_sync", "cluster.devices=1", machine=divided).gpu
    assert not plan("cluster.kind=cpu", machine=divided).gpu


def test_what_a_large_model_needs_is_said_of_cores_gpus_and_hosts(small_memory: None) -> None:
    """7.6e9 parameters: 16 bytes each for training, 2 each for the reference, the engine and its next weights."""
    assert refused("model=qwen7b", WITH_REFERENCE) == (
        "model=qwen7b needs 156.5 GiB for its training state, its activations and the copies of its weights, and "
        "there is no GPU and 24.0 GiB of memory here; use more or larger GPUs, backend=virtual to simulate it, or "
        "model=tiny"
    )
    # One training rank holds it all, beside two copies, however much memory the other GPUs have.
    told = refused("model=qwen7b", WITH_REFERENCE, machine=Machine(64, 8, 80 * GIB))
    assert told.startswith(
        "model=qwen7b needs 158.1 GiB on each device of actor+actor_fwd+reference (step, 56.7 of them "
        "for optimizer state), and may use 72.0 GiB of the 80.0 GiB of a GPU here; use cluster.devices="
    )
    config = ("model=qwen7b", "model.checkpoint=null", "cluster.devices=8", "training.optimizer_offload=always")
    small = Machine(64, 8, 80 * GIB, host_bytes=64 * GIB)
    assert refused(*config, "algorithm.micro_batch_groups=4", machine=small) == (
        "model=qwen7b needs 88.7 GiB of a host's memory (62.4 of them for optimizer state), and may use 57.6 GiB; set "
        "training.optimizer_offload=none, use hosts with more memory, or backend=virtual to simulate it"
    )
    # Two devices of .6 GiB, and as much again for processes.
    job = ("schedule=delayed_update", "model=qwen0.5b", "model.checkpoint=null", "checkpoint.every=1")
    assert "GiB of a host's memory beside" in refused(*job, "cluster.memory_gib=7")
    plan(*job, "cluster.memory_gib=500")
    config = ("model=qwen7b", "model.checkpoint=null", "cluster.devices=8", "algorithm.micro_batch_groups=4")
    found = plan(*config, machine=Machine(64, 8, 80 * GIB))
    assert found.gpu and len(found.placement.devices["actor"]) == 4
    assert "8.0 GiB of memory here" in refused("model=qwen7b", "cluster.memory_gib=4")
    assert not plan("model=qwen7b", "model.checkpoint=null", "cluster.memory_gib=400").gpu


def test_what_the_machine_cannot_hold_is_simulated_and_says_why(small_memory: None) -> None:
    found = plan("model=qwen7b", "cost=tiny_cpu", WITH_REFERENCE)
    assert found.backend == "virtual" and found.why.startswith("model=qwen7b needs 156.5 GiB")
    found = plan("schedule=colocate_sync", "cluster.devices=9", "algorithm.batch_groups=72")
    assert found.backend == "virtual" and found.why.startswith("the job needs 9 devices, this machine has 8 cores")
    assert plan().backend == "real" and not plan().why


def test_what_is_wrong_with_a_job_is_refused_on_every_backend_and_a_simulation_asks_nothing_of_the_machine() -> None:
    for backend in ("auto", "real", "virtual", "paced"):
        with pytest.raises(ConfigError, match="does not divide into micro-batches of 7"):
            plan(f"backend={backend}", "algorithm.micro_batch_groups=7")
    for backend in ("virtual", "paced"):
        settings = ("model=qwen32b", "cluster.devices=512", "algorithm.batch_groups=2048")
        found = plan(f"backend={backend}", *settings, "training.recompute_activations=true")
        assert (found.backend, found.placement.total, found.why) == (backend, 512, "")


def test_a_device_that_an_engine_keeps_takes_no_weights_and_is_not_simulated() -> None:
    """On whatever backend, and whether over NCCL or not."""
    for backend in ("real", "virtual"):
        for settings, told in (
            (["rollout=actor"], r"puts actor\[0\] and rollout\[0\] on device 0.*split.rollout=50%, or use a colo"),
            (["actor_fwd=rollout"], r"puts rollout\[0\] and actor_fwd\[0\] on device 0.*split.actor_fwd=actor, or"),
        ):
            with pytest.raises(ConfigError, match=told):
                plan(f"backend={backend}", *(f"schedule.split.{setting}" for setting in settings))
        with pytest.raises(ConfigError, match=r"rollout device \d, which the actor does not have"):
            plan(f"backend={backend}", "schedule=colocate_sync", "schedule.split.rollout=1", "schedule.split.actor=1")
    plan("backend=virtual", "schedule=colocate_sync")
    plan("schedule.split.reference=rollout", WITH_REFERENCE)
    with pytest.raises(ConfigError, match="rollout the devices of reference, whose weights take room"):
        plan("backend=virtual", "schedule.split.reference=rollout", WITH_REFERENCE)


def test_what_engine_model_and_task_cannot_hold_of_each_other_is_refused(tmp_path: Path) -> None:
    assert refused("engine.slots=7").endswith("set engine.slots=8 or more")
    assert refused("max_tokens=200").endswith("exceeds model.max_length=128; set max_tokens=120 or less")
    assert refused("model.max_length=8").endswith("exceeds model.max_length=8; set model.max_length=20")
    assert refused("model.vocabulary=10").endswith("32 tokens of task reverse; set model.vocabulary=32")
    assert refused("algorithm.top_p=0.9").startswith("algorithm.top_p=0.9 samples from part of the distribution")
    assert refused("model.heads=3").startswith("model.heads=3 cannot share model.kv_heads=2")
    told = refused(f"model.checkpoint={tmp_path}")
    assert told.startswith(f"model.checkpoint={tmp_path} holds no model; name a local directory")
    needs = "schedule=half_step needs 2 rollout engines, its split gives 1 of 2 devices; set "
    assert refused("schedule=half_step") == f"{needs}cluster.devices=4"
    assert refused("schedule=half_step", "schedule.split.rollout=1") == f"{needs}schedule.split.rollout=2"
    plan("schedule=half_step", "cluster.devices=4")


def test_a_model_of_the_hub_that_is_not_here_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    told = refused("model=qwen0.5b", "cluster.memory_gib=500")
    assert told.startswith("model.checkpoint=hf:Qwen/Qwen2.5-0.5B is not in the cache")
    assert "model.checkpoint=<folder>" in told and "model.checkpoint=null for random weights" in told


SIXTEEN = ("cluster.devices=16", "algorithm.micro_batch_groups=1")
BIG = ("backend=virtual", "model=qwen7b", *SIXTEEN)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["engine.tensor_parallel=3"], "engine.tensor_parallel=3 does not divide the 8 rollout devices; set it to 1"),
        (["engine.tensor_parallel=8"], "engine.tensor_parallel=8 does not divide the 28 model.heads; set it to 1 or 2"),
        (
            ["schedule=half_step", "engine.tensor_parallel=4", "schedule.split.rollout=4"],
            "schedule=half_step needs 2 rollout engines, its split gives 1 of 16 devices; set schedule.split.rollout=8",
        ),
        (["training.pipeline_parallel=3"], "training.pipeline_parallel=3 does not divide the 28 model.layers; set it"),
        (
            ["training.pipeline_parallel=4", "training.tensor_parallel=4"],
            "training.tensor_parallel=4 times training.pipeline_parallel=4 does not divide the 8 devices of actor; set",
        ),
        (
            [WITH_REFERENCE, "training.tensor_parallel=2", "schedule.split.reference=1"],
            "training.tensor_parallel=2 does not divide the 7 training ranks; set it to 1",
        ),
        (
            [WITH_REFERENCE, "training.tensor_parallel=2", "schedule.split.reference=1", "schedule.split.actor=4"],
            "training.tensor_parallel=2 times training.pipeline_parallel=1 does not divide the 1 device of reference",
        ),
        (["training.expert_parallel=2"], "training.expert_parallel=2: model=qwen7b has no experts; set it to 1"),
        (
            ["model=qwen3-30b-a3b", "training.expert_parallel=5"],
            "training.expert_parallel=5 does not divide the 8 data-parallel ranks; set it to 1 or 2 or 4 or 8",
        ),
        (
            ["model=qwen3-30b-a3b", "training.expert_parallel=8", "training.tensor_parallel=4", "model.experts=16"],
            "training.expert_parallel=8 does not divide the 2 data-parallel ranks; set it to 1 or 2",
        ),
        (
            ["model=qwen3-30b-a3b", "training.tensor_parallel=4", "model.experts=126"],
            "training.tensor_parallel=4 does not divide the 126 model.experts; set it to 1 or 2",
        ),
        (["+model.experts=4"], "model.active_experts=0 cannot be chosen of model.experts=4; use 1 to 4"),
        (["+model.active_experts=4"], "model.active_experts=4 cannot be chosen of model.experts=0; set it to 0"),
        (
            [WITH_REFERENCE, "cost.lengths.cap=30000"],
            "model=qwen7b needs 181.8 GiB on each device of actor+actor_fwd+reference (backward, 156.5 of them for "
            "activations), and may use 71.7 GiB of device=h100; use training.recompute_activations=true, more devices "
            "for actor+actor_fwd+reference, or a device with more memory, as in device=h200",
        ),
        (
            ["model=qwen32b", "training.recompute_activations=true", "device=ascend910b"],
            "model=qwen32b: its weights are 61.0 GiB on each device of a rollout engine, which may use 57.6 GiB of "
            "device=ascend910b; set engine.tensor_parallel=2 or a device with more memory",
        ),
        (
            ["model=qwen32b", "cost.lengths.cap=60000", "training.recompute_activations=true"],
            "model=qwen32b: beside its weights a rollout engine on device=h100 has room for ",
        ),
    ],
)
def test_what_no_device_can_do_is_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*BIG, *settings, machine=MANY_CORES)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["engine.tensor_parallel=2"],
            "engine.tensor_parallel=2 can be simulated only with engine=torch, whose engines have one device each; "
            "set it to 1, engine=sglang or engine=vllm, or backend=virtual",
        ),
        (
            ["model=qwen3-30b-a3b", "model.architecture=mixtral", "cluster.memory_gib=9999"],
            "model.experts=128: experts of model.architecture=mixtral can be simulated only",
        ),
        (
            ["model=tiny-moe", "engine=sglang", "model.tied_embeddings=true"],
            "engine=sglang gives a model with experts a head of its own, and that of model=tiny-moe is tied",
        ),
        (
            ["model=tiny-moe", "engine=sglang", "training.routing_replay=true"],
            "training.routing_replay=true: engine=sglang does not tell which experts it chose but on GPUs; use engine",
        ),
    ],
)
def test_what_can_be_simulated_only_is_refused(settings: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENCE_SGLANG_PYTHON", sys.executable)
    job = (*SIXTEEN, "schedule.split.rollout=8", "cost=tiny_cpu", *settings)
    with pytest.raises(ConfigError) as caught:
        plan("backend=real", *job, machine=MANY_CORES)
    assert str(caught.value).startswith(told)
    found = plan("backend=auto", *job, machine=MANY_CORES)
    assert found.backend == "virtual" and found.why.startswith(told)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["cluster.devices=3", "schedule.split.rollout=2"], None),
        (["schedule=colocate_sync", "cluster.devices=2"], None),
        (
            ["schedule=partial_rollout_sync", "cluster.devices=2"],
            "engine.tensor_parallel=2: engines of schedule=partial_rollout_sync take their devices in one tu",
        ),
        (["schedule=lending", "cluster.devices=4"], "engine.tensor_parallel=2: engines of schedule=lending take their"),
        (
            ["cluster.devices=3", "schedule.split.rollout=2", WITH_REFERENCE, "schedule.split.reference=rollout"],
            "engine.tensor_parallel=2: a real engine of several devices has them alone, or takes turns with a "
            "colocated schedule, and schedule=fully_async has reference there; set it to 1, ",
        ),
    ],
)
def test_an_engine_of_several_devices_has_them_alone(monkeypatch: Any, settings: list[str], told: str | None) -> None:
    monkeypatch.setattr("harness.checks.job.check_environment", lambda config: None)  # vLLM is not needed here
    job = ["engine=vllm", "engine.tensor_parallel=2", "backend=real", *settings]
    if told is None:
        found = plan(*job, machine=MANY_CORES)
        assert (found.backend, found.placement.devices["rollout"]) == ("real", (0, 1))
        return
    with pytest.raises(ConfigError) as caught:
        plan(*job, machine=MANY_CORES)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(("name", "devices", "told"), [
    ("vllm", 8, ""),
    ("sglang", 8, ""),
    ("vllm", 16, ""),
    ("torch", 8, "engine.tensor_parallel=2 can be simulated only with engine=torch"),
])  # fmt: skip
def test_32b_runs_synchronously_with_engines_that_take_two_gpus(name: str, devices: int, told: str) -> None:
    job = [f"engine={name}", "model=qwen32b", "device=h100", f"cluster.devices={devices}", "engine.tensor_parallel=2"]
    found = refusal(planned_memory(["schedule=colocate_sync", *job]))
    assert found.startswith(told) and bool(found) == bool(told)


def test_every_kind_of_parallelism_of_a_mixture_is_real_and_the_planner_proposes_them() -> None:
    kinds = {f"training.{field.name}" for field in fields(TrainingConfig) if field.name.endswith("_parallel")}
    kinds |= {f"engine.{field.name}" for field in fields(EngineConfig) if field.name.endswith("_parallel")}
    for setting in kinds:
        assert only_simulated(compose_job(["model=qwen3-30b-a3b", "engine=vllm", f"{setting}=2"])) is None
    real = compose_job(["backend=real", "model=qwen3-30b-a3b", "cluster.devices=16", "engine=vllm"])
    found = {(one.tensor_parallel, one.expert_parallel) for one in grid(real, make_schedule(real), scored=False)}
    assert {(1, 1), (1, 8), (2, 2)} <= found and all(128 % (tensor * experts) == 0 for tensor, experts in found)
    assert len(kinds) == 4, "another kind of parallelism has a setting: refuse it, or run it"


def test_costs_of_one_device_are_not_divided(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["backend=virtual", "cost=tiny_cpu", "cluster.devices=4", "engine.tensor_parallel=2"]
    assert cli.main(["bench", *job]) == 2
    said = "engine.tensor_parallel=2: cost=tiny_cpu gives what a worker of one device takes, and cannot be divided; use"
    assert capsys.readouterr().err.startswith(said)


def test_a_layout_is_read_off_the_settings_and_the_split() -> None:
    parallel = ("engine.tensor_parallel=4", "training.tensor_parallel=2", "training.pipeline_parallel=2")
    apart = compose_job([*BIG, *parallel])
    assert layout_of(apart, plan_job(apart, make_schedule(apart), Machine(1, 0, 0)).placement) == JobLayout(
        engine_devices=4, train_devices=4, train_ranks=2, pipeline=2, samples_per_call=8
    )
    shared = compose_job([*BIG, "schedule=colocate_sync", "cluster.devices=8"])
    placement = plan_job(shared, make_schedule(shared), Machine(1, 0, 0)).placement
    assert layout_of(shared, placement) == JobLayout(train_ranks=8, colocated=True, samples_per_call=8, one_node=True)
    assert simulated_cost(shared, placement).name == "roofline"
    given = compose_job([*BIG, "cost=tiny_cpu"])
    assert simulated_cost(given, placement) is given.cost


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["cluster.queue=redis"], "cluster.queue=redis: no server is named; set cluster.queue_options.urls="),
        (
            ["cluster.queue=redis", "cluster.queue_options.urls=['redis://:secret@127.0.0.1:1/0']"],
            "cluster.queue=redis: a URL of urls holds a password, which config.yaml would tell; set CADENCE_REDIS",
        ),
        (
            ["cluster.queue=redis", "cluster.queue_options.urls=['redis://127.0.0.1:1/0']"],
            "cluster.queue=redis: redis at redis://127.0.0.1:1/0 could not tell of its memory: ",
        ),
        (["cluster.queue=ray"], "cluster.queue=ray keeps rows in a Ray cluster, and RAY_ADDRESS names none; "),
        (["cluster.queue=shm", "cluster.queue_options.size=1"], "cluster.queue_options.size is no option of shm; "),
        (["cluster.queue_options.size=1"], "cluster.queue_options.size is of no storage; set cluster.queue, too"),
        (["cluster.queue=inline", "backend=virtual"], "cluster.queue=inline is of a queue in a process of its own, "),
    ],
)
def test_a_storage_of_the_queue_that_cannot_be_used_is_one_line(settings: list[str], told: str) -> None:
    assert refused("backend=real", *settings).startswith(told)


def test_devices_that_are_lent_are_those_of_training_and_no_environment_is_left_behind() -> None:
    assert refused("schedule=lending", "cluster.devices=5", "schedule.split.rollout=1", "schedule.split.lent=2") == (
        "schedule.split.lent=2: schedule=lending lends training devices; set it to actor"
    )
    assert refused("schedule=lending", "task=lookup", "cluster.devices=2").endswith(
        "the environment stays behind; use a task without one, or schedule=fully_async"
    )


# -- the training world


PUBLISHED = {"0.6b": 0.596, "1.7b": 1.721, "4b": 4.022, "8b": 8.191, "14b": 14.768, "32b": 32.762}
"""Billions of parameters of the dense Qwen3 models, tied embeddings once."""


def trained(*settings: str) -> JobPlan:
    config = compose_job(["backend=real", "schedule=colocate_sync", "cluster.devices=4", *settings])
    return plan_job(config, make_schedule(config), Machine(cores=8, gpus=0, gpu_bytes=0))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["tensor_parallel=3"], "training.tensor_parallel=3 does not divide the 4 training ranks; set it to 1 or 2"),
        (["tensor_parallel=4"], "training.tensor_parallel=4 does not divide the 2 model.kv_heads; set it to 1 or 2"),
        (["tensor_parallel=0"], "training.tensor_parallel=0 is too small; use at least 1"),
        (["tokens_per_micro_batch=9"], "training.tokens_per_micro_batch=9 is less than the 20 that a sample may have"),
        (["layout=flat"], "training.layout=flat is unknown; choose 'padded' or 'packed'"),
        (["compile=true", "tensor_parallel=2"], "training.compile=true does not work with training.tensor_parallel=2"),
        (["recompute_activations=1"], "training.recompute_activations=1 is neither true nor false"),
        (["lora_rank=-1"], "training.lora_rank=-1 is too small; use at least 0"),
        (["lora_rank=65"], "training.lora_rank=65 is more than model.hidden=64"),
        (
            ["lora_rank=8", "lora_targets=[q_proj,lm_head]"],
            "training.lora_targets names lm_head; linear layers of model=tiny are q_proj, k_proj, v_proj, o_proj, gate",
        ),
        (["lora_rank=8", "lora_targets=[q_proj,q_proj]"], "training.lora_targets=['q_proj', 'q_proj'] names a layer"),
        (["lora_rank=8", "tensor_parallel=2"], "training.lora_rank=8 is not built for training.tensor_parallel=2"),
        (["lora_rank=8", "pipeline_parallel=2"], "training.lora_rank=8 is not built for training.pipeline_parallel=2"),
        (["lora_rank=8", "expert_parallel=2"], "training.lora_rank=8 is not built for training.expert_parallel=2"),
    ],
)
def test_what_cannot_work_is_refused_at_the_door(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trained(*(f"training.{setting}" for setting in settings))
    assert str(caught.value).startswith(told)


def test_adapters_are_refused_beside_what_is_not_built_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = ("training.lora_rank=8", "schedule=separated_sync")
    with pytest.raises(ConfigError, match="lora_rank=8 is not built for cluster.delta_weights=true; set that to false"):
        trained(*lora, "cluster.delta_weights=true")
    monkeypatch.setenv("CADENCE_SGLANG_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="servers of engine=sglang that run already"):
        trained(*lora, "engine=sglang")


def test_a_machine_without_compiler_and_headers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"C\+\+ compiler .* and Python's headers .* set training.compile=false"):
        trained("training.compile=true", "algorithm.micro_batch_groups=4")


def test_ranks_that_share_layers_count_once_and_a_batch_too_large_to_tell_of_is_refused() -> None:
    micro_batches_of_eight = "algorithm.micro_batch_groups=8"
    with pytest.raises(ConfigError, match="8 groups on 4 training ranks"):
        trained(micro_batches_of_eight)
    assert len(trained(micro_batches_of_eight, "training.tensor_parallel=2").placement.devices["actor"]) == 4
    many = "algorithm.batch_groups=131072 algorithm.group_size=16 engine.slots=16".split()
    with pytest.raises(ConfigError, match="2,097,152 samples an iteration, more than the 1,048,576 that a message"):
        trained(*many)


@pytest.mark.parametrize("size", PUBLISHED)
def test_qwen3_shapes_have_the_parameters_that_were_published(size: str) -> None:
    assert parameters(compose_job([f"model=qwen3-{size}"]).model) / 1e9 == pytest.approx(PUBLISHED[size], abs=1e-3)
