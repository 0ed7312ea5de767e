"""Options of engines: what a job may set, how it is refused, and what becomes of it."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.requests import Served
from engines.sglang import options as sglang
from engines.sglang.server import _flags
from engines.torch.model import build_model
from engines.vllm import options as vllm
from engines.vllm.process import _arguments, _weight_bytes
from harness.checks.job import plan_job
from harness.checks.plugins import check_environment, engine_options
from harness.config import ConfigError, ModelConfig
from harness.config.compose import EXPERIMENTS, compose_job, make_schedule, plain, read_settings
from harness.config.job import COMMON_TO_ENGINES
from harness.config.machine import NO_MACHINE
from harness.config.registries import ENGINES
from harness.cost_model.memory import EngineMemory
from harness.cost_model.memory_plan import EngineShare
from harness.cost_model.shape import served_bytes

SLEEP = {"--enable-memory-saver", "--enable-weights-cpu-backup"}
SHARE = EngineShare(weights=10_000, cache=40_000, work=5_000, token=100, device=100_000, gpu=True)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODEL = ModelConfig("small", 32, 1, 2, 2, 16, 32, vocabulary=32, tied_embeddings=True, max_length=64)


def options(*settings: str) -> Any:
    return engine_options(compose_job(settings))


@pytest.mark.parametrize("name", ENGINES)
def test_the_file_of_an_engine_lists_its_options_with_their_defaults(name: str) -> None:
    listed = read_settings(EXPERIMENTS / "engine" / f"{name}.yaml")
    own = {option: value for option, value in listed.items() if option not in COMMON_TO_ENGINES}
    assert own == ({} if (made := options(f"engine={name}")) is None else dataclasses.asdict(made))


def test_options_are_given_beside_the_name_and_written_there_too() -> None:
    config = compose_job(["engine=vllm", "engine.max_num_batched_tokens=4096", "engine.slots=8"])
    assert engine_options(config) == vllm.Options(max_num_batched_tokens=4096)
    assert plain(config)["engine"]["max_num_batched_tokens"] == 4096
    assert options("engine=torch") is None


@pytest.mark.parametrize(
    ("setting", "refusal"),
    [
        ("engine.gpu_memory_share=1.5", "engine.gpu_memory_share=1.5 is too large; use at most 1"),
        ("engine.enforce_eager=maybe", "engine.enforce_eager=maybe is neither true nor false; use one of them"),
        ("engine.block_size=0", "engine.block_size=0 is too small; use at least 1"),
        ("+engine.graphs=true", "engine.graphs is no option of vllm; it has dtype, quantization, "),
        ("engine.graphs=true", "engine.graphs is no setting; those of engine are attention_backend, block_size, "),
        ("engine.dtype=int8", "engine.dtype=int8 is unknown; choose 'float32', 'bfloat16' or 'float16'"),
    ],
)
def test_an_unknown_option_or_a_wrong_value_is_one_line(setting: str, refusal: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options("engine=vllm", setting)
    assert str(caught.value).startswith(refusal) and "\n" not in str(caught.value)


def test_an_engine_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^engine\.name=vllm: it needs vllm, .*`make setup-vllm` installs it"):
        check_environment(compose_job(["engine=vllm"]))
    monkeypatch.delenv(sglang.URL, raising=False)
    monkeypatch.setenv(sglang.PYTHON, str(tmp_path / "python"))
    config = compose_job(["engine=sglang", "backend=real"])
    with pytest.raises(ConfigError, match=r"^engine\.name=sglang: .*/python is not there: run `make setup-sglang`"):
        plan_job(config, make_schedule(config), NO_MACHINE)
    monkeypatch.setenv(sglang.URL, "http://127.0.0.1:1")
    check_environment(compose_job(["engine=sglang"]))
    check_environment(compose_job(["engine=torch"]))


def test_options_of_vllm_become_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 80 << 30))
    model = build_model(MODEL)
    on_cpu, on_gpu = (
        _arguments(Served(model, 4, device), vllm.Options(kv_cache_bytes=1 << 14)) for device in (CPU, GPU)
    )
    assert (on_cpu["enforce_eager"], on_cpu["enable_chunked_prefill"], on_cpu["enable_sleep_mode"]) == (
        True,
        False,
        False,
    )
    assert (on_gpu["enforce_eager"], on_gpu["enable_chunked_prefill"], on_gpu["enable_sleep_mode"]) == (
        False,
        True,
        True,
    )
    assert (on_cpu["dtype"], on_cpu["block_size"], on_cpu["kv_cache_memory_bytes"]) == ("float32", 32, 1 << 14)
    assert "max_num_batched_tokens" not in on_cpu, "left to vLLM"
    chosen = vllm.Options(dtype="bfloat16", max_num_batched_tokens=64, enforce_eager=True, block_size=64)
    narrow = _arguments(Served(model, 4, CPU), chosen)
    assert (narrow["dtype"], narrow["max_num_batched_tokens"], narrow["block_size"]) == ("bfloat16", 64, 64)
    # Keys and values of five samples at full length: a head of 16 takes the place of 32, a number 2 bytes.
    assert narrow["kv_cache_memory_bytes"] == 5 * 64 * 2 * 2 * 32 * 2


def test_weights_of_8_bits_are_vllms_and_counted_or_refused() -> None:
    config = replace(MODEL, dtype="bfloat16", vocabulary=64)
    model, fp8 = build_model(config), vllm.Options(quantization="fp8")
    assert _arguments(Served(model, 4, CPU), fp8)["quantization"] == "fp8_per_channel"
    assert "quantization" not in _arguments(Served(model, 4, CPU), vllm.Options())
    matrices = 32 * (2 * 2 * 16 + 2 * 2 * 16 + 3 * 32)
    held, whole = _weight_bytes(model, fp8), _weight_bytes(model, vllm.Options())
    assert whole - held == matrices == served_bytes(config, False) - served_bytes(config, True)
    jobs = [compose_job(["model=qwen7b", "engine=vllm", f"engine.quantization={way}"]) for way in ("fp8", "null")]
    narrow, wide = (EngineMemory(job.model, job.engine, 1024).weights for job in jobs)
    assert 0.5 < narrow / wide < 0.6, "embeddings and the output layer keep 16 bits"
    with pytest.raises(ConfigError, match="engine.quantization=fp8: SGLang quantises the weights that it starts with"):
        sglang.within(sglang.Options(quantization="fp8"), SHARE)
    with pytest.raises(ConfigError, match=r"engine.quantization=fp8 is made of weights of 16 bits"):
        job = compose_job(["engine=vllm", "engine.quantization=fp8", "backend=virtual"])
        plan_job(job, make_schedule(job), NO_MACHINE)


def test_vllm_asks_for_what_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(MODEL)
    planned = vllm.within(vllm.Options(), SHARE)
    asked = _arguments(Served(model, 1 << 20, GPU), planned)
    assert (asked["kv_cache_memory_bytes"], asked["gpu_memory_utilization"]) == (40_000, 0.55)
    assert _arguments(Served(model, 4, CPU), planned)["kv_cache_memory_bytes"] == 40_000
    assert _arguments(Served(model, 4, CPU), vllm.Options())["kv_cache_memory_bytes"] == 5 * 64 * 2 * 2 * 32 * 4
    assert _arguments(Served(model, 4, CPU, 2), vllm.Options())["kv_cache_memory_bytes"] == 5 * 64 * 2 * 1 * 32 * 4, (
        "of each"
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 40))
    alone = _arguments(Served(model, 4, GPU), vllm.Options())
    weights, buckets = sum(parameter.nbytes for parameter in model.parameters()), 4 * vllm.Options().weight_bucket_bytes
    assert alone["gpu_memory_utilization"] * (1 << 40) == pytest.approx(
        alone["kv_cache_memory_bytes"] + weights + buckets
    )


def test_what_the_user_gives_of_an_engines_memory_stays() -> None:
    given = vllm.within(vllm.Options(gpu_memory_share=0.25), SHARE)
    assert (given.gpu_memory_share, given.kv_cache_bytes) == (0.25, 10_000), "a quarter, less weights and a step"
    assert vllm.within(vllm.Options(kv_cache_bytes=7), SHARE).kv_cache_bytes == 7
    given = sglang.within(sglang.Options(mem_fraction_static=0.25), SHARE)
    assert (given.mem_fraction_static, given.max_total_tokens) == (0.25, 150)
    assert sglang.within(sglang.Options(max_total_tokens=7), SHARE).max_total_tokens == 7
    planned = sglang.within(sglang.Options(), SHARE)
    assert (planned.mem_fraction_static, planned.max_total_tokens) == (0.5, 400)
    assert sglang.within(sglang.Options(), replace(SHARE, gpu=False)).mem_fraction_static is None, "of a GPU"
    for refused, of in (
        (vllm.Options(gpu_memory_share=0.15), vllm.within),
        (sglang.Options(mem_fraction_static=0.1), sglang.within),
    ):
        with pytest.raises(ConfigError, match=r"leaves no room for a KV cache; use more than 0.1"):
            of(refused, SHARE)  # type: ignore[operator]


def test_options_of_sglang_become_flags_of_its_server() -> None:
    def flags(device: torch.device, **chosen: Any) -> set[str]:
        told = _flags(Served(build_model(MODEL), 4, device), Path("model"), 1, sglang.Options(**chosen))
        return set(map(str, told))

    graphs = {"--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"}
    on_cpu = {"--attention-backend=torch_native", "--sampling-backend=pytorch", "--max-total-tokens=288"} | graphs
    seeded = "--enable-deterministic-inference"
    assert flags(CPU) - flags(GPU) == on_cpu | {"--device=cpu", "--disable-overlap-schedule", seeded}
    assert seeded not in flags(CPU, deterministic=False)
    assert flags(GPU) - flags(CPU) == {"--device=cuda"} | SLEEP
    plain = flags(GPU, memory_saver=False, cuda_graph=False, overlap_schedule=False)
    assert flags(GPU, deterministic=True) - plain == {"--enable-deterministic-inference"} | SLEEP
    assert plain - flags(GPU) == graphs | {"--disable-overlap-schedule"}
    assert "--attention-backend=triton" in flags(CPU, attention_backend="triton")
    assert {"--mem-fraction-static=0.5", "--chunked-prefill-size=8"} <= flags(
        GPU, mem_fraction_static=0.5, chunked_prefill_size=8
    )
    assert "--max-total-tokens=100" in flags(CPU, max_total_tokens=100) & flags(GPU, max_total_tokens=100)
    assert "--max-total-tokens=288" in flags(GPU, max_total_tokens=1000), "every slot at full length"
