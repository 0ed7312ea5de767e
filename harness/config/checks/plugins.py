"""Whether the code that settings name by import path can be what it is to be."""

from __future__ import annotations

from inspect import isfunction
from typing import Any

from harness.config import ConfigError, JobConfig
from harness.config.plugins import is_path, load, named_by
from harness.protocols import RolloutEngine
from harness.tasks import make_task
from harness.transfer_queue.control.policies import Policy
from schedules import Schedule


def check_plugins(config: JobConfig, schedule: Schedule) -> None:
    """Raises ConfigError: the setting, its value, and the fix. A schedule was checked when it was made."""
    _check_engine(config.engine.name)
    if is_path(config.task.name) or config.task.reward or config.task.reward_options or config.task.options:
        make_task(config)
    _check_order(schedule.order)
    _check_algorithm(config)


def _check_engine(name: str) -> None:
    if is_path(name):
        found = load(name, "engine")
        methods = [method for method, code in vars(RolloutEngine).items() if isfunction(code) and method[0] != "_"]
        if missing := [method for method in methods if not hasattr(found, method)]:
            raise ConfigError(f"engine={name} lacks {', '.join(missing)}; see harness.protocols.RolloutEngine")


def _check_order(order: str) -> None:
    if is_path(order):
        found = load(order, "schedule.order")
        missing = [name for name in vars(Policy) if not name.startswith("_") and not hasattr(found, name)]
        missing += [name for name in Policy.__annotations__ if not hasattr(found, name)]
        if not isinstance(found, type) or missing:
            raise ConfigError(
                f"schedule.order={order} lacks {', '.join(missing)}; extend a policy of "
                "harness.transfer_queue.control.policies, such as Completion"
            )


def _check_algorithm(config: JobConfig) -> None:
    """Also that each option is one of them: neither names those of the other."""
    algorithm = config.algorithm
    named: dict[str, Any] = {}
    if is_path(algorithm.correction):
        from harness.rl.losses import policy_loss

        policy_loss(algorithm)
        named |= named_by(load(algorithm.correction, "algorithm.correction"), algorithm.options)
    if is_path(algorithm.advantage):
        from harness.rl.advantages import advantages_of

        advantages_of(algorithm)
        named |= named_by(load(algorithm.advantage, "algorithm.advantage"), algorithm.options)
    for option in algorithm.options:
        if option not in named:
            own = [path for path in (algorithm.correction, algorithm.advantage) if is_path(path)]
            takes = f"no option of {' or '.join(own)}" if own else "for a correction or an advantage of your own"
            raise ConfigError(f"algorithm.options.{option} is {takes}; leave it out")
