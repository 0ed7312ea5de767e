"""The SGLang adapter against a server that speaks the protocol and computes nothing, in both dialects."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engines.loading import write_model
from engines.requests import RunningSample
from engines.sglang import client
from engines.sglang import server as local_server
from engines.sglang.launcher import murmur_hash32
from engines.sglang.options import TOKEN as TOKEN_VARIABLE
from engines.sglang.options import URL, Options
from engines.sglang.requests import Reply, body_of, sampling_seed
from engines.sglang.rollout import SGLangRollout
from engines.sglang.weights import PartialWeightUpdate
from engines.torch.model import build_model, outline_model
from harness.config import ModelConfig
from harness.protocols import Completion, Request, Sampling, StopMode
from harness.runtime.runtime import RealClock
from tests.support.sglang_server import TOKEN, WAIT_S, SGLangServer, serving, token_at

MODEL = ModelConfig("tiny", 32, 1, 2, 1, 16, 64, 32, True, 64)
SEED, SLOTS = 3, 4
PROMPT = np.array([5, 6, 7])


def test_a_server_listens_on_a_port_bound_before_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(local_server, "_KERNELS_PORTS", kernels)
    kernels.write_text("1024\t65535\n")  # it may give every one
    with local_server.bound_socket() as bound:
        assert bound.getsockname()[1] >= 1024
    kernels.write_text("21100\t60999\n")
    with local_server.bound_socket() as bound:
        port = bound.getsockname()[1]
        assert port in range(20_000, 20_100)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        serve = (
            "import os, socket, sys; from engines.sglang.launcher import listen_on; import uvicorn\n"
            "async def app(scope, receive, send):\n"
            "    await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n"
            "    await send({'type': 'http.response.body', 'body': str(os.getpid()).encode()})\n"
            "listen_on(socket.socket(fileno=int(sys.argv[1])))\n"
            f"uvicorn.Server(uvicorn.Config(app, port={port}, lifespan='off')).run()"
        )
        command = [sys.executable, "-c", serve, str(bound.fileno())]
        process = subprocess.Popen(command, pass_fds=(bound.fileno(),), stderr=subprocess.DEVNULL)
    try:
        with httpx2.Client(timeout=WAIT_S, trust_env=False) as http:
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    assert int(http.get(f"http://127.0.0.1:{port}").text) == process.pid
                    break
                except httpx2.ConnectError:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


def weights(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor.detach()) for name, tensor in build_model(MODEL, seed=seed).named_parameters())


def make_engine(*, name: str = "0", top_p: float = 1.0, **options: Any) -> SGLangRollout:
    engine = SGLangRollout(
        build_model(MODEL),
        sampling=Sampling(max_tokens=10, top_p=top_p),
        slots=SLOTS,
        seed=SEED,
        clock=RealClock.starting_now(),
        name=name,
        options=Options(timeout_s=WAIT_S, **options),
    )
    return engine


@pytest.fixture(params=[True, False], ids=["new dialect", "old dialect"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLangServer]:
    server = SGLangServer(brackets=request.param, vocabulary=MODEL.vocabulary)
    with serving(server) as url:
        monkeypatch.setenv(URL, f"{url}/")
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        yield server


@pytest.fixture
async def engine(server: SGLangServer) -> AsyncIterator[SGLangRollout]:
    engine = make_engine()
    yield engine
    await engine.close()


def requests(number: int) -> list[Request]:
    return [Request(sample_id, PROMPT) for sample_id in range(number)]


async def drain(engine: SGLangRollout, number: int) -> dict[int, Completion]:
    done: list[Completion] = []
    while len(done) < number:
        done += await engine.finished()
    return {completion.sample_id: completion for completion in done}


def expected(sample_id: int) -> list[int]:
    """What the sample draws if nobody interrupts it."""
    seed = sampling_seed(SEED, sample_id)
    return [token_at(seed, len(PROMPT) + n, MODEL.vocabulary) for n in range(10)]


async def until_in_flight(server: SGLangServer, tokens: int) -> None:
    await server.until(lambda: len(server.running) == SLOTS and all(len(g.tokens) == tokens for g in server.running))


# --- samples -------------------------------------------------------------------------------------------------------


async def test_samples_are_what_the_server_said(engine: SGLangRollout) -> None:
    engine.submit(requests(9))
    assert (engine.running, engine.waiting) == (SLOTS, 5)
    for sample_id, completion in (await drain(engine, 9)).items():
        assert completion.tokens.tolist() == expected(sample_id)
        assert completion.log_probs.tolist() == [-float(token) for token in completion.tokens]
        assert (completion.versions.tolist(), completion.finish_reason) == ([0] * 10, "length")


async def test_a_server_of_somebody_else_gets_the_weights_first(engine: SGLangRollout, server: SGLangServer) -> None:
    engine.submit(requests(SLOTS))
    await drain(engine, SLOTS)
    assert server.paths().count("/update_weights_from_distributed") == 2, "a bucket, and its version"
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights(0))


async def test_samples_that_start_at_once_share_requests_not_seeds(engine: SGLangRollout, server: SGLangServer) -> None:
    engine.submit(requests(SLOTS))
    await drain(engine, SLOTS)
    ((_, body),) = [call for call in server.calls if call[0] == "/generate"]
    seeds = [parameters["sampling_seed"] for parameters in body["sampling_params"]]
    assert sorted(seeds) == sorted(sampling_seed(SEED, n) for n in range(SLOTS)) and len(set(seeds)) == SLOTS
    assert all(0 <= seed < 1 << 63 for seed in seeds)


async def test_a_connection_that_rested_is_used_no_more(server: SGLangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may be ending it just then, and a request on it would be lost."""
    monkeypatch.setattr(client, "_IDLE_S", 0.0)
    engine = make_engine()
    for request in requests(3):
        engine.submit([request])
        await drain(engine, 1)
    assert len(set(server.connections)) == len(server.connections) > 3
    await engine.close()


async def test_a_server_that_does_not_know_log_probs_under_top_p_is_found_out(server: SGLangServer) -> None:
    engine = make_engine(top_p=0.9)
    engine.submit(requests(1))
    with pytest.raises(RuntimeError, match=r"engine 0.*top_p=0.9.*algorithm.top_p=1"):
        await engine.finished()
    await engine.close()


async def test_a_sample_whose_last_message_is_refused_is_under_way_no_more(server: SGLangServer) -> None:
    engine = make_engine(top_p=0.9)
    engine.submit([Request(0, PROMPT, sampling=Sampling(max_tokens=1, top_p=0.9))])
    with pytest.raises(RuntimeError, match="algorithm.top_p=1"):
        await engine.finished()
    assert engine._running and not any(sample in engine._requests for sample in engine._running)
    await engine.close()


# --- weights -------------------------------------------------------------------------------------------------------


async def test_only_servers_that_bracket_updates_are_told_of_them(engine: SGLangRollout, server: SGLangServer) -> None:
    server.calls.clear()
    await engine.load_weights(1, weights(1))
    inner = ["/update_weights_from_distributed"] * 2
    assert server.paths()[1:] == (["/begin_weight_update", *inner, "/end_weight_update"] if server.brackets else inner)
    assert (engine.version, server.version) == (1, "1")
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights(1))


@pytest.mark.parametrize("drop_cache", [True, False])
async def test_running_samples_live_through_an_update_and_each_token_knows_its_version(
    engine: SGLangRollout, server: SGLangServer, drop_cache: bool
) -> None:
    server.stop_at = 4
    engine.submit(requests(SLOTS))
    await until_in_flight(server, 4)
    server.calls.clear()
    await engine.pause("keep")
    await engine.load_weights(1, weights(1))
    if drop_cache:
        engine.drop_cache()
    assert engine.running == SLOTS
    server.change(stop_at=None)
    await engine.resume()
    for sample_id, completion in (await drain(engine, SLOTS)).items():
        assert completion.tokens.tolist() == expected(sample_id)
        assert completion.versions.tolist() == [0] * 4 + [1] * 6
    assert ("/flush_cache" in server.paths()) == drop_cache
    if server.brackets:
        modes = [body["mode"] for path, body in server.calls if path == "/pause_generation"]
        assert modes == (["in_place", "retract"] if drop_cache else ["in_place"])
        assert "/abort_request" not in server.paths()
    else:
        (again,) = [body for path, body in server.calls if path == "/generate"]
        assert [len(tokens) for tokens in again["input_ids"]] == [len(PROMPT) + 4] * SLOTS
        assert [parameters["max_new_tokens"] for parameters in again["sampling_params"]] == [6] * SLOTS


async def test_a_failed_transfer_tears_weights_and_whole_ones_heal(engine: SGLangRollout, server: SGLangServer) -> None:
    server.refuse = {"/init_weights_update_group"}
    with pytest.raises(PartialWeightUpdate, match="engine 0.*because the test says so"):
        await engine.load_weights(1, weights(1))
    assert engine.version == 0
    engine.submit(requests(2))
    with pytest.raises(RuntimeError, match="engine 0: version 1 was put in place in part only"):
        await engine.finished()
    server.refuse = set()
    await engine.pause("keep")
    await engine.load_weights(2, weights(2))
    await engine.resume()
    assert {v for completion in (await drain(engine, 2)).values() for v in completion.versions} == {2}


async def test_weights_that_do_not_arrive_whole_are_not_even_begun(engine: SGLangRollout, server: SGLangServer) -> None:
    def broken_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1))[:2]
        raise ConnectionError("the trainer is gone")

    engine.submit(requests(1))
    await drain(engine, 1)
    server.calls.clear()
    with pytest.raises(ConnectionError, match="the trainer is gone"):
        await engine.load_weights(1, broken_off())
    with pytest.raises(ValueError, match="engine 0.*model.norm.weight is missing"):
        await engine.load_weights(1, list(weights(1))[:-1])
    assert server.calls == []
    engine.submit(requests(1))
    assert (await drain(engine, 1))[0].versions.tolist() == [0] * 10


async def test_each_bucket_is_in_place_before_all_have_come_and_a_mixture_never_generates(server: SGLangServer) -> None:
    engine = make_engine(weight_bucket_bytes=1)

    def broken_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1))[:4]
        raise ConnectionError("the trainer is gone")

    try:
        engine.submit(requests(1))
        await drain(engine, 1)
        server.calls.clear()
        with pytest.raises(ConnectionError, match="the trainer is gone"):
            await engine.load_weights(1, broken_off())
        sent = [body["names"] for path, body in server.calls if path == "/update_weights_from_distributed"]
        assert sent == [[name] for name, _ in list(weights(1))[:3]]  # the fourth waits for a fifth
        engine.submit(requests(2))
        with pytest.raises(RuntimeError, match="engine 0: version 1 was put in place in part only"):
            await engine.finished()
        await engine.pause("keep")
        await engine.load_weights(2, weights(2))
        await engine.resume()
        assert {v for completion in (await drain(engine, 2)).values() for v in completion.versions} == {2}
        assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights(2))
    finally:
        await engine.close()


async def test_who_asks_for_samples_while_weights_are_on_their_way_waits_for_them(server: SGLangServer) -> None:
    engine, rest_may_come = make_engine(weight_bucket_bytes=1), threading.Event()

    def held_back() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1))[:4]
        assert rest_may_come.wait(WAIT_S)
        yield from list(weights(1))[4:]

    try:
        server.stop_at = 4
        engine.submit(requests(SLOTS))
        await until_in_flight(server, 4)
        await engine.pause("keep")
        server.calls.clear()
        loading = asyncio.create_task(engine.load_weights(1, held_back()))
        await server.until(lambda: server.paths().count("/update_weights_from_distributed") == 2)
        asking = asyncio.create_task(drain(engine, SLOTS))
        await asyncio.sleep(0)
        assert not asking.done()
        rest_may_come.set()
        await loading
        server.change(stop_at=None)
        await engine.resume()
        assert {len(completion.tokens) for completion in (await asking).values()} == {10}
    finally:
        rest_may_come.set()
        await engine.close()


# --- pauses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["running", "kept"])
async def test_aborted_samples_go_on_from_all_tokens(engine: SGLangRollout, server: SGLangServer, before: str) -> None:
    server.stop_at = 4
    engine.submit(requests(SLOTS + 2))
    await until_in_flight(server, 4)
    if before == "kept":
        await engine.pause("keep")
    await engine.pause("abort")
    assert (engine.running, engine.waiting) == (0, 0)
    partials = await drain(engine, SLOTS + 2)
    assert [len(partials[n].tokens) for n in range(SLOTS + 2)] == [4] * SLOTS + [0] * 2
    server.change(stop_at=None)
    engine.submit([replace(request, partial=partials[request.sample_id]) for request in requests(SLOTS + 2)])
    await engine.resume()
    for sample_id, completion in (await drain(engine, SLOTS + 2)).items():
        assert completion.tokens.tolist() == expected(sample_id)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_paused_engine_posts_no_request(engine: SGLangRollout, server: SGLangServer, mode: StopMode) -> None:
    await engine.pause(mode)
    engine.submit(requests(2))
    assert (engine.running, engine.waiting) == (0, 2)
    await engine.resume()
    await drain(engine, 2)


async def test_a_sleeping_server_takes_back_the_memory_of_weights_before_weights_and_the_rest_when_it_wakes(
    engine: SGLangRollout, server: SGLangServer
) -> None:
    await engine.sleep()
    await engine.load_weights(1, weights(1))
    with pytest.raises(RuntimeError, match="engine 0 is asleep"):
        await engine.resume()
    await engine.wake()
    told = [(path, body["tags"]) for path, body in server.calls if "memory_occupation" in path]
    assert told == [
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
    ]


# --- servers that fail ---------------------------------------------------------------------------------------------


async def test_a_server_that_breaks_off_is_named(engine: SGLangRollout, server: SGLangServer) -> None:
    server.stop_at = 4
    engine.submit(requests(SLOTS))
    await until_in_flight(server, 4)
    server.change(cut=True)
    with pytest.raises(RuntimeError, match="engine 0.*/generate broke off"):
        await engine.finished()
    with pytest.raises(RuntimeError, match="engine 0 cannot go on"):
        await engine.resume()


async def test_a_sample_that_the_server_gives_up_is_an_error(engine: SGLangRollout, server: SGLangServer) -> None:
    server.give_up = True
    engine.submit(requests(1))
    with pytest.raises(RuntimeError, match="engine 0.*gave up sample 0.*out of memory"):
        await engine.finished()


async def test_a_wrong_token_is_refused_at_the_start(server: SGLangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "open")
    with pytest.raises(PermissionError, match="engine 0.*refuses the token"):
        make_engine()


async def test_every_engine_needs_a_server_of_its_own(server: SGLangServer) -> None:
    with pytest.raises(ValueError, match="1 servers, none for engine 1"):
        make_engine(name="1")


PLAIN = Sampling(max_tokens=8)


def message(tokens: list[int], of: int, **meta: Any) -> dict[str, Any]:
    rows = [[-float(token), token, None] for token in tokens]
    return {
        "output_ids": tokens,
        "meta_info": {"completion_tokens": of, "output_token_logprobs": rows, "finish_reason": None, **meta},
    }


@pytest.mark.parametrize("repeats", [True, False], ids=["whole", "what is new"])
def test_a_reply_is_the_same_whether_messages_repeat_what_came_before_or_not(repeats: bool) -> None:
    reply = Reply(PLAIN, "engine 0")
    tokens = [4, 4, 7, 1, 4]
    for start, end in ((0, 1), (1, 4), (4, 4), (4, 5)):
        reply.add(message(tokens[0 if repeats else start : end], end))
    assert (reply.tokens, reply.log_probs) == (tokens, [-float(token) for token in tokens])


def test_of_a_message_that_waited_while_the_server_went_on_only_its_count_is_read() -> None:
    reply = Reply(PLAIN, "engine 0")
    for end in (1, 3):
        reply.add(message([4, 5, 6], end))
        assert (reply.tokens, reply.log_probs) == ([4, 5, 6][:end], [-4.0, -5.0, -6.0][:end])


def test_an_abort_that_repeats_the_last_token_adds_none() -> None:
    reply = Reply(PLAIN, "engine 0")
    reply.add(message([4, 5], 2))
    reply.add(message([5], 2, finish_reason={"type": "abort"}))
    assert reply.tokens == [4, 5] and reply.finish == {"type": "abort"}


def test_versions_are_the_servers_where_it_tells_them_and_ours_where_not() -> None:
    reply = Reply(PLAIN, "engine 0")
    reply.add(message([4, 5, 6], 3))
    assert reply.versions(7) == [7, 7, 7]
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    reply.add(message([4, 5, 6], 3, weight_versions=spans))
    assert reply.versions(7) == [7, 7, 8]


def test_messages_that_lack_tokens_or_have_log_probs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="engine 0.*counts 3 tokens.*sent 2"):
        Reply(PLAIN, "engine 0").add(message([4, 5], 3))
    with pytest.raises(FloatingPointError, match="engine 0"):
        broken = message([4], 1)
        broken["meta_info"]["output_token_logprobs"][0][0] = float("nan")
        Reply(PLAIN, "engine 0").add(broken)


def test_the_only_choice_has_log_probability_zero() -> None:
    reply = Reply(Sampling(max_tokens=8, temperature=0), "engine 0")
    reply.add(message([4, 5], 2))
    assert reply.log_probs == [0.0, 0.0]


def test_log_probs_under_top_p_are_those_of_the_nucleus() -> None:
    sampling = Sampling(max_tokens=8, top_p=0.9)
    body = body_of(RunningSample(sampling, 0, 1, [3]), seed=0, vocabulary=32)
    assert body["return_sampling_mask"] and body["sampling_params"]["top_k"] == 32
    reply = Reply(sampling, "engine 0")
    reply.add(message([4, 5], 2, output_token_sampling_logprobs=[-0.5, -0.25]))
    assert reply.log_probs == [-0.5, -0.25]


def test_stop_tokens_are_told_and_nothing_else_stops_a_sample() -> None:
    def told(sampling: Sampling) -> dict[str, Any]:
        sample = RunningSample(sampling, 0, 2, [3, 4, 9], log_probs=[-1.0], versions=[0])
        return body_of(sample, seed=0, vocabulary=32)["sampling_params"]

    stopping = told(Sampling(max_tokens=8, stop_tokens=(7,)))
    assert (stopping["stop_token_ids"], stopping["ignore_eos"], stopping["max_new_tokens"]) == ([7], False, 7)
    endless = told(PLAIN)
    assert (endless["stop_token_ids"], endless["ignore_eos"]) == ([], True)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_written_whole_and_without_an_end_of_its_own(tmp_path: Path, tied: bool) -> None:
    model = build_model(ModelConfig("small", 32, 1, 2, 1, 16, 64, 32, tied, 64))
    model.config.eos_token_id = 5
    write_model(model, tmp_path)
    assert model.config.eos_token_id == 5
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.get("eos_token_id") is None and config["architectures"] == ["Qwen3ForCausalLM"]
    written = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in written.items()} == {
        name: parameter.shape for name, parameter in model.named_parameters()
    }
    assert not (tmp_path / "generation_config.json").exists()


@pytest.mark.parametrize("files", [1, 3])
def test_files_of_a_model_that_is_only_outlined_are_linked_not_copied(tmp_path: Path, files: int) -> None:
    config = ModelConfig("small", 32, 2, 2, 1, 16, 64, 32, False, 64)
    there, folder = tmp_path / "checkpoint", tmp_path / "engine"
    build_model(config).save_pretrained(there, max_shard_size="30KB" if files > 1 else "1GB")
    assert len(list(there.glob("*.safetensors"))) == files
    folder.mkdir()
    outline = outline_model(replace(config, checkpoint=str(there), max_length=48))
    assert outline.in_files
    write_model(outline.model, folder)
    assert sum(file.lstat().st_size for file in folder.iterdir() if not file.is_symlink()) < 4096, "its config.json"
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 48
    read, own = build_model(replace(config, checkpoint=str(folder), max_length=48)), build_model(config)
    assert all(torch.equal(one, other) for one, other in zip(read.parameters(), own.parameters(), strict=True))


def test_the_hash_behind_draws_is_murmur3() -> None:
    assert murmur3(b"\0\0\0\0") == 0x2362F9DE and murmur3(b"test") == 0xBA6BD213, "as they are known"
    seeds, positions, columns = [0, 1, (1 << 63) - 1, 0xDEADBEEF12345678 - (1 << 64)], [0, 3, 70000, 12], [0, 1, 151935]
    hashed = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for place, column in enumerate(columns):
            block = (
                (seed % (1 << 64)).to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            )
            assert hashed[row, place] == murmur3(block)


def murmur3(data: bytes) -> int:
    """Of a multiple of four bytes, with seed 0; byte by byte as its author describes it."""
    mask, value = 0xFFFFFFFF, 0
    for start in range(0, len(data), 4):
        k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) * 0x1B873593 & mask
        value ^= k
        value = ((value << 13 | value >> 19) & mask) * 5 + 0xE6546B64 & mask
    value ^= len(data)
    value = (value ^ value >> 16) * 0x85EBCA6B & mask
    value = (value ^ value >> 13) * 0xC2B2AE35 & mask
    return value ^ value >> 16
