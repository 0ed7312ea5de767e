"""Settings that nobody gave: on GPUs that are described, every schedule of a 7B model is accepted as it stands."""

from collections.abc import Sequence

import pytest

from harness.checks.defaults import FITTED, fit_to_gpus
from harness.checks.job import JobPlan, lengths_of, plan_job
from harness.checks.layout import device_roles
from harness.checks.machine import real_setting
from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job, make_schedule, names_of
from harness.config.machine import Machine
from harness.config.placement import Placement, communicators, resolve_split
from harness.config.registries import SCHEDULES, find
from harness.cost_model.memory_plan import USABLE, plan_memory

MIB = 1 << 20
MACHINES = {
    "8 x H100": Machine(128, 8, 81559 * MIB),
    "8 x A100": Machine(128, 8, 81920 * MIB),
    "8 x H20": Machine(128, 8, 97871 * MIB),
    "1 x H200": Machine(128, 1, 143771 * MIB),
    "2 x 8 H100": Machine(256, 16, 81559 * MIB, nodes=2),
}
"""As nvidia-smi reports their memory."""
LARGE = [name for name, machine in MACHINES.items() if machine.gpus > 1]
MODELS = ("qwen0.5b", "qwen7b", "qwen3-8b")


def fit(machine: Machine, *settings: str) -> tuple[JobConfig, JobPlan]:
    """The job as `make bench` would run it there."""
    asked = compose_job(["model.checkpoint=null", *settings])
    config = fit_to_gpus(asked, make_schedule(asked), names_of(settings), machine).config
    return config, plan_job(config, make_schedule(config), machine)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("machine", LARGE)
def test_every_schedule_is_accepted_as_it_stands(machine: str, model: str) -> None:
    """On all GPUs; no communicator has a device twice, and none of several nodes goes over a host's files."""
    there = MACHINES[machine]
    for name in SCHEDULES:
        config, plan = fit(there, f"schedule={name}", f"model={model}")
        assert plan.backend == "real" and plan.gpu, plan.why
        assert plan.placement.total == config.cluster.devices == there.gpus
        schedule = make_schedule(config)
        setting = real_setting(config, schedule, there, lengths_of(config), gpu=True)
        assert plan_memory(config, plan.placement, setting).fits
        listed = communicators_of(config, plan.placement)
        assert listed, "more than one device has something to say to another"
        for members in listed:
            assert len(set(members)) == len(members)
        assert there.nodes == 1 or schedule.transport != "ipc"


def communicators_of(config: JobConfig, placement: Placement) -> list[list[int]]:
    """The devices of each, in rank order."""
    schedule = make_schedule(config)
    found = communicators(
        placement,
        transport="local" if schedule.colocated else schedule.transport,
        training_tensor_parallel=config.training.tensor_parallel,
        engine_tensor_parallel=config.engine.tensor_parallel,
    )
    return [[member.device for member in communicator.members] for communicator in found]


@pytest.mark.parametrize("machine", LARGE)
def test_long_responses_are_accepted_with_smaller_passes(machine: str) -> None:
    for name in SCHEDULES:
        config, plan = fit(MACHINES[machine], f"schedule={name}", "model=qwen7b", "max_tokens=8192")
        assert plan.backend == "real", plan.why
        limit = config.training.tokens_per_micro_batch
        assert limit is not None and limit >= 8192 + 8


def test_one_gpu_runs_what_takes_turns_and_refuses_the_rest() -> None:
    one = MACHINES["1 x H200"]
    config, plan = fit(one, "schedule=colocate_sync", "model=qwen7b", "max_tokens=2048", "backend=real")
    assert plan.backend == "real" and config.training.optimizer_offload == "always"
    for name in SCHEDULES:
        schedule = find("schedule", name)
        if schedule.colocated:
            continue
        with pytest.raises(ConfigError, match="this machine has 1 GPU; schedule=colocate_sync|needs 2 rollout engines"):
            fit(one, f"schedule={name}", "model=qwen3-4b", "backend=real")


def test_more_devices_than_there_are_is_refused_or_simulated_with_the_reason() -> None:
    job = ("model=qwen7b", "cluster.devices=16", "algorithm.micro_batch_groups=1", "cost=tiny_cpu")
    with pytest.raises(ConfigError, match="the job needs 16 devices, this machine has 8 GPUs; set cluster.devices=8"):
        fit(MACHINES["8 x H100"], *job, "backend=real")
    _, plan = fit(MACHINES["8 x H100"], *job)
    assert plan.backend == "virtual" and plan.why.startswith("the job needs 16 devices, this machine has 8 GPUs")


def test_what_the_user_says_stays() -> None:
    settings = ("model=qwen3-4b", "cluster.devices=4", "engine.slots=32", "max_tokens=8192")
    config, plan = fit(MACHINES["8 x H100"], *settings)
    assert config.cluster.devices == 4 and config.engine.slots == 32 and plan.placement.total == 4
    values = (4, 2, 1, 9000, "true", "always", 16, "padded", 1 << 20, 1 << 20)
    asked = [f"{name}={value}" for name, value in zip(FITTED, values, strict=True)]
    given = compose_job(["model=qwen7b", "model.checkpoint=null", *asked])
    assert fit_to_gpus(given, make_schedule(given), names_of(asked), MACHINES["8 x H100"]).config == given


def test_what_changes_last_bits_follows_from_device_and_model_alone() -> None:
    for name in SCHEDULES:
        config, _ = fit(MACHINES["8 x H100"], f"schedule={name}", "model=qwen7b")
        assert (config.training.layout, config.training.logit_bytes) == ("packed", 512 << 20)
    assert fit(MACHINES["1 x H200"], "model=qwen0.5b", "schedule=colocate_sync")[0].training.logit_bytes == 1 << 30
    config, _ = fit(Machine(128, 8, 24564 * MIB), "model=tiny", "model.dtype=float32")
    assert (config.training.layout, config.training.logit_bytes) == ("padded", 128 << 20)


def test_buckets_of_weights_are_as_large_as_is_any_use_and_as_the_devices_hold() -> None:
    def bucket(machine: Machine, *settings: str) -> int:
        return fit(machine, "schedule=one_step_off", *settings)[0].cluster.bucket_bytes

    assert bucket(MACHINES["8 x H100"], "model=qwen7b") == 512 << 20, "several for each of four senders"
    assert bucket(MACHINES["8 x H100"], "model=qwen0.5b") == 64 << 20, "the model is small"
    assert bucket(MACHINES["8 x H100"], "model=qwen7b", "cluster.bucket_bytes=1000") == 1000
    values = (8, 4, 1, 9000, "true", "none", 16, "padded", 1 << 27)
    rest = [f"{name}={value}" for name, value in zip(FITTED[:-1], values, strict=True)]
    given = ["schedule=one_step_off", "model=qwen3-8b", "model.checkpoint=null", "model.vocabulary=1000", *rest]
    asked = compose_job(given)
    schedule = make_schedule(asked)
    placement = resolve_split(asked.schedule.split, asked.cluster.devices, device_roles(asked))

    def chosen(machine: Machine) -> JobConfig:
        return fit_to_gpus(asked, schedule, names_of(given), machine).config

    roomy = chosen(MACHINES["8 x H20"])
    setting = real_setting(roomy, schedule, MACHINES["8 x H20"], lengths_of(roomy), gpu=True)
    needed = plan_memory(roomy, placement, setting).fullest.peak
    assert roomy.cluster.bucket_bytes == 512 << 20
    assert chosen(Machine(128, 8, int(needed / USABLE) + 1)) == roomy
    assert chosen(Machine(128, 8, int(needed / USABLE) - 1)).cluster.bucket_bytes == 256 << 20


@pytest.mark.parametrize(
    "settings", [(), ("model=qwen7b",), ("backend=virtual", "model=qwen7b"), ("cluster.kind=cpu",)]
)
def test_without_gpus_for_it_a_job_stays_as_it_is(settings: Sequence[str]) -> None:
    config = compose_job(["model.checkpoint=null", *settings])
    machine = Machine(2, 0, 0) if len(settings) < 2 and "cluster.kind=cpu" not in settings else MACHINES["8 x H100"]
    assert fit_to_gpus(config, make_schedule(config), names_of(settings), machine).config == config


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ("algorithm.mini_batches=4", 4),
        ("algorithm.mini_batches=4 schedule=colocate_sync cluster.devices=2", 2),
        ("algorithm.batch_groups=12 backend=virtual", 6),
        ("algorithm.correction=m2po", 16),
        ("algorithm.correction=m2po algorithm.mini_batches=8", 2),
    ],
)
def test_micro_batches_are_made_to_divide_a_mini_batch_where_nobody_chose_them(settings: str, groups: int) -> None:
    given = settings.split()
    asked, machine = compose_job([*given, "cluster.oversubscribe=true"]), Machine(2, 0, 0)
    job = fit_to_gpus(asked, make_schedule(asked), names_of(given), machine)
    assert job.messages == (f"Chosen for equal micro-batches: algorithm.micro_batch_groups={groups}",)
    assert job.config.algorithm.micro_batch_groups == groups
    plan_job(job.config, make_schedule(job.config), machine)


def test_micro_batches_and_splits_that_divide_nothing_are_changed_where_nobody_chose_them() -> None:
    for settings in (["algorithm.mini_batches=4", "algorithm.micro_batch_groups=8"], ["algorithm.mini_batches=3"]):
        asked = compose_job(settings)
        assert fit_to_gpus(asked, make_schedule(asked), names_of(settings), Machine(2, 0, 0)).config == asked
    # Six: three ranks do not divide 16 groups; two and four do.
    config, plan = fit(Machine(64, 6, 81559 * MIB), "model=qwen0.5b")
    assert plan.backend == "real" and len(plan.placement.devices["actor"]) in (2, 4)
    assert set(plan.placement.devices) == set(device_roles(config))


def test_memory_of_a_host_is_not_shared_across_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedules.fully_async.FullyAsync.transport", "ipc")
    with pytest.raises(ConfigError, match="transport=ipc shares memory inside of one host, and 16 devices stand in 2"):
        fit(MACHINES["2 x 8 H100"], "model=qwen7b", "backend=real")
    assert fit(MACHINES["8 x H100"], "model=qwen7b")[1].backend == "real"
