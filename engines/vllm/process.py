"""vLLM's own processes: started, asked with a time limit, watched, and stopped."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from transformers.utils.logging import disable_progress_bar

from engines.loading import write_model
from engines.requests import Served
from engines.torch.lora import base_of
from engines.torch.model import blocks_of, model_shape
from engines.vllm.options import BACKEND, Options
from harness.protocols import EngineDied
from harness.rpc.process_id import descendants, end_within, process_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector
    from vllm.v1.metrics.loggers import StatLoggerBase

Answer = TypeVar("Answer")

_STOP_S = 10.0


class VLLMProcess:
    """An `AsyncLLM` whose every answer is waited for with a limit, and whose death ends every wait at once.

    It belongs to the event loop of its first call. `llm` is vLLM's own interface; what it is asked goes through `ask`.
    """

    def __init__(self, served: Served, name: str, options: Options) -> None:
        """Blocks until the engine is up, which takes vLLM from seconds to minutes. It takes the model's weights as they
        are, from a folder that is there until it has answered something."""
        self._name, self._timeout_s = name, options.timeout_s
        self.sampled = 0
        """Tokens, as vLLM counts them after each of its steps."""
        memory, model = _memory(served, options), served.model
        weights = _weight_bytes(model, options) / served.tensor_parallel
        self.holds = {"weights": weights, "kv_cache": memory["kv_cache_memory_bytes"]}
        """Bytes on each of its devices, of what it gives back when it sleeps."""
        disable_progress_bar()
        self._folder = tempfile.TemporaryDirectory(prefix="cadence-vllm-model-")
        self._sockets = tempfile.TemporaryDirectory(prefix="cadence-vllm-")  # of its processes, which leave them
        os.environ["VLLM_RPC_BASE_PATH"] = self._sockets.name
        try:
            write_model(model, Path(self._folder.name))
            self.base = base_of(model, Path(self._folder.name))
            """The base of adapters, if there are any: then the folder stays."""
            arguments = _arguments(served, options)
            if served.routes:  # which it keeps beside the blocks of its cache; it refuses to where prefixes are not
                arguments = {"enable_prefix_caching": True} | arguments | {"enable_return_routed_experts": True}
            self.llm = _start(self._folder.name, arguments, options.log_level, self._count)
        except BaseException:
            self._folder.cleanup()
            self._sockets.cleanup()
            raise
        self._core: BaseProcess = self.llm.engine_core.resources.engine_manager.processes[0]
        assert self._core.pid is not None, "vLLM answers once its core has started"
        self._processes = [process_id(self._core.pid), *descendants(self._core.pid)]
        self._death: asyncio.Future[None] | None = None
        self._settling: asyncio.Task[None] | None = None

    @property
    def process_ids(self) -> list[int]:
        """Ids of vLLM's own processes."""
        return [process.number for process in self._processes]

    async def ask(self, what: str, answer: Awaitable[Answer], timeout_s: float | None = None) -> Answer:
        """Wait for `answer`, at most `timeout_s`, or the engine's own limit. `what` ends the sentence "did not ...".

        Raises EngineDied where the engine died, TimeoutError where it did not answer; both name the engine.
        """
        limit = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self.outlast(answer)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TimeoutError(f"engine {self._name} did not {what} within {limit} s") from error

    async def outlast(self, answer: Awaitable[Answer]) -> Answer:
        """Wait for `answer` as long as vLLM lives. Raises EngineDied, naming the engine, where it dies first."""
        from vllm.v1.engine.exceptions import EngineDeadError

        asked = asyncio.ensure_future(answer)
        either: set[asyncio.Future[Any]] = {asked, self._watched()}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        except EngineDeadError as error:
            raise self._died() from error
        finally:
            asked.cancel()
        raise self._died()

    def _count(self, tokens: int) -> None:
        self.sampled += tokens

    def require_alive(self) -> None:
        """Raises RuntimeError where a process of vLLM has died."""
        if self._watched().done():
            raise self._died()

    def _died(self) -> EngineDied:
        return EngineDied(f"engine {self._name} died: vLLM's process {self._core.pid} is gone")

    async def generate(
        self, number: str, context: Sequence[int], version: int, parameters: SamplingParams
    ) -> RequestOutputCollector:
        """Hand a sample over to vLLM; returns when vLLM has it. Its collector gets one output, the last one.

        Samples of one `version` share the cache of their common prefixes.
        """
        from vllm.inputs import tokens_input

        # A raw prompt would go through a thread of vLLM's, where there is nothing to do for tokens.
        prompt = tokens_input(list(context), cache_salt=str(version))
        return await self.ask("take a sample", self.llm.add_request(number, prompt, parameters))

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Pause generation and keep the cache: whether old keys are worth anything is the adapter's to say."""
        # Not `pause_generation`: it does this, and then sleeps for 20 ms so that outputs should come before it returns.
        await self.ask(f"pause ({mode})", self.llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False))

    async def abort(self, numbers: Sequence[str]) -> None:
        """End these samples; the collector of each gets what it has."""
        await self.ask("abort samples", self.llm.abort(numbers))

    async def resume(self) -> None:
        """Let vLLM generate again."""
        await self.ask("resume", self.llm.resume_generation())

    async def forget_cache(self) -> None:
        """Drop all keys and values; running samples compute theirs again."""
        await self.ask("reset its prefix cache", self.llm.reset_prefix_cache(reset_running_requests=True))

    async def tell_worker(self, method: str, **arguments: Any) -> None:
        """Call a method of vLLM's worker, past its scheduler."""
        await self.ask(f"{method.replace('_', ' ')}", self.llm.collective_rpc(method, kwargs=arguments))

    async def ask_workers(self, method: str, **arguments: Any) -> list[Any]:
        """The answers of all of vLLM's workers, which set limits to their waits themselves."""
        return cast(list[Any], await self.outlast(self.llm.collective_rpc(method, kwargs=arguments)))

    async def close(self) -> None:
        """End vLLM; returns when none of its processes is left."""
        if self._death is not None:
            self._death.get_loop().remove_reader(self._core.sentinel)
        if self._settling is not None:
            self._settling.cancel()
        self._folder.cleanup()
        await asyncio.to_thread(self.llm.shutdown, _STOP_S)
        talk = self.llm.engine_core.resources
        for socket in (talk.input_socket, talk.output_socket):
            socket.close(linger=0)
        talk.ctx.term()  # vLLM leaves it to the garbage collector, which complains
        await asyncio.to_thread(end_within, _STOP_S, self._processes)
        self._sockets.cleanup()
        del self.llm  # or it would be shut down again when the interpreter has gone

    def _watched(self) -> asyncio.Future[None]:
        """Done when vLLM's process is."""
        if self._death is None:
            loop = asyncio.get_running_loop()
            self._death = loop.create_future()
            loop.add_reader(self._core.sentinel, self._gone)
            self._settling = loop.create_task(self._settle())
        return self._death

    async def _settle(self) -> None:
        """Remove the model's folder, if adapters do not need it: vLLM's core reads it once more when it has said that
        it is up, and answers after that (`EngineCoreProc._perform_handshakes` in vllm/v1/engine/core.py)."""
        from vllm.v1.engine.exceptions import EngineDeadError

        with suppress(EngineDeadError):
            await self.llm.is_sleeping()
        if self.base is None:
            self._folder.cleanup()

    def _gone(self) -> None:
        assert self._death is not None
        self._death.get_loop().remove_reader(self._core.sentinel)
        if not self._death.done():
            self._death.set_result(None)


def _start(folder: str, arguments: dict[str, Any], log_level: str, count: Callable[[int], None]) -> AsyncLLM:
    """Start vLLM. Its settings stand in the environment before it is imported, and reach its processes by it. count: is
    called with the tokens of each step."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads: a fork would inherit their locks
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # cores are assigned by the parent process
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    for name, value in (("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("VLLM_LOGGING_LEVEL", log_level)):
        os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **arguments), stat_loggers=[_counter(count)])


def _counter(count: Callable[[int], None]) -> Callable[..., StatLoggerBase]:
    """Makes what vLLM calls with the statistics of each step, of which it reads one number: they are no stable
    interface."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):
        def __init__(self, *_: Any) -> None:
            """Count the tokens of one engine core."""

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if iteration_stats is not None:
                count(iteration_stats.num_generation_tokens)

        def log_engine_initialized(self) -> None:
            """Do nothing."""

    return Counter


def _arguments(served: Served, options: Options) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`. Log-probs are of the distribution that was drawn from: after temperature and
    top_p. Several workers are processes of this machine, whatever cluster this one belongs to."""
    gpu, several = served.device.type == "cuda", served.tensor_parallel
    workers = {"tensor_parallel_size": several, "distributed_executor_backend": "mp"} if several > 1 else {}
    optional = ("max_num_batched_tokens", "enable_prefix_caching", "attention_backend")
    chosen = {name: value for name in optional if (value := getattr(options, name)) is not None}
    if options.quantization is not None:
        # A scale for each row of a matrix and for each token; a reload layer by layer makes them anew.
        chosen["quantization"] = "fp8_per_channel"
    return (
        chosen
        | _memory(served, options)
        | workers
        | {
            "dtype": str(_dtype(served.model, options)).removeprefix("torch."),
            "max_model_len": served.longest,
            "max_num_seqs": served.slots,
            "block_size": options.block_size,
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "enforce_eager": not gpu if options.enforce_eager is None else options.enforce_eager,
            "enable_sleep_mode": gpu,
            # A seeded sample whose prompt comes in chunks turns its generator back, which generators of a CPU cannot.
            "enable_chunked_prefill": gpu if options.enable_chunked_prefill is None else options.enable_chunked_prefill,
            "worker_extension_cls": "engines.vllm.worker.extension.Extension",
            "weight_transfer_config": {"backend": BACKEND},
        }
    )


def _memory(served: Served, options: Options) -> dict[str, Any]:
    """Arguments that give room for all slots at full length, so that no sample is ever preempted, where options allow
    as much.

    With the bytes of the cache given, vLLM neither measures what is free nor heeds gpu_memory_utilization for it; but
    at its start it refuses a GPU of which less is free than that (vllm/v1/worker/utils.py, request_memory). A job's
    options say both (`engines.vllm.options.within`); without a job it is what will be taken, with
    weights on their way.
    """
    model, shape = served.model, model_shape(served.model)
    head = -(-shape["head_dim"] // 32) * 32  # the CPU's kernels widen small heads
    dtype = _dtype(model, options)
    heads = -(-shape["kv_heads"] // served.tensor_parallel)  # of each device
    token = 2 * shape["layers"] * heads * head * dtype.itemsize
    wanted = (served.slots + 1) * -(-shape["max_length"] // options.block_size) * options.block_size * token
    cache = min(wanted, options.kv_cache_bytes or wanted)
    if served.device.type != "cuda":
        return {"kv_cache_memory_bytes": cache}
    share = options.gpu_memory_share
    if share is None:
        sizes = _sizes(model, options)
        weights = _weight_bytes(model, options) + 4 * max(options.weight_bucket_bytes, *sizes)
        share = min(1.0, (cache + weights) / torch.cuda.mem_get_info(served.device)[1])
    return {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": share}


def _dtype(model: PreTrainedModel, options: Options) -> torch.dtype:
    return model.dtype if options.dtype is None else getattr(torch, options.dtype)


def _sizes(model: PreTrainedModel, options: Options) -> list[int]:
    """Bytes of each parameter as it arrives in vLLM."""
    return [parameter.numel() * _dtype(model, options).itemsize for parameter in model.parameters()]


def _weight_bytes(model: PreTrainedModel, options: Options) -> int:
    """Bytes of all parameters as vLLM holds them."""
    bytes_ = sum(_sizes(model, options))
    if options.quantization is None:
        return bytes_
    matrices = sum(weight.numel() for block in blocks_of(model) for weight in block.parameters() if weight.ndim == 2)
    return bytes_ - matrices * (_dtype(model, options).itemsize - 1)
