"""Where processes of tests come from: a server that has imported once what all of them need."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest.mock import patch

from harness.runtime.local_runtime import FORKABLE

_IMPORTED = (
    "engines.torch.fsdp engines.torch.rollout harness.workers.actor harness.weight_sync.host_staged "
    "harness.weight_sync.ipc torch.distributed.checkpoint transformers.models.qwen3.modeling_qwen3"
).split()


def forking() -> ForkServerContext:
    """Its processes are as clean as spawned ones, and begin where those have imported for seconds. There is one server
    for all tests of a run, so one list of imports, told before the first process starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with patch.dict(os.environ, FORKABLE):
        forkserver.ensure_running()
    return context
