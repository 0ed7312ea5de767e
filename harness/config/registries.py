"""The one table of names: what a setting may name, and the import path of the code that each name stands for.

A name of this table is no more than a short way to write its path: wherever one is looked up, `package.module:Name` of
code from anywhere works as well. Adding a schedule, a loss, a storage is a file and its line here. Paths are strings,
so that nothing is imported before it is used.
"""

import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from harness.config.fields import ConfigError
from harness.config.plugins import check_called, is_path, load

_CHARACTERS = "harness.tasks.characters"
_DATA = "harness.tasks.data:DataTask"
_LOSSES = "harness.rl.losses"
_ADVANTAGES = "harness.rl.advantages"
_TRANSPORTS = "harness.config.transports"
_TEXT = "harness.tasks.rewards.text"
_MEASURES = (
    *product(("token", "sequence", "geometric"), ("ratio", "k1", "k2", "k3")),
    *product(("max",), ("k2", "k3")),
    *product(("token", "sequence", "geometric"), ("difference",)),
)

SCHEDULES = {
    "colocate_sync": "schedules.colocate_sync:ColocateSync",
    "partial_rollout_sync": "schedules.partial_rollout_sync:PartialRolloutSync",
    "sorted_batches": "schedules.sorted_batches:SortedBatches",
    "tail_rounds": "schedules.tail_rounds:TailRounds",
    "lending": "schedules.lending:Lending",
    "separated_sync": "schedules.separated_sync:SeparatedSync",
    "one_step_off": "schedules.one_step_off:OneStepOff",
    "k_step_off": "schedules.k_step_off:KStepOff",
    "delayed_update": "schedules.delayed_update:DelayedUpdate",
    "half_step": "schedules.half_step:HalfStep",
    "rolling_update": "schedules.rolling_update:RollingUpdate",
    "adaptive_staleness": "schedules.adaptive_staleness:AdaptiveStaleness",
    "fully_async": "schedules.fully_async:FullyAsync",
    "windowed": "schedules.windowed:Windowed",
}

ENGINES = {
    "sglang": "engines.sglang.rollout:SGLangRollout",
    "torch": "engines.torch.rollout:TorchRollout",
    "vllm": "engines.vllm.rollout:VLLMRollout",
}

TRAINING_ENGINES = {"megatron": "engines.megatron.training:MegatronWorld", "torch": "engines.torch.training:TorchWorld"}

TASKS = {
    "reverse": f"{_CHARACTERS}:Reverse",
    "copy": f"{_CHARACTERS}:Copy",
    "expand": f"{_CHARACTERS}:Expand",
    "data": _DATA,
    "gsm8k": _DATA,
    "math500": _DATA,
    "dapo_math": _DATA,
    "aime": _DATA,
    "reasoning_gym": "harness.tasks.reasoning_gym_task:ReasoningGym",
    "lookup": "harness.tasks.pointer_chasing:Lookup",
}

REWARDS = {
    "exact": f"{_TEXT}:exact",
    "numeric": f"{_TEXT}:numeric",
    "math": "harness.tasks.rewards.mathematics:math",
    "regex": f"{_TEXT}:regex",
    "format": f"{_TEXT}:form",
    "length": f"{_TEXT}:length",
    "code": "harness.tasks.rewards.code:code",
}

CORRECTIONS = {
    "none": f"{_LOSSES}.importance:no_correction",
    "clip": f"{_LOSSES}.clipped:clip",
    "dual_clip": f"{_LOSSES}.clipped:dual_clip",
    "decoupled": f"{_LOSSES}.clipped:decoupled",
    "decoupled_tis": f"{_LOSSES}.clipped:decoupled_truncated",
    "tis": f"{_LOSSES}.importance:truncated_importance",
    "mis": f"{_LOSSES}.importance:masked_importance",
    "topr": f"{_LOSSES}.importance:tapered",
    "cispo": f"{_LOSSES}.importance:cispo",
    "gspo": f"{_LOSSES}.importance:gspo",
    "geo_mean": f"{_LOSSES}.importance:geo_mean",
    "vespo": f"{_LOSSES}.importance:vespo",
    "sapo": f"{_LOSSES}.importance:sapo",
    "dro": f"{_LOSSES}.importance:dro",
    "dppo_tv": f"{_LOSSES}.importance:dppo_tv",
    "dppo_kl": f"{_LOSSES}.importance:dppo_kl",
    "opsm": f"{_LOSSES}.clipped:off_policy_sequence_mask",
    "clip_cov": f"{_LOSSES}.whole_batch:clip_cov",
    "kl_cov": f"{_LOSSES}.whole_batch:kl_cov",
    "m2po": f"{_LOSSES}.whole_batch:second_moment",
    "top_entropy": f"{_LOSSES}.whole_batch:top_entropy",
    "tis_normalised": f"{_LOSSES}.whole_batch:normalised_importance",
}

ADVANTAGES = {
    "group": f"{_ADVANTAGES}:group_advantages",
    "dr_grpo": f"{_ADVANTAGES}:dr_grpo",
    "rloo": f"{_ADVANTAGES}:rloo",
    "opo": f"{_ADVANTAGES}:opo",
    "best_of_k": f"{_ADVANTAGES}:best_of_k",
    "max_rl": f"{_ADVANTAGES}:max_rl",
    "reinforce_plus_plus": f"{_ADVANTAGES}:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": f"{_ADVANTAGES}:reinforce_plus_plus_baseline",
    "gpg": f"{_ADVANTAGES}:gpg",
    "batch_std": f"{_ADVANTAGES}:batch_std",
    "gdpo": f"{_ADVANTAGES}:gdpo",
    "remax": f"{_ADVANTAGES}:remax",
    "gae": "harness.rl.token_advantages:gae",
    "optimal_token_baseline": "harness.rl.token_advantages:optimal_token_baseline",
}

AGGREGATIONS = {
    name: f"harness.rl.aggregation:{name}"
    for name in (
        "token_mean",
        "token_sum",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_norm",
    )
}

KL_ESTIMATORS = {
    "k1": "harness.rl.kl:k1",
    "k2": "harness.rl.kl:k2",
    "k3": "harness.rl.kl:k3",
    "abs": "harness.rl.kl:absolute",
    "k1+": "harness.rl.kl:k1_straight_through",
    "k3+": "harness.rl.kl:k3_straight_through",
}

SHAPING = {name: f"harness.rl.shaping:{name}" for name in ("overlong", "length", "scale", "clip")}

FILTERS = {"none": "harness.rl.filters:every_group", "zero_variance": "harness.rl.filters:zero_variance"}

REJECTIONS = {name: f"harness.rl.rejection:{name}" for name in map("_".join, _MEASURES)}

STORAGES = {
    "shm": "harness.transfer_queue.storage.shm:ShmBackend",
    "inline": "harness.transfer_queue.storage.inline:InlineBackend",
    "redis": "harness.transfer_queue.storage.redis_storage:RedisServers",
    "ray": "harness.transfer_queue.storage.ray_objects:RayUnits",
}

TRANSPORTS = {
    "collective": f"{_TRANSPORTS}:Collective",
    "ipc": f"{_TRANSPORTS}:SharedMemory",
    "host_staged": f"{_TRANSPORTS}:HostStaged",
    "local": f"{_TRANSPORTS}:Local",
}

ORDERS = {
    "fifo": "harness.transfer_queue.control.policies:Fifo",
    "completion": "harness.transfer_queue.control.policies:CompletionFirst",
}

LOGGERS = {
    "mlflow": "harness.driver.loggers:MlflowLogger",
    "tensorboard": "harness.driver.loggers:TensorBoardLogger",
    "wandb": "harness.driver.loggers:WandbLogger",
}

REGISTRIES: Mapping[str, Mapping[str, str]] = {
    "schedule": SCHEDULES,
    "engine": ENGINES,
    "training.engine": TRAINING_ENGINES,
    "task": TASKS,
    "task.reward": REWARDS,
    "algorithm.correction": CORRECTIONS,
    "algorithm.advantage": ADVANTAGES,
    "algorithm.aggregation": AGGREGATIONS,
    "algorithm.kl": KL_ESTIMATORS,
    "algorithm.shaping": SHAPING,
    "algorithm.filter": FILTERS,
    "algorithm.rejection": REJECTIONS,
    "cluster.queue": STORAGES,
    "schedule.order": ORDERS,
    "schedule.transport": TRANSPORTS,
    "loggers": LOGGERS,
}
"""Names by setting, and the import path of each. Losses, advantages and the like are functions, whose keyword-only
parameters are their options (`algorithm.options`); the others are classes."""

SIGNATURES: Mapping[str, tuple[int, str]] = {
    "task.reward": (1, "reward(sample)"),
    "algorithm.correction": (4, "loss(log_probs, behaviour_log_probs, advantages, mask)"),
    "algorithm.advantage": (1, "advantages(rewards)"),
    "algorithm.aggregation": (3, "aggregation(mask, lengths, horizon)"),
    "algorithm.kl": (3, "kl(log_probs, other_log_probs, mask)"),
    "algorithm.shaping": (1, "shape(rewards)"),
    "algorithm.filter": (1, "keep(rewards)"),
    "algorithm.rejection": (3, "measure(log_ratio, mask, lengths)"),
}
"""Arguments of functions by the setting that names them: how many, and what they are."""


def check_name(registry: str, name: str, setting: str = "") -> None:
    """Raises ConfigError where this is neither a name of that registry nor an import path. setting: that has the name,
    where it is called otherwise than the registry."""
    if not is_path(name) and name not in REGISTRIES[registry]:
        refuse_module(setting or registry, name)
        raise ConfigError(
            f"{setting or registry}={name} is unknown; choose one of {', '.join(REGISTRIES[registry])}, or "
            "`package.module:Name` of your own"
        )


def refuse_module(setting: str, name: str) -> None:
    """Raises ConfigError for the name of a module, which says nothing of what is meant in it."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name):
        raise ConfigError(f"{setting}={name} is a module; name what is meant in it, as in {setting}={name}:Name")


def find(setting: str, name: str) -> Any:
    """The object that a name of a setting, or an import path, stands for, imported. Raises ConfigError where there is
    none."""
    check_name(setting, name)
    return load(REGISTRIES[setting].get(name, name), setting)


def find_function(setting: str, name: str) -> Callable[..., Any]:
    """The function that a name of a setting, or an import path, stands for. Raises ConfigError where code of the user's
    own is none that can be called as `SIGNATURES` says."""
    found: Callable[..., Any] = find(setting, name)
    if is_path(name):
        arguments, signature = SIGNATURES[setting]
        check_called(found, arguments, setting, name, signature)
    return found
