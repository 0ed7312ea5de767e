"""Which devices of a job are placed on one node of a cluster together."""

from __future__ import annotations

from harness.config.placement import Placement
from harness.runtime.ray_cluster import bundles

APART = Placement({"rollout": (0, 1, 2, 3), "actor": (4, 5, 6, 7), "actor_fwd": (4, 5, 6, 7)})
TOGETHER = Placement({"rollout": (0, 1, 2), "actor": (0, 1, 2)})


def test_what_trains_is_on_one_node_where_it_can_be_and_an_engine_always() -> None:
    assert bundles(APART, [2, 4]) == [(0,), (1,), (2,), (3,), (4, 5, 6, 7)]
    assert bundles(APART, [8], per_engine=2) == [(0, 1), (2, 3), (4, 5, 6, 7)]
    assert bundles(TOGETHER, [2, 2]) == [(0, 1), (2,)], "engines that share devices with training are where it is"
    four = Placement(dict.fromkeys(("rollout", "actor"), (0, 1, 2, 3)))
    assert bundles(four, [3, 3], per_engine=2) == [(0, 1), (2, 3)], "on one node each, if they have several"


def test_a_world_that_no_node_holds_is_cut_where_neighbours_stay_together() -> None:
    assert bundles(APART, [3, 3, 2], together=2)[4:] == [(4, 5), (6, 7)]
    assert bundles(APART, [1, 1], together=2)[4:] == [(4, 5), (6, 7)], "more nodes may come"
