"""The code that settings name: the rollout engine with its options and its environment, and whether what they name by
import path can be what it is to be."""

import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from inspect import isfunction
from typing import Any

from harness.config import AlgorithmConfig, ClusterConfig, ConfigError, JobConfig
from harness.config.plugins import is_path, load, make, named_by
from harness.config.readers import described_engine
from harness.config.registries import find
from harness.config.transports import transport_of
from harness.cost_model.memory_plan import EngineShare
from harness.protocols import RolloutEngine
from harness.runtime.runtime import Storage, cluster_address
from harness.tasks import make_buffer, make_task
from harness.tasks.generation import evaluation_of
from harness.transfer_queue.control.policies import Policy
from schedules import Schedule


def engine_class(name: str) -> Any:
    """The class of a `harness.protocols.RolloutEngine`; loads the engine's packages."""
    return find("engine", name)


def engine_options(config: JobConfig) -> Any | None:
    """An instance of the engine's `Options`; None where it has none. Raises ConfigError for another option, or type."""
    name, given = config.engine.name, config.engine.options
    options = getattr(described_engine(name), "Options", None)
    if options is None and given:
        raise ConfigError(f"engine.{next(iter(given))} is no option of {name}; it has none")
    return None if options is None else make(options, given, "engine", name)


def planned_options(config: JobConfig, share: EngineShare | None) -> Any | None:
    """The same, with what a plan of memory decides where the user did not, for engines that have a say in it. Raises
    ConfigError where what the user gave leaves no room."""
    options, within = engine_options(config), getattr(described_engine(config.engine.name), "within", None)
    return options if within is None or share is None else within(options, share)


def engine_takes_several_devices(name: str) -> bool:
    """Whether one engine of this kind can run on several."""
    return bool(getattr(described_engine(name), "TENSOR_PARALLEL", False))


def engine_reads_files(name: str) -> bool:
    """Whether engines of this kind start from the files that a model lies in: they take one that is only outlined."""
    return bool(getattr(described_engine(name), "reads_files", lambda: False)())


def check_environment(config: JobConfig) -> None:
    """Raises ConfigError where an engine, also one that trains, says by any error that it cannot start here."""
    named = (
        ("engine.name", config.engine.name, "engine"),
        ("training.engine", config.training.engine, "training.engine"),
    )
    for setting, name, registry in named:
        try:
            getattr(described_engine(name, registry), "check_environment", lambda: None)()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{setting}={name}: {str(error).partition(chr(10))[0]}") from error


def queue_storage(cluster: ClusterConfig) -> Storage | None:
    """Opens the storage of the queue that the settings name; None where they leave it to the runtime. Raises
    ConfigError for what is no such storage, or has no such options."""
    if cluster.queue is None:
        return None
    made = _queue_settings(cluster.queue, cluster.queue_options)
    opened: Storage = getattr(made, "open", lambda: made)
    return opened


def check_queue(cluster: ClusterConfig) -> None:
    """Raises ConfigError unless the storage of the queue can be used here, now."""
    name, options = cluster.queue, cluster.queue_options
    if name is None:
        if options:
            raise ConfigError(f"cluster.queue_options.{next(iter(options))} is of no storage; set cluster.queue, too")
        return
    made, address = _queue_settings(name, options), cluster_address()
    if address is not None and getattr(made, "one_machine", False):
        raise ConfigError(f"cluster.queue={name} is memory of one machine, and RAY_ADDRESS names several; leave it out")
    if address is None and getattr(made, "needs_ray", False):
        raise ConfigError(
            f"cluster.queue={name} keeps rows in a Ray cluster, and RAY_ADDRESS names none; set it, or leave this out"
        )
    try:
        getattr(made, "check", lambda: None)()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cluster.queue={name}: {error}") from error


def _queue_settings(name: str, options: Mapping[str, Any]) -> Any:
    """A storage's options: a dataclass that is the backend itself, or opens it."""
    made = make(find("cluster.queue", name), options, "cluster.queue_options", name)
    missing = [] if hasattr(made, "open") else [method for method in ("storage", "store") if not hasattr(made, method)]
    if missing:
        raise ConfigError(f"cluster.queue={name} lacks {', '.join(missing)}; write what storage/protocol.py asks for")
    return made


LOGGERS_NEED = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Packages of loggers, which are extras of their names, too."""


def check_loggers(names: Iterable[str]) -> None:
    """Raises ConfigError for a logger that is not there, or whose package is not."""
    for name in names:
        if is_path(name):
            find("loggers", name)
        elif (package := LOGGERS_NEED.get(name)) is not None and find_spec(package) is None:
            raise ConfigError(
                f"loggers={name} needs {package}, which is not here: pip install {package}, or leave it out"
            )


def check_plugins(config: JobConfig, schedule: Schedule) -> None:
    """Raises ConfigError: the setting, its value, and the fix. A schedule was checked when it was made."""
    check_loggers(config.loggers)
    _check_engine(config.engine.name)
    task = config.task
    if is_path(task.name) or task.reward or task.reward_options or task.options or task.generate:
        make_task(config)
    if task.buffer is not None or task.buffer_state is not None:
        make_buffer(config)
    if config.eval.function is not None:
        evaluation_of(config.eval.function)
        if not config.eval.every:
            raise ConfigError(
                f"eval.function={config.eval.function} is never called with eval.every=0; set eval.every=20"
            )
    _check_order(schedule.order)
    _check_transport(config, schedule)
    _check_algorithm(config, schedule)


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
        if not isinstance(found, type) or missing:
            raise ConfigError(
                f"schedule.order={order} lacks {', '.join(missing)}; extend a policy of "
                "harness.transfer_queue.control.policies, such as Completion"
            )


def _check_transport(config: JobConfig, schedule: Schedule) -> None:
    name = schedule.transport
    if config.cluster.delta_weights and not schedule.colocated and not transport_of(name).sends_differences:
        raise ConfigError(
            f"cluster.delta_weights=true: transport={name} brings whole buckets (by ipc receivers read what the sender "
            'writes: nothing would be saved); give the schedule transport = "collective" or "host_staged"'
        )
    if (colocated := transport_of(name).colocated) != schedule.colocated:
        fix = "colocated = True" if colocated else 'transport = "local"'
        raise ConfigError(
            f"the schedule has transport={name} and colocated={schedule.colocated}: roles that share devices take "
            f"weights from the trainer beside them, and only those do; give it {fix}"
        )


def _check_algorithm(config: JobConfig, schedule: Schedule) -> None:
    """Also that each option is one of them: neither names those of the other."""
    algorithm = config.algorithm
    _check_kl(algorithm)
    if algorithm.rejection:
        from harness.rl.rejection import rejection_of

        rejection_of(algorithm)
    own = algorithm.options or algorithm.shaping or algorithm.filters
    own = own or is_path(algorithm.correction) or is_path(algorithm.aggregation)
    if not (own or algorithm.advantage != "group" or algorithm.kl_target is not None):
        return
    from harness.rl import advantages, aggregation, filters, losses, shaping
    from harness.rl.token_advantages import token_advantages_of

    losses.policy_loss(algorithm)
    aggregation.aggregation_of(algorithm)
    if token_advantages_of(algorithm) is None:
        advantages.advantages_of(algorithm)
    if advantages.needs_whole_batch(algorithm) and schedule.order != "fifo":
        what = f"algorithm.advantage={algorithm.advantage} compares all rewards of a batch"
        if algorithm.kl_target is not None:
            what = f"algorithm.kl_target={algorithm.kl_target} is followed from batch to batch"
        raise ConfigError(
            f"{what}, and with schedule.order={schedule.order} a batch is not known before its last group is trained; "
            "set schedule.order=fifo"
        )
    shaping.shaping_of(algorithm, sys.maxsize)  # how long a response may be is asked of the task later
    filters.filter_of(algorithm)
    having = {f"algorithm.{kind}": [getattr(algorithm, kind)] for kind in ("correction", "advantage", "aggregation")}
    having |= {"algorithm.shaping": algorithm.shaping, "algorithm.filter": [algorithm.filter] * algorithm.filters}
    named = [(name, find(setting, name)) for setting, names in having.items() for name in names]
    for option in algorithm.options:
        if not any(named_by(function, {option: None}) for _, function in named):
            names = " or ".join(name for name, _ in named)
            raise ConfigError(f"algorithm.options.{option} is no option of {names}; leave it out")


def _check_kl(algorithm: AlgorithmConfig) -> None:
    if algorithm.kl_target is not None and not algorithm.has_reward_kl:
        raise ConfigError(
            f"algorithm.kl_target={algorithm.kl_target} is followed by the coefficient of a KL in the reward, and "
            "there is none; set algorithm.kl_in=reward and algorithm.kl_coef above 0, such as 0.05"
        )


def looks_at_whole_batches(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss needs all tokens of a batch at once. The default one does not, for which nothing is loaded."""
    if algorithm.correction == AlgorithmConfig.correction:
        return False
    return bool(getattr(find("algorithm.correction", algorithm.correction), "whole_batch", False))
