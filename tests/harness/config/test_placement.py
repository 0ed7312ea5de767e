"""A split over devices: every role gets its share, or one line says why not."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.config.placement import DEVICE_ROLES, Placement, resolve_split

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
    assert told == (
        "schedule.split needs 6 devices (rollout 5 + actor 1), the job has 2; set cluster.devices=6 or make the "
        "split smaller"
    )
    resolve_split({"rollout": 5, "actor": "rest", **SHARED}, 6)
    assert refused({"rollout": "100%", "actor": "rest", **SHARED}, 4).endswith("the job has 4; make the split smaller")
    assert refused({"judge": 1, "rollout": 1, "actor": 1, **SHARED}, 4).startswith("schedule.split.judge: no such")
    assert refused({"rollout": 1, **SHARED}, 4).startswith("schedule.split.actor is missing")
    assert "only one role can take the rest" in refused({"rollout": "rest", "actor": "rest", **SHARED}, 4)


@pytest.mark.parametrize("share", [0, -1, "0%", "101%", "-5%", "%", "half", "1.5%", "", "³%"])
def test_what_is_no_share_is_refused_by_value(share: int | str) -> None:
    assert refused({"rollout": share, "actor": 1, **SHARED}, 4).startswith(
        f"schedule.split.rollout={share} is no share"
    )


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
