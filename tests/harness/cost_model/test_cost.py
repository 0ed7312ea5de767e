"""Costs of transfers and of shares; response lengths: a draw per sample and seed, of the distribution asked for."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.layout import device_roles
from harness.config import CostConfig, LengthsConfig
from harness.config.compose import compose_job
from harness.config.job import DEALT_AGAIN
from harness.config.placement import resolve_split
from harness.config.transports import TransferTimes
from harness.cost_model.cost import offload_s, rank_shares, reload_s, sample_tokens, slowest_share_s, transfer_times
from harness.cost_model.job_cost import simulated_cost
from harness.cost_model.lengths import ResponseLengths, read_trace
from harness.cost_model.shape import parameters, weight_bytes
from harness.cost_model.transfer import LARGEST_BUCKET, LEAST_BUCKET, bucket_sizes, sender_links, staged_parts
from harness.studies.transfer_on_paper import PAGE, table
from harness.transfer_queue import QueueSpec, Ragged
from harness.transfer_queue.local import LocalQueue
from harness.workers.dataflow import PROMPT_COLUMNS, ROLLOUT_COLUMNS, JobShape, queue_spec

TINY = compose_job(["cost=tiny_cpu"])
COST = TINY.cost
assert isinstance(COST, CostConfig)


def test_the_tiny_costs_are_those_of_its_model() -> None:
    assert COST.weight_bytes == pytest.approx(4 * parameters(TINY.model), rel=0.05)


@pytest.mark.parametrize(
    ("transport", "times"),
    [
        ("collective", TransferTimes(11.0, 0.0, 11.0)),
        ("ipc", TransferTimes(3.0, 0.0, 3.0)),
        ("host_staged", TransferTimes(3.0, 10.0, 3.0)),
    ],
)
def test_a_transfer_costs_what_its_wire_carries_at_either_end(transport: str, times: TransferTimes) -> None:
    cost = replace(COST, weight_bytes=100.0, network_bytes_per_s=10.0, host_bytes_per_s=50.0, sync_s=1.0, offload_s=0.5)
    assert transfer_times(cost, transport) == times
    shared = transfer_times(cost, transport, sender_links=4)
    host_s = times.send_s if transport == "collective" else 1.5
    assert shared == replace(times, send_s=host_s), "only the copy to the host is shared by those that send"
    assert (offload_s(cost), reload_s(replace(cost, reload_s=0.25))) == (2.5, 2.25)


@pytest.mark.parametrize(("buckets", "seconds"), [(1, 4 + 10), (2, (4 + 10 + 10) / 2), (100, (4 + 10 + 99 * 10) / 100)])
def test_weights_are_converted_bucket_by_bucket_while_the_one_before_travels(buckets: int, seconds: float) -> None:
    cost = replace(COST, weight_bytes=100.0, network_bytes_per_s=10.0, sync_s=1.0)
    cost = replace(cost, convert_s=4.0, buckets=buckets, bucket_s=0.5)
    assert transfer_times(cost, "collective").send_s == pytest.approx(1.0 + seconds + 0.5 * buckets)


def test_what_changed_costs_its_bytes_on_the_way_and_all_bytes_to_compare() -> None:
    job = compose_job(["schedule=one_step_off", "cost=tiny_cpu", "cluster.delta_weights=true"])
    job = replace(job, cost=replace(COST, changed_share=0.25, delta_bytes_per_s=2e9))
    cost = simulated_cost(job, resolve_split(job.schedule.split, job.cluster.devices, device_roles(job)))
    seconds = cost.weight_bytes * ((1 / 4 + 1 / 32) / COST.network_bytes_per_s + 1 / 2e9)
    assert transfer_times(cost, "collective").send_s == pytest.approx(seconds + cost.sync_s)
    assert transfer_times(cost, "host_staged").stage_s == pytest.approx(seconds)
    assert transfer_times(cost, "host_staged").send_s == transfer_times(COST, "host_staged").send_s


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
async def test_simulated_ranks_share_a_micro_batch_as_the_queue_deals_it(ranks: int) -> None:
    random, group = np.random.default_rng(ranks), 3
    prompts = [random.integers(1, 50, 1) for _ in range(36)]
    responses = [random.integers(1, 50, random.integers(1, 4)) for _ in range(36)]
    shares = rank_shares(sample_tokens(Ragged.from_rows(prompts), Ragged.from_rows(responses)), ranks, group)
    task = queue_spec(JobShape(["reference"], ranks, 36, beside_actor=["reference"])).tasks["reference"]
    queue = LocalQueue(QueueSpec(PROMPT_COLUMNS | ROLLOUT_COLUMNS, {"train": task}))
    await queue.create_partition("a", range(36), group)
    columns = {"prompt": prompts, "response": responses}
    told = {name: Ragged.from_rows([np.zeros(n.sum(), np.int64) for n in rows]) for name, rows in columns.items()}
    await queue.put("a", range(36), told)
    batches = [await queue.get("train", 36 // ranks, rank=rank) for rank in range(ranks)]
    dealt = [batch.ragged("prompt").lengths + batch.ragged("response").lengths for batch in batches if batch]
    assert [share.tolist() for share in shares] == [share.tolist() for share in dealt]
    slowest = max((0.5 * share + 0.01 * share * share).sum() for share in dealt)
    assert slowest_share_s(shares, s_per_token=0.5, s_per_pair=0.01) == pytest.approx(slowest)


LOGNORMAL = LengthsConfig(kind="lognormal", mean=200.0, sigma=0.7, cap=5000)
MANY = np.arange(50_000)
KINDS = [
    LengthsConfig(kind="constant", mean=7.4, cap=100),
    LengthsConfig(kind="uniform", mean=5.5, cap=100),
    LOGNORMAL,
    LengthsConfig(kind="trace", values=(3, 50, 7000), cap=6000),
]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.integers(0, 2**63))
def test_a_length_depends_on_seed_and_sample_only(ids: list[int], seed: int) -> None:
    together = ResponseLengths(LOGNORMAL, seed).of(np.array(ids))
    alone = [int(ResponseLengths(LOGNORMAL, seed).of(np.array([sample_id]))[0]) for sample_id in ids]
    assert together.tolist() == alone
    assert together.dtype == np.int64


def test_a_length_is_its_seeds_and_samples_own() -> None:
    one, other = ResponseLengths(LOGNORMAL, 0).of(MANY), ResponseLengths(LOGNORMAL, 1).of(MANY)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.03
    # Of the logarithm's: and the samples together are distributed as without.
    config = replace(LOGNORMAL, common=0.4, cap=10**9)
    logs = np.log(ResponseLengths(config, 0, group_size=8).of(MANY)).reshape(-1, 8)
    alone = np.log(ResponseLengths(replace(config, common=0.0), 0).of(MANY))
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.4, abs=0.04)
    assert logs.mean() == pytest.approx(alone.mean(), abs=0.02)
    assert logs.std() == pytest.approx(alone.std(), rel=0.03)


@pytest.mark.parametrize("drift", [0.5, 1.5])
def test_lengths_drift_by_a_factor_from_batch_to_batch_up_to_the_cap(drift: float) -> None:
    config = replace(LOGNORMAL, drift=drift)
    drifting, still = (
        ResponseLengths(its, 0, 4, 8).batches(0, 2000, 8) for its in (config, replace(config, drift=1.0))
    )
    for batch in (0, 1, 5):
        assert np.abs(drifting[batch] - np.clip(still[batch] * drift**batch, 1, LOGNORMAL.cap)).max() <= 16
    assert set(drifting[-1].tolist()) == {1 if drift < 1 else LOGNORMAL.cap}
    again = np.arange(8, 16) + 4 * DEALT_AGAIN  # in the places of batch 1
    drifted, as_drawn = (ResponseLengths(its, 0, 4, 8).of(again) for its in (config, replace(config, drift=1.0)))
    assert np.abs(drifted - np.clip(as_drawn * drift, 1, LOGNORMAL.cap)).max() <= 1


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_every_kind_stays_between_one_token_and_the_cap(config: LengthsConfig) -> None:
    lengths = ResponseLengths(config, 3).of(MANY)
    assert lengths.min() >= 1 and lengths.max() <= config.cap
    short = ResponseLengths(replace(config, cap=2), 3).of(MANY)
    assert set(short.tolist()) <= {1, 2}


def test_lengths_have_the_distribution_that_was_asked_for() -> None:
    assert set(ResponseLengths(KINDS[0], 0).of(MANY).tolist()) == {7}
    values, counts = np.unique(ResponseLengths(KINDS[1], 0).of(MANY), return_counts=True)
    assert values.tolist() == list(range(1, 11))
    assert counts == pytest.approx(5000, rel=0.06)
    lengths = ResponseLengths(LOGNORMAL, 0).of(MANY)
    median = 200.0 * np.exp(-(0.7**2) / 2)
    assert lengths.mean() == pytest.approx(200.0, rel=0.02)
    assert np.median(lengths) == pytest.approx(median, rel=0.02)
    assert np.percentile(lengths, 99) == pytest.approx(median * np.exp(0.7 * 2.3263), rel=0.04)


def test_a_trace_is_drawn_from_value_by_value(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3\n50\n7000\n")
    from_values, from_path = (
        ResponseLengths(KINDS[3], 0),
        ResponseLengths(LengthsConfig(kind="trace", path=str(path), cap=6000), 0),
    )
    lengths = from_values.of(MANY)
    assert (from_path.of(MANY) == lengths).all()
    values, counts = np.unique(lengths, return_counts=True)
    assert values.tolist() == [3, 50, 6000]
    assert counts == pytest.approx(len(MANY) / 3, rel=0.05)


@pytest.mark.parametrize(
    ("text", "told"),
    [("12\nmany\n", "trace.txt:2: 'many' is no number"), ("0\n", "trace.txt:1: '0' is no"), ("", "holds no length")],
)
def test_a_trace_that_cannot_be_read_is_told_by_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_trace(path)


QWEN = compose_job(["model=qwen7b", "device=h100", "cost=roofline"])


def test_buckets_links_and_the_table_on_paper_fit_each_other() -> None:
    for ranks in (1, 4, 16):
        best, *smaller = bucket_sizes(QWEN, "collective", ranks)
        assert weight_bytes(QWEN.model) / best / ranks >= 4 and LEAST_BUCKET <= best <= LARGEST_BUCKET
        assert 2 * best > min(LARGEST_BUCKET, weight_bytes(QWEN.model) / ranks / 4)
        assert smaller == [best >> k for k in range(1, len(smaller) + 1)] and [best, *smaller][-1] == LEAST_BUCKET
    assert bucket_sizes(QWEN, "ipc", 16) == bucket_sizes(QWEN, "ipc", 1), "one rank sends"
    assert sender_links(QWEN, "host_staged", 8, 1) == 8 and sender_links(QWEN, "host_staged", 8, 4) == 2
    assert sender_links(QWEN, "ipc", 8, 1) == 1
    large = replace(QWEN, cluster=replace(QWEN.cluster, bucket_bytes=int(weight_bytes(QWEN.model) / 2.5)))
    assert sender_links(large, "host_staged", 8, 1) == 3, "there are three buckets"
    assert table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("engines", [1, 4, 16])
def test_what_many_send_is_shared_and_what_an_engine_takes_in_is_not(engines: int) -> None:
    alone, every = (staged_parts(8e9, 16, engines, senders, QWEN.device, QWEN.cost) for senders in (1, 16))
    assert alone.waiting_s == pytest.approx(16 * every.waiting_s) and alone.send_s == pytest.approx(16 * every.send_s)
    assert alone.take_s == every.take_s == every.background_s == pytest.approx(8e9 / (0.8 * 50e9))
    assert alone.background_s == pytest.approx(alone.take_s * math.ceil(math.log2(engines + 1)))
    assert alone.copy_s == pytest.approx(8e9 / (0.8 * 64e9)) and alone.gather_s == pytest.approx(alone.take_s / 2)
