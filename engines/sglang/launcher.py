"""Runs an SGLang server in SGLang's own environment, and ends it with the process that started it.

A script for that environment's interpreter: `python -P launcher.py SERVER_FLAGS`; -P, because beside this file lies one
of the name of the package. Of this repository a server's schedulers load `receiving.py` when they are given weights.
The server lives as long as another process holds the other end of its standard input. SGLang spawns processes that
import this file again: so what is prepared here is prepared in all of them.

SGLang's CPU kernels come in a package, sgl_kernel, of which there is no wheel. Plain decoding needs one of them: the
hash that turns a sample's seed into draws. It is defined here.
"""

import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

_IMPORTED = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
"""Functions that SGLang imports by name and plain decoding never calls."""

_LIBRARIES: list[torch.library.Library] = []
"""Operators live as long as the library that defined them."""


def prepare_for_cpu() -> None:
    """Make what SGLang imports, and let it take seeds; before SGLang is imported."""
    _define_torchvision()
    _define_kernels()
    _allow_seeds()


def _define_torchvision() -> None:
    """Define torchvision's operators: its wheel is built for CUDA, and imports on a CPU where they are there before."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def _define_kernels() -> None:
    module = types.ModuleType("sgl_kernel")
    module.__spec__ = ModuleSpec("sgl_kernel", None)
    for name in _IMPORTED:
        setattr(module, name, _missing(name))
    sys.modules["sgl_kernel"] = module
    library = torch.library.Library("sgl_kernel", "DEF")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _LIBRARIES.append(library)


def _missing(name: str) -> Callable[..., None]:
    def kernel(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for CPUs")

    return kernel


def _allow_seeds() -> None:
    """Let the server heed seeds of requests, which it does under --enable-deterministic-inference only. That is refused
    with the attention that a CPU has, and would replace matrix products by CUDA kernels."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of the 16 bytes seed, position, column, as SGLang's CUDA kernel computes it.

    Args:
        seed: 64-bit integers, [rows].
        positions: integers, [rows].
        columns: integers, [columns].

    Returns:
        int64 [rows, columns], values under 2 ** 32.
    """
    seed, positions, columns = (part.to(torch.int64) for part in (seed, positions, columns))
    hashed = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions & _MASK):
        hashed = _mix(hashed, block)
    hashed = _mix(hashed[:, None], (columns & _MASK)[None, :]) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _MASK
    return hashed ^ (hashed >> 16)


_MASK = 0xFFFFFFFF


def _mix(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    # Products wrap around at 64 bits; their lower 32 are right.
    block = (_rotated((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def die_with_standard_input() -> None:
    """Kill the process group, which is that of all of the server's processes, at the end of standard input."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="standard-input", daemon=True).start()


def listen_on(bound: socket.socket) -> None:
    """Let uvicorn's servers listen on this socket. SGLang has no flag for one, and makes such a server in this process,
    to be run on the port of its flags: which could be another process's by then."""
    import uvicorn

    run = uvicorn.Server.run
    uvicorn.Server.run = lambda server, sockets=None: run(server, [bound])  # type: ignore[method-assign, assignment]


def receive_from_trainers() -> None:
    """Let schedulers receive the trainer's weights themselves. SGLang has one call for weights that come by a way of
    their own, /update_weights_from_ipc: an extension in each scheduler gets its strings, and what it raises is the
    answer. SGLang's extension is the end of another project's transfer (checkpoint-engine), ours that of ours."""
    module = types.ModuleType("sglang.srt.checkpoint_engine.checkpoint_engine_worker")
    module.__dict__["SGLangCheckpointEngineWorkerExtensionImpl"] = _extension
    sys.modules[module.__name__] = module


def _extension(model_runner: object) -> object:
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.append(root)  # the last: SGLang's environment comes first
    from engines.sglang.receiving import Receiving

    return Receiving(model_runner)


receive_from_trainers()
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    prepare_for_cpu()

if __name__ == "__main__":
    die_with_standard_input()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    listen_on(socket.socket(fileno=int(os.environ.pop("CADENCE_SGLANG_SOCKET"))))
    # Not on the command line, which other users can read.
    token = os.environ.pop("CADENCE_SGLANG_TOKEN")
    launch_server(prepare_server_args([*sys.argv[1:], f"--api-key={token}"]))
