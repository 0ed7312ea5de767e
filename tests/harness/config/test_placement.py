"""A split over devices: every role gets its share, or one line says why not."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.job import plan_job
from harness.checks.layout import device_roles
from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import NO_MACHINE
from harness.config.placement import (
    DEVICE_ROLES,
    Communicator,
    Placement,
    check_communicators,
    communicators,
    resolve_split,
    sending_ranks,
)
from harness.config.registries import SCHEDULES, find

Named = dict[str, Communicator]
SHARED = {"actor_fwd": "actor", "reference": "actor"}
NO_CRITIC = ("rollout", "actor", "actor_fwd", "reference")


def refused(split: dict[str, int | str], devices: int, roles: tuple[str, ...] = DEVICE_ROLES) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_split(split, devices, roles)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_numbers_percentages_and_the_rest_stand_side_by_side_or_share() -> None:
    placed = resolve_split({"rollout": "50%", "actor": "rest", "actor_fwd": 1, "reference": "actor_fwd"}, 8, NO_CRITIC)
    assert placed == Placement({"rollout": (0, 1, 2, 3), "actor": (4, 5, 6), "actor_fwd": (7,), "reference": (7,)})
    assert placed.pools == {"rollout": (0, 1, 2, 3), "actor": (4, 5, 6), "actor_fwd+reference": (7,)}
    assert placed.total == 8 and placed.roles_on(7) == ["actor_fwd", "reference"]
    assert len(resolve_split({"rollout": 5, "actor": "rest", **SHARED}, 8).devices["rollout"]) == 5
    placed = resolve_split({"actor": "rest", "rollout": "actor", **SHARED}, 3, NO_CRITIC)
    assert set(placed.devices.values()) == {(0, 1, 2)} and list(placed.pools) == ["rollout+actor+actor_fwd+reference"]
    placed = resolve_split({"rollout": 1, "actor": 1, "actor_fwd": "actor", "reference": "actor_fwd"}, 2)
    assert placed.devices["reference"] == placed.devices["actor_fwd"] == placed.devices["actor"] == (1,)
    split: dict[str, int | str] = {"rollout": 1, "actor": 2, **SHARED}
    assert resolve_split(split, 4).devices["critic"] == (1, 2)
    assert resolve_split({**split, "critic": 1}, 4).devices["critic"] == (3,)
    assert "critic" not in resolve_split({**split, "critic": 1}, 3, NO_CRITIC).devices


def test_what_cannot_be_split_is_named_with_what_it_takes() -> None:
    assert "shares in a circle" in refused({"rollout": "actor", "actor": "rollout", **SHARED}, 2)
    assert "shares in a circle" in refused({"rollout": 1, "actor": "actor", **SHARED}, 2)
    placed = resolve_split({"rollout": 1, "actor": 1, "reference": 2}, 2, ("rollout", "actor"))
    assert placed.devices == {"rollout": (0,), "actor": (1,)}
    assert resolve_split({"rollout": "1%", "actor": "rest", **SHARED}, 2, NO_CRITIC).devices == {
        "rollout": (0,),
        "actor": (1,),
        "actor_fwd": (1,),
        "reference": (1,),
    }
    told = refused({"rollout": 5, "actor": "rest", **SHARED}, 2)
    assert told.startswith("schedule.split needs 6 devices (rollout 5 + actor 1), the job has 2; set cluster.devices=6")
    resolve_split({"rollout": 5, "actor": "rest", **SHARED}, 6)
    assert refused({"rollout": "100%", "actor": "rest", **SHARED}, 4).endswith("the job has 4; make the split smaller")
    assert refused({"judge": 1, "rollout": 1, "actor": 1, **SHARED}, 4).startswith("schedule.split.judge: no such")
    assert refused({"rollout": 1, **SHARED}, 4).startswith("schedule.split.actor is missing")
    assert "only one role can take the rest" in refused({"rollout": "rest", "actor": "rest", **SHARED}, 4)


@pytest.mark.parametrize("share", [0, -1, "0%", "101%", "-5%", "%", "half", "1.5%", "", "³%"])
def test_what_is_no_share_is_refused_by_value(share: int | str) -> None:
    split = {"rollout": share, "actor": 1, **SHARED}
    assert refused(split, 4).startswith(f"schedule.split.rollout={share} is no share")


shares = st.integers(1, 6) | st.integers(1, 100).map(lambda percent: f"{percent}%")


@given(
    st.permutations(DEVICE_ROLES),
    st.lists(shares, min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 24),
    st.randoms(use_true_random=False),
)
def test_a_split_is_laid_out_without_gap_or_overlap_or_refused(
    order: list[str], own: list[int | str], rest: bool, devices: int, random: Random
) -> None:
    owners = order[: len(own)]
    split: dict[str, int | str] = dict(zip(owners, own, strict=True))
    if rest:
        split[owners[0]] = "rest"
    for number, role in enumerate(order[len(own) :]):  # shares with any that came before it: chains, but no circles
        split[role] = random.choice(order[: len(own) + number])
    try:
        placed = resolve_split(split, devices)
    except ConfigError as error:
        assert f"the job has {devices}" in str(error)
        return
    pools = list(placed.pools.values())
    assert sorted(device for pool in pools for device in pool) == list(range(placed.total))
    assert 0 < placed.total <= devices
    assert set(placed.devices) == set(DEVICE_ROLES) and all(placed.devices.values())
    assert len(pools) == len(owners)
    for role, share in split.items():
        if share == "rest":
            assert placed.total == devices
        elif isinstance(share, int):
            assert len(placed.devices[role]) == share
        elif share in DEVICE_ROLES:
            assert placed.devices[role] == placed.devices[share]
        else:
            assert len(placed.devices[role]) == max(1, devices * int(share[:-1]) // 100)


def of(placement: Placement, transport: str = "collective", training: int = 1, engine: int = 1, **told: bool) -> Named:
    ranks = {"training_tensor_parallel": training, "engine_tensor_parallel": engine}
    found = communicators(placement, transport=transport, **ranks, **told)
    assert len({communicator.name for communicator in found}) == len(found)
    return {communicator.name: communicator for communicator in found}


def names(communicator: Communicator) -> list[str]:
    return [f"{member}@{member.device}" for member in communicator.members]


def test_the_first_rank_deals_to_all_what_is_trained_as_it_completes() -> None:
    placement = Placement({"rollout": (0,), "actor": (1, 2, 3, 4)})
    dealt = [one for name, one in of(placement, training=2, in_order=False).items() if name.startswith("micro-batches")]
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
    over_hosts = {name for name, communicator in found.items() if communicator.over == "host"}
    assert over_hosts == {"micro-batches of group 0", "micro-batches of group 1"}


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
