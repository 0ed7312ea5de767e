"""Profiles: what is timed, how a device's costs follow from it, and one that is recorded here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.calibration.fitting import write_costs
from harness.calibration.profile import rows as timing
from harness.calibration.profile.__main__ import main as profile_here
from harness.calibration.profile.fitting import fit_profile, implied_shares, known_device
from harness.calibration.profile.record import Grid, grid_for, inference_depths, record, training_depths
from harness.calibration.profile.timing import Stopwatch
from harness.calibration.profile.transfers import parts_of, time_transfers
from harness.cli import main as cli
from harness.config import BytesCost, ConfigError, CostConfig, ModelConfig, RooflineConfig, TrainingConfig, TransferCost
from harness.config.compose import choices, compose_job
from harness.cost_model import shape
from harness.cost_model.cost import transfer_times
from harness.cost_model.memory import JobLayout
from harness.cost_model.roofline import roofline

JOB = compose_job(["model=qwen3-0.6b", "cost=roofline", "device=h100"])
MODEL = JOB.model
BASE = compose_job(["cost=tiny_cpu"]).cost
assert isinstance(JOB.cost, RooflineConfig) and isinstance(BASE, CostConfig)
TRUTH = replace(
    roofline(MODEL, JOB.device, JOB.cost, JobLayout()), decode_step_s=0.004, decode_weights_s=0.003,
    decode_step_s_per_sample=5e-5, log_prob_call_s=0.002, train_call_s=0.005, offload_s=0.3, reload_s=0.2,
    train_step_s=0.05,
)  # fmt: skip
FITTED = ("decode_step_s", "decode_weights_s", "decode_step_s_per_sample", "decode_s_per_cached_token")
FITTED += tuple(f"{work}_s_per_{unit}" for work in ("prefill", "log_prob", "train") for unit in ("token", "pair"))
FITTED += ("log_prob_call_s", "train_call_s", "train_step_s", "host_bytes_per_s", "sync_s", "offload_s", "reload_s")


def decode_s(cost: CostConfig, samples: int, length: int) -> float:
    products = max(cost.decode_weights_s, samples * cost.decode_step_s_per_sample)
    return cost.decode_step_s + products + samples * length * cost.decode_s_per_cached_token


def pass_s(per_token: float, per_pair: float, fixed: float, samples: int, length: int) -> float:
    return fixed + samples * length * per_token + samples * length**2 * per_pair


def profile_of(cost: CostConfig, noise: float = 0.0) -> timing.DeviceProfile:
    """What a device with these costs would show."""
    random, grid = np.random.default_rng(0), grid_for(MODEL, "cuda")
    rows: list[timing.TimingRow] = []

    def add(phase: timing.Phase, seconds: float, samples: int = 0, length: int = 0, size: float = 0.0) -> None:
        taken = seconds * float(np.exp(noise * random.standard_normal()))
        rows.append(timing.TimingRow(phase, MODEL.layers if not size else 0, samples, length, round(size), taken, 0.01))

    for sizes in grid.decode:
        add("decode", decode_s(cost, *sizes), *sizes)
    for sizes in grid.prefill:
        add("prefill", pass_s(cost.prefill_s_per_token, cost.prefill_s_per_pair, 0.003, *sizes), *sizes)
    for sizes in grid.log_prob:
        seconds = pass_s(cost.log_prob_s_per_token, cost.log_prob_s_per_pair, cost.log_prob_call_s, *sizes)
        add("log_prob", seconds, *sizes)
    for sizes in grid.train:
        add("train", pass_s(cost.train_s_per_token, cost.train_s_per_pair, cost.train_call_s, *sizes), *sizes)
    add("optimizer", cost.train_step_s)
    for size in grid.copies:
        add("copy_to_host", 1e-5 + size / cost.host_bytes_per_s, size=size)
        add("copy_to_device", 1e-5 + size / cost.host_bytes_per_s / 1.5, size=size)
    for phase, fixed in (("load", cost.sync_s), ("sleep", cost.offload_s), ("wake", cost.reload_s)):
        add(phase, fixed + cost.weight_bytes / cost.host_bytes_per_s, size=cost.weight_bytes)  # type: ignore[arg-type]
    return timing.DeviceProfile(MODEL, "NVIDIA H100 80GB HBM3", "cuda", 80 << 30, 1, {"torch": "2"}, tuple(rows))


def test_costs_are_found_again_from_exact_times_with_and_without_a_floor() -> None:
    found = fit_profile(profile_of(TRUTH), BASE, "mine")
    for name in FITTED:
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUTH, name), rel=1e-4), name
    assert found.cost.weight_bytes == shape.weight_bytes(MODEL)
    for name in found.unseen:
        assert getattr(found.cost, name) == getattr(BASE, name), name
    assert all(phase.error is None or phase.error < 1e-4 for phase in found.phases)
    found = fit_profile(profile_of(replace(TRUTH, decode_weights_s=0.0)), BASE, "mine").cost
    assert found.decode_weights_s == 0.0
    assert found.decode_step_s == pytest.approx(TRUTH.decode_step_s, rel=1e-4)


def test_noise_of_five_per_cent_moves_times_by_less_than_fifteen() -> None:
    found = fit_profile(profile_of(TRUTH, noise=0.05), BASE, "mine").cost
    for samples, length in ((1, 100), (64, 1000), (256, 200), (512, 100)):
        assert decode_s(found, samples, length) == pytest.approx(decode_s(TRUTH, samples, length), rel=0.15)
    for work in ("log_prob", "train"):
        times = [
            pass_s(*(getattr(cost, f"{work}_{of}") for of in ("s_per_token", "s_per_pair", "call_s")), 4, 4000)
            for cost in (found, TRUTH)
        ]
        assert times[0] == pytest.approx(times[1], rel=0.15)


def test_a_model_that_does_not_fit_is_timed_by_fewer_layers_or_refused() -> None:
    rows = [timing.TimingRow("train", layers, 4, 128, layers * 10, 0.5 + 0.1 * layers, 0.0) for layers in (2, 4)]
    rows.append(timing.TimingRow("copy_to_host", 0, 0, 0, 64, 1.0, 0.0))
    copies, full = timing.deep(rows, replace(MODEL, layers=30))
    assert (full.layers, full.bytes, copies) == (30, 300, rows[-1])
    assert full.seconds == pytest.approx(3.5)
    seven = compose_job(["model=qwen7b"]).model
    assert inference_depths(seven, 80 << 30) == (28,)
    assert training_depths(seven, 80 << 30) == (2, 4)
    with pytest.raises(ConfigError, match="model=qwen7b does not fit: training needs .* GiB for 4 of its layers"):
        training_depths(seven, 16 << 30)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("model", ["tiny", "qwen3-0.6b", "qwen32b"])
def test_every_phase_has_sizes_that_the_model_takes(model: str, kind: str) -> None:
    config = compose_job([f"model={model}"]).model
    grid = grid_for(config, kind)
    for sizes in (grid.decode, grid.prefill, grid.log_prob, grid.train):
        assert len({n for n, _ in sizes}) > 1 and len({length for _, length in sizes}) > 1
        assert max(length for _, length in sizes) < config.max_length


def test_implied_shares_are_those_that_a_roofline_was_made_with() -> None:
    factors = replace(JOB.cost, forward_share=0.31, train_share=0.27, decode_share=0.11, memory_share=0.71)
    shares = implied_shares(roofline(MODEL, JOB.device, factors, JobLayout()), MODEL, JOB.device)
    for name in ("forward_share", "train_share", "decode_share", "host_share"):
        assert shares[name] == pytest.approx(getattr(factors, name)), name
    for of in ("weights", "optimizer"):
        assert shares[f"memory_share ({of})"] == pytest.approx(0.71), of


# -- transfers

TIMED = (
    TransferCost("collective", 1, BytesCost(0.002, 2e9), BytesCost(0.003, 2e9)),
    TransferCost("host_staged", 1, BytesCost(0.001, 4e9), BytesCost(0.0005, 8e9), BytesCost(0.01, 1e9)),
    TransferCost("host_staged", 2, BytesCost(0.001, 6e9), BytesCost(0.0005, 8e9), BytesCost(0.01, 1.5e9)),
)


def transfer_rows() -> tuple[timing.TransferRow, ...]:
    def lasts(part: BytesCost | None, size: float) -> float:
        return part.fixed_s + size / part.bytes_per_s if part else 0.0

    return tuple(
        timing.TransferRow(
            of.transport, of.ranks, size, *(lasts(part, size) for part in (of.send, of.stage, of.load)), 0.01
        )
        for of in TIMED
        for size in (4_000_000, 20_000_000, 100_000_000)
    )


def test_transfers_are_priced_as_they_were_timed_and_others_by_the_speeds(tmp_path: Path) -> None:
    found = fit_profile(replace(profile_of(TRUTH), transfers=transfer_rows()), BASE, "mine")
    for fitted, true in zip(found.cost.transfers, TIMED, strict=True):
        assert (fitted.transport, fitted.ranks, fitted.stage is None) == (
            true.transport,
            true.ranks,
            true.stage is None,
        )
        for of in ("send", "load", "stage"):
            if part := getattr(true, of):
                assert getattr(fitted, of).fixed_s == pytest.approx(part.fixed_s, rel=1e-4), of
                assert getattr(fitted, of).bytes_per_s == pytest.approx(part.bytes_per_s, rel=1e-4), of
    assert found.cost.network_bytes_per_s == pytest.approx(2e9) and "network_bytes_per_s" not in found.unseen
    cost = compose_job([f"cost={write_costs(tmp_path, found, [])}"]).cost
    assert isinstance(cost, CostConfig) and cost.transfers == found.cost.transfers
    size = cost.weight_bytes
    for ranks, stage_speed, send_speed in ((1, 1e9, 4e9), (2, 1.5e9, 6e9), (8, 1.5e9, 6e9)):
        times = transfer_times(cost, "host_staged", ranks, ranks)
        assert times.stage_s == pytest.approx(0.01 + size / stage_speed)
        assert times.send_s == pytest.approx(0.001 + size / send_speed)
        assert times.load_s == pytest.approx(0.0005 + size / 8e9 + cost.sync_s, rel=1e-3)
    assert transfer_times(cost, "ipc") == transfer_times(replace(cost, transfers=()), "ipc")


def test_a_speed_is_found_of_what_grows_with_bytes_and_of_what_does_not() -> None:
    rows = tuple(timing.TransferRow("ipc", 1, size, 0.01, 0.0, 0.01, 0.0) for size in (1_000, 2_000, 4_000))
    (found,) = fit_profile(replace(profile_of(TRUTH), transfers=rows), BASE, "mine").cost.transfers
    assert found.send == BytesCost(0.0, 400_000.0)
    few, more, most = parts_of(MODEL, 1 << 28)
    sizes = [sum(2 * int(np.prod(shape)) for shape in part.values()) for part in (few, more, most)]
    assert sizes[0] < sizes[1] < sizes[2] <= 1 << 28 and few.items() < more.items() < most.items()
    (whole,) = {frozenset(part) for part in parts_of(TINY, 1 << 28)[-1:]}
    assert len(whole) == 4 * 11 + 2
    known = choices("device")
    assert known_device("NVIDIA H100 80GB HBM3", known) == "h100"
    assert known_device("NVIDIA H200", known) == "h200"
    assert known_device("NVIDIA A100-SXM4-80GB", known) == "a100"
    assert known_device("AMD EPYC", known) is None


@pytest.mark.slow
def test_every_transport_is_timed_from_one_and_from_two_training_ranks() -> None:
    model = replace(TINY, dtype="bfloat16")
    rows = list(time_transfers(model, torch.device("cpu"), bucket_bytes=1 << 15))
    ways = {(row.transport, row.ranks) for row in rows}
    assert ways == {(transport, ranks) for transport in ("collective", "ipc", "host_staged") for ranks in (1, 2)}
    assert {row.bytes for row in rows if row.ranks == 2} == {row.bytes for row in rows if row.ranks == 1}
    assert max(row.bytes for row in rows) == shape.weight_bytes(model)
    assert all(row.send_s > 0 and row.load_s > 0 for row in rows)
    assert all((row.stage_s > 0) == (row.transport == "host_staged") for row in rows)


# -- a profile of this machine

TINY = ModelConfig("small", 32, 4, 4, 2, 8, 64, 32, True, 64)
GRID = Grid(
    decode=((1, 16), (8, 16), (8, 32)), prefill=((1, 16), (8, 32), (2, 32)), log_prob=((1, 16), (8, 32), (2, 32)),
    train=((1, 16), (8, 32), (2, 32)), copies=(1 << 20, 1 << 22),
)  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> timing.DeviceProfile:
    cpu = torch.device("cpu")
    watch = Stopwatch(cpu, repeats=3, warmup=1)
    return record(TINY, TrainingConfig(), device=cpu, watch=watch, grid=GRID, depths=((4,), (2, 3)), ranks=())


def test_everything_is_timed_and_the_profile_reads_back_the_same(profile: timing.DeviceProfile, tmp_path: Path) -> None:
    assert {row.phase for row in profile.rows} == set(timing.PHASES)
    assert all(row.seconds > 0 for row in profile.rows)
    assert (profile.depths("decode"), profile.depths("train"), profile.depths("optimizer")) == ([4], [2, 3], [2, 3])
    assert [row.layers for row in profile.of("train")] == [4, 4, 4]
    (load,) = profile.of("load")
    assert load.bytes == shape.weight_bytes(TINY)
    path = tmp_path / "profiles" / "tiny.json"
    profile = replace(profile, transfers=transfer_rows())
    timing.write_profile(path, profile)
    assert timing.read_profile(path) == profile
    path.write_text(f'{{"profile": {path.read_text()}}}')
    assert timing.read_gate(path) == profile


@pytest.mark.parametrize("read", [timing.read_profile, timing.read_gate])
def test_a_file_without_a_profile_is_refused_in_the_same_words_by_whoever_reads_one(
    read: Callable[[Path], timing.DeviceProfile], tmp_path: Path
) -> None:
    path = tmp_path / "it.json"
    with pytest.raises(ConfigError, match=r"it\.json is not there; `cadence .* writes one"):
        read(path)
    for text in ("", "[]", "{}", '{"profile": null}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"it\.json holds no profile: .*; `cadence .* writes one"):
            read(path)


def test_a_recorded_profile_becomes_costs_that_a_job_reads(
    profile: timing.DeviceProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    path = tmp_path / "there.json"
    timing.write_profile(path, profile)
    assert cli.main(["profile", f"profile={path}", "name=here"]) == 0
    said, costs = capsys.readouterr().out, tmp_path / "costs" / "here.yaml"
    assert "timed with 2 and 3 layers" in said and "are known, so no shares of its peaks" in said
    comments = [line for line in costs.read_text().splitlines() if line.startswith("#")]
    assert "small on" in comments[0] and any("Not seen, and as in cost=tiny_cpu" in line for line in comments)
    cost = compose_job([f"cost={costs}", "cost.call_s=0.5"]).cost
    assert (cost.name, cost.call_s, cost.kind) == ("here", 0.5, "given")
    assert cost.train_step_s > 0


def test_what_cannot_be_profiled_is_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="model=small has experts"):
        record(replace(TINY, experts=8, active_experts=2), TrainingConfig(), device=cpu)
    with pytest.raises(ConfigError, match="training.tensor_parallel=2 needs other devices"):
        record(TINY, TrainingConfig(tensor_parallel=2), device=cpu)


def test_a_file_of_a_model_that_unfolds_is_refused_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.yaml").write_text("name: &a x\nkind: *a\n")
    monkeypatch.setattr("sys.argv", ["profile", str(tmp_path / "model.yaml"), str(tmp_path / "profile.json")])
    with pytest.raises(SystemExit, match="2"):
        profile_here()
    assert "it refers to parts of itself" in capsys.readouterr().err and not (tmp_path / "profile.json").exists()
