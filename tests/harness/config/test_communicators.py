"""No communicator of any job that is accepted has two ranks on one device; what is refused names them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from harness.checks.job import plan_job
from harness.checks.layout import device_roles
from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import NO_MACHINE
from harness.config.placement import (
    Communicator,
    Placement,
    check_communicators,
    communicators,
    resolve_split,
    sending_ranks,
)
from harness.config.registries import SCHEDULES, find


def of(
    placement: Placement, transport: str = "collective", training: int = 1, engine: int = 1
) -> dict[str, Communicator]:
    found = communicators(
        placement, transport=transport, training_tensor_parallel=training, engine_tensor_parallel=engine
    )
    assert len({communicator.name for communicator in found}) == len(found)
    return {communicator.name: communicator for communicator in found}


def names(communicator: Communicator) -> list[str]:
    return [f"{member}@{member.device}" for member in communicator.members]


def test_the_first_rank_deals_to_all_what_is_trained_as_it_completes() -> None:
    placement = Placement({"rollout": (0,), "actor": (1, 2, 3, 4)})
    found = communicators(
        placement, transport="collective", training_tensor_parallel=2, engine_tensor_parallel=1, in_order=False
    )
    dealt = [communicator for communicator in found if communicator.name.startswith("micro-batches")]
    assert [(one.name, len(one.members), one.over) for one in dealt] == [("micro-batches", 4, "host")]


def test_weights_go_from_every_training_rank_that_has_a_bucket_or_the_first_alone() -> None:
    apart = Placement({"rollout": (0, 1), "actor": (2, 3), "actor_fwd": (4,), "reference": (5,)})
    found = of(apart)
    assert set(found) == {"training world", "weights of actor[0]", "weights of actor[1]"}
    assert names(found["training world"]) == ["actor[0]@2", "actor[1]@3"]
    assert names(found["weights of actor[0]"]) == ["actor[0]@2", "rollout[0]@0", "rollout[1]@1", "actor_fwd[0]@4"]
    assert names(found["weights of actor[1]"]) == ["actor[1]@3", "rollout[0]@0", "rollout[1]@1", "actor_fwd[0]@4"]
    assert found["weights of actor[1]"].over == "device"

    beside = Placement({"rollout": (0, 1), "actor": (2, 3), "actor_fwd": (2, 3), "reference": (2, 3)})
    assert names(of(beside)["weights of actor[1]"]) == ["actor[1]@3", "rollout[0]@0", "rollout[1]@1"]
    found = of(Placement({"rollout": (0,), "actor": (1, 2)}), "ipc")
    assert set(found) == {"training world", "weights of actor[0]"}
    assert sending_ranks("host_staged", 8) == sending_ranks("collective", 8, 20) == 8
    assert sending_ranks("host_staged", 8, 3) == 3 and sending_ranks("host_staged", 8, 0) == 1
    assert sending_ranks("ipc", 8, 20) == 1
    apart = Placement({"rollout": (0,), "actor": (1,)})
    assert {of(apart, transport)["weights of actor[0]"].over for transport in ("host_staged", "ipc")} == {"host"}
    shared = Placement({"rollout": (0, 1), "actor": (0, 1), "actor_fwd": (0, 1)})
    assert set(of(shared, "local")) == {"training world"}
    assert of(Placement({"rollout": (0,), "actor": (0,)}), "local") == {}, "one rank sends nothing"


def test_a_training_rank_that_shares_a_device_with_an_engine_is_found_whichever_rank_it_is() -> None:
    placement = Placement({"rollout": (0, 2), "actor": (1, 2)})
    with pytest.raises(ConfigError, match=r"actor\[1\] and rollout\[1\] on device 2.*'weights of actor\[1\]'"):
        check_communicators(of(placement).values(), placement, "collective")


def test_ranks_that_share_layers_and_engines_of_several_devices_have_communicators_of_their_own() -> None:
    found = of(Placement({"rollout": (0, 1, 2, 3), "actor": (4, 5, 6, 7)}), training=2, engine=2)
    assert {name: names(communicator) for name, communicator in found.items()} == {
        "training world": ["actor[0]@4", "actor[1]@5", "actor[2]@6", "actor[3]@7"],
        "data-parallel group 0": ["actor[0]@4", "actor[2]@6"],
        "data-parallel group 1": ["actor[1]@5", "actor[3]@7"],
        "tensor-parallel group 0": ["actor[0]@4", "actor[1]@5"],
        "tensor-parallel group 1": ["actor[2]@6", "actor[3]@7"],
        "micro-batches of group 0": ["actor[0]@4", "actor[1]@5"],
        "micro-batches of group 1": ["actor[2]@6", "actor[3]@7"],
        "engine 0": ["rollout[0]@0", "rollout[0]@1"],
        "engine 1": ["rollout[1]@2", "rollout[1]@3"],
        **{f"weights of actor[{k}]": [f"actor[{k}]@{4 + k}", "rollout[0]@0", "rollout[1]@2"] for k in range(4)},
    }
    assert {name for name, communicator in found.items() if communicator.over == "host"} == {
        "micro-batches of group 0",
        "micro-batches of group 1",
    }


SPLITS: list[Mapping[str, int | str]] = [
    {},
    {"actor_fwd": 1},
    {"reference": 1},
    {"actor_fwd": 1, "reference": "actor_fwd"},
    {"actor_fwd": 2, "reference": "actor_fwd", "rollout": 4},
    {"reference": "rollout"},
    {"actor_fwd": "rollout"},
    {"rollout": "actor"},
    {"rollout": "actor", "actor_fwd": 1},
]
ONLY_REAL: list[Mapping[str, int | str]] = [{"reference": "rollout"}]
"""What a simulation refuses for another reason."""


@cache
def base(schedule: str) -> JobConfig:
    big = ["model=qwen1.5b", "model.heads=16", "model.kv_heads=4", "cost=tiny_cpu", "algorithm.reference=true"]
    batch = ["algorithm.micro_batch_groups=1", "algorithm.batch_groups=240"]
    return compose_job([f"schedule={schedule}", "backend=virtual", *big, *batch])


def jobs(schedule: str, devices: int) -> Iterator[tuple[JobConfig, Mapping[str, int | str]]]:
    config = base(schedule)
    for split, training, engine in product(SPLITS, (1, 2, 4), (1, 2, 4)):
        made = {role: split.get(role, share) for role, share in config.schedule.split.items()}
        yield (
            replace(
                config,
                cluster=replace(config.cluster, devices=devices),
                schedule=replace(config.schedule, split=made),
                training=replace(config.training, tensor_parallel=training),
                engine=replace(config.engine, tensor_parallel=engine),
            ),
            split,
        )


def door(config: JobConfig) -> str:
    """What a job is refused with; empty where it is accepted."""
    try:
        plan_job(config, make_schedule(config), NO_MACHINE)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_job_that_is_accepted_has_one_rank_of_a_communicator_on_a_device(schedule: str, devices: int) -> None:
    """On one node of 16 devices, or on two of 8: devices are numbered through all nodes."""
    transport = find("schedule", schedule).transport
    accepted = 0
    for config, split in jobs(schedule, devices):
        training, engine = config.training.tensor_parallel, config.engine.tensor_parallel
        refusal = door(config)
        if "divide" in refusal or "needs" in refusal:
            continue  # the split, engines or ranks do not come out whole
        placement = resolve_split(config.schedule.split, devices, device_roles(config))
        found = of(placement, transport, training, engine)
        twice = [name for name, each in found.items() if len({m.device for m in each.members}) < len(each.members)]
        if twice:
            assert all(name.startswith("weights of actor[") for name in twice), twice
            assert f"are ranks of the communicator {twice[0]!r}" in refusal, (split, refusal)
            continue
        assert "communicator" not in refusal
        if refusal:
            assert split in ONLY_REAL or "stay on their device" in refusal, (split, refusal)
            continue
        accepted += 1
        for each in found.values():
            for per_node in (8, 16):
                assert len({divmod(m.device, per_node) for m in each.members}) == len(each.members) > 1
            assert all(m.device in placement.devices[m.role] for m in each.members)
            assert each.name.startswith("weights of") or len({m.role for m in each.members}) == 1
    assert accepted or devices <= find("schedule", schedule)(**{}).least_engines


def test_two_ranks_on_a_device_are_named_with_the_way_out() -> None:
    placement = Placement({"rollout": (0, 1), "actor": (2,), "actor_fwd": (0, 1)})
    with pytest.raises(ConfigError) as caught:
        check_communicators(of(placement).values(), placement, "collective")
    assert str(caught.value) == (
        "schedule.split puts rollout[0] and actor_fwd[0] on device 0, and both are ranks of the communicator "
        "'weights of actor[0]', which can have one on a device; set schedule.split.actor_fwd=actor, or give it a "
        "number of devices of its own"
    )
