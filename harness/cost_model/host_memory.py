"""The contents of a host's memory beside the devices of a job: what processes take, what rests there while a device
has no room for it, weights on their way, rows of the queue, and what is being written."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.config import JobConfig
from harness.config.job import routes_dtype
from harness.config.placement import Placement
from harness.config.transports import transport_of
from harness.cost_model.shape import sent_bytes, weight_bytes
from harness.cost_model.training_memory import RankMemory

WORKER = {False: 64 << 20, True: 2 << 30}
"""Bytes that a worker has for itself, without and with CUDA. On cores as measured in a run of `tiny` (28 to 62 MiB of
what is not shared with the process that it is forked from); with CUDA assumed."""

BESIDE_WORKERS = 1 << 30
"""Bytes of the driver, the process that workers are forked from, and the queue: 554, 299 and 25 MiB in that run."""

ENGINE_PROCESSES = {False: 1400 << 20, True: 4 << 30}
"""Bytes of what vLLM or SGLang starts for one device of an engine: its core, its workers, a server. On cores as in runs
of `tiny` (1,040 and 1,330 MiB); with CUDA assumed."""

PINNED = 1.1  # bytes taken for one that is asked for, where blocks are pinned (engines/host_memory.py)
SAVED_AT_ONCE = 2 * 5e9
"""Most bytes of final weights on the host: a file (harness/weight_sync/saving.py), gathered and as written."""


@dataclass(frozen=True)
class Hosts:
    """Machines that a job's devices stand in: so many in each, in their order. bytes: that a job may use of each."""

    devices: int
    bytes: float


@dataclass(frozen=True)
class HostItem:
    """Bytes on a host. fix: the setting that takes less; empty where there is none."""

    what: str
    bytes: float
    fix: str = ""


@dataclass(frozen=True)
class HostMemory:
    """The host that holds most. there: bytes that a job may use of it."""

    items: tuple[HostItem, ...]
    devices: int
    there: float

    @property
    def everything(self) -> float:
        """Bytes of all items."""
        return sum(item.bytes for item in self.items)

    @property
    def largest(self) -> HostItem:
        """The item that more hosts, or its fix, would help most."""
        return max(self.items, key=lambda item: item.bytes)


@dataclass(frozen=True)
class HostLoad:
    """The circumstances of a host's memory besides the job and its placement. rank: of training, and critic, of its
    own; row: bytes of the longest sample in the queue, which holds `rows` of them; kept: bytes of rows that a rank
    keeps for later passes; keeps_weights: engines that sleep keep theirs."""

    transport: str
    rank: RankMemory
    critic: RankMemory
    row: float
    rows: int
    kept: float
    bucket: float
    keeps_weights: bool
    gpu: bool


def row_bytes(config: JobConfig, prompt: int, response: int) -> float:
    """A sample's columns: tokens are int64, what is said of each is float32, its version int32, its mask a byte; and
    the experts of each, where they are replayed."""
    algorithm, model = config.algorithm, config.model
    experts = model.layers * model.active_experts * np.dtype(routes_dtype(model.experts)).itemsize
    said = 1 + algorithm.has_reference + algorithm.recompute_log_probs + algorithm.freezes_proximal
    said += algorithm.has_critic or algorithm.has_token_baseline  # advantages, then
    of_tokens = 8 * prompt + (8 + 4 * said + 4 + 1) * response
    return of_tokens + config.replays_routing * experts * (prompt + response)


def fullest_host(config: JobConfig, placement: Placement, load: HostLoad, hosts: Hosts) -> HostMemory:
    """The memory of the host that holds most of the job."""
    count = -(-placement.total // hosts.devices)
    found = [_host(config, placement, load, hosts.devices, number) for number in range(count)]
    items = max(found, key=lambda items: sum(item.bytes for item in items))
    return HostMemory(tuple(item for item in items if item.bytes), hosts.devices, hosts.bytes)


def _host(config: JobConfig, placement: Placement, load: HostLoad, devices: int, number: int) -> list[HostItem]:
    here = range(number * devices, (number + 1) * devices)
    of = {role: sum(device in here for device in there) for role, there in placement.devices.items()}
    workers = sum(device in here for device in range(placement.total))
    apart = config.engine.name != "torch"
    items = [
        HostItem("processes", WORKER[load.gpu] * workers + BESIDE_WORKERS * (number == 0)),
        HostItem("processes of engines", ENGINE_PROCESSES[load.gpu] * (of["rollout"] + of.get("lent", 0)) * apart),
        *_resting(config, placement, load, of),
        *_travelling(config, placement, load, of),
    ]
    if config.checkpoint.every:
        state = 3 * (of["actor"] * load.rank.copy + of.get("critic", 0) * load.critic.copy)
        items.append(HostItem("a checkpoint being written", state, "checkpoint.every=0"))
    if number == 0:
        saved = min(SAVED_AT_ONCE, 2 * sent_bytes(config.model, config.training)) * config.save_weights
        items.append(HostItem("rows of the queue", load.rows * load.row, "algorithm.batch_groups, to fewer"))
        items.append(HostItem("final weights being saved", saved, "save_weights=false"))
    return items


def _resting(config: JobConfig, placement: Placement, load: HostLoad, of: dict[str, int]) -> Sequence[HostItem]:
    """Items that leave a GPU while others use it; on cores there is no other place."""
    if not load.gpu:
        return []
    training, weights = config.training, weight_bytes(config.model)
    # The embedded engine takes new weights while it sleeps, so it has them in any case; others may forget theirs.
    embedded = config.engine.name == "torch"
    sleeps = of["rollout"] * (placement.share("rollout", "actor") and (load.keeps_weights or embedded))
    slept = (sleeps + of.get("lent", 0) * embedded) * weights / config.engine.tensor_parallel
    moments = 2 * (of["actor"] * load.rank.copy + of.get("critic", 0) * load.critic.copy)
    beside = placement.share("reference", "actor") and not training.lora_rank
    reference = of.get("reference", 0) * weights / load.rank.shards
    return [
        HostItem("optimizer state", PINNED * moments * (training.optimizer_offload != "none"), _NO_OFFLOAD),
        HostItem("reference", 2 * reference * (training.reference_offload and beside), _NO_REFERENCE),
        HostItem("weights of engines that sleep", PINNED * slept),
        HostItem("rows kept for later passes", of["actor"] * load.kept, "algorithm.epochs=1"),
    ]


_NO_OFFLOAD, _NO_REFERENCE = "training.optimizer_offload=none", "training.reference_offload=false"


def _travelling(config: JobConfig, placement: Placement, load: HostLoad, of: dict[str, int]) -> Sequence[HostItem]:
    """Weights between training ranks and receivers."""
    weights = sent_bytes(config.model, config.training)
    carrier = transport_of(load.transport)
    sender, receiver = carrier.host_memory(weights, load.bucket)
    if config.cluster.delta_weights and carrier.sends_differences and carrier.over == "host":
        sender += weights  # as receivers have them; of those, a version is made of the one before
    apart = [role for role in ("rollout", "actor_fwd") if role in of and not placement.share(role, "actor")]
    received = receiver * sum(of[role] for role in apart) / config.engine.tensor_parallel
    sent = sender * of["actor"] / len(placement.devices["actor"])
    pinned = PINNED if load.gpu else 1.0
    return [HostItem(f"weights on their way ({load.transport})", pinned * (sent + received), _DIRECT)]


_DIRECT = 'transport = "collective" in a schedule that need not stage them'
