"""Blocks of a model compiled by torch (TorchDynamo and Inductor): norms, rotations and gates become one kernel each.

A compiled block adds up in another order and, in half precision, rounds less often: results are equal but for rounding,
and may depend on which micro-batch came first, by whose shape kernels are chosen. Attention, whose samples have other
lengths in every packed micro-batch, is called from between two compiled pieces (`engines.torch.packing`).
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engines.torch.model import blocks_of
from harness.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_blocks(model: PreTrainedModel) -> None:
    """Have each block's `forward` compiled when it is first called, for all sizes of a micro-batch: what surrounds it,
    FSDP's hooks and recomputation, stays as it is. All blocks alike share what is compiled."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # or each worker would have a pool of processes, which outlive it when it is killed
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward, dynamic=True)


def require_compiler(gpu: bool) -> None:
    """Raises ConfigError, naming all of it, where this machine lacks what kernels are compiled with: on CPUs Inductor
    calls a C++ compiler, on GPUs Triton a C compiler, both with Python's headers."""
    names = (os.environ.get("CC"), "gcc", "cc", "clang") if gpu else (os.environ.get("CXX", "g++"),)
    missing = []
    if not any(shutil.which(name) for name in names if name):
        missing.append("a C compiler (gcc, or $CC)" if gpu else f"a C++ compiler ({names[0]}, or another by $CXX)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("Python's headers (Python.h, as in python3-dev)")
    if missing:
        raise ConfigError(
            f"training.compile=true needs {' and '.join(missing)}, which are not here; install what is missing, or "
            "set training.compile=false"
        )
