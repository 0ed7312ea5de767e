"""Which size buckets may have, through how many links weights leave, and the table of that on paper."""

import math
from dataclasses import replace

import pytest

from harness.config import RooflineConfig
from harness.config.compose import compose_job
from harness.cost_model.shape import weight_bytes
from harness.cost_model.transfer import LARGEST_BUCKET, LEAST_BUCKET, bucket_sizes, sender_links, staged_parts
from harness.studies.transfer_on_paper import PAGE, table

QWEN = compose_job(["model=qwen7b", "device=h100", "cost=roofline"])


def test_the_best_bucket_leaves_several_for_every_rank_that_sends() -> None:
    for ranks in (1, 4, 16):
        best, *smaller = bucket_sizes(QWEN, "collective", ranks)
        assert weight_bytes(QWEN.model) / best / ranks >= 4 and LEAST_BUCKET <= best <= LARGEST_BUCKET
        assert 2 * best > min(LARGEST_BUCKET, weight_bytes(QWEN.model) / ranks / 4)
        assert smaller == [best >> k for k in range(1, len(smaller) + 1)] and [best, *smaller][-1] == LEAST_BUCKET
    assert bucket_sizes(QWEN, "ipc", 16) == bucket_sizes(QWEN, "ipc", 1), "one rank sends"


def test_every_rank_that_sends_has_a_link_to_its_host_and_every_device_of_an_engine() -> None:
    assert sender_links(QWEN, "host_staged", 8, 1) == 8 and sender_links(QWEN, "host_staged", 8, 4) == 2
    assert sender_links(QWEN, "ipc", 8, 1) == 1
    large = replace(QWEN, cluster=replace(QWEN.cluster, bucket_bytes=int(weight_bytes(QWEN.model) / 2.5)))
    assert sender_links(large, "host_staged", 8, 1) == 3, "there are three buckets"


@pytest.mark.parametrize("engines", [1, 4, 16])
def test_what_many_send_is_shared_and_what_an_engine_takes_in_is_not(engines: int) -> None:
    assert isinstance(QWEN.cost, RooflineConfig)
    alone, every = (staged_parts(8e9, 16, engines, senders, QWEN.device, QWEN.cost) for senders in (1, 16))
    assert alone.waiting_s == pytest.approx(16 * every.waiting_s) and alone.send_s == pytest.approx(16 * every.send_s)
    assert alone.take_s == every.take_s == every.background_s == pytest.approx(8e9 / (0.8 * 50e9))
    assert alone.background_s == pytest.approx(alone.take_s * math.ceil(math.log2(engines + 1)))
    assert alone.copy_s == pytest.approx(8e9 / (0.8 * 64e9)) and alone.gather_s == pytest.approx(alone.take_s / 2)


def test_the_table_on_paper_is_that_of_the_cost_model() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
