"""What the contract suite has to know about an engine: how it starts, what it runs in, and what it cannot do."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from harness.protocols import Clock, RolloutEngine, Sampling

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3ForCausalLM

Capability = Literal["tokens", "top_p", "seeds", "resumed draws"]
"""What an engine may be unable to do. tokens: its responses are tokens that a model sampled, with their log-probs;
top_p: it can sample from a nucleus, with the log-probs of it; seeds: what a sample draws follows from the run's seed
and its id, whatever runs beside it; resumed draws: an aborted sample goes on with the draws that it would have had."""


@dataclass(frozen=True)
class Setting:
    """What an engine is started with: the arguments that the runner gives to an engine's class.

    model: a small Qwen3, float32, on the CPU; the engine may keep and change it. slots: samples at a time.
    """

    model: Qwen3ForCausalLM
    sampling: Sampling
    slots: int
    seed: int
    clock: Clock
    device: torch.device
    name: str


def replace_sampling(engine: RolloutEngine, sampling: Sampling) -> None:
    engine.sampling = sampling  # type: ignore[attr-defined]


def no_processes(engine: RolloutEngine) -> Sequence[int]:
    return ()


def as_it_is(prompt: np.ndarray) -> np.ndarray:
    return prompt


@dataclass(frozen=True, kw_only=True)
class EngineUnderTest:
    """A rollout engine, as the suite sees it.

    name: shown in the names of the tests.
    start: a running engine at version 0 with the weights of `setting.model`; may take minutes, up to `start_timeout_s`.
    marker: the pytest marker under which its tests run; None for the default run.
    cannot: what the suite must not ask of it, each with the reason, which the skipped tests show.
    sample_by: change how an idle engine samples what is submitted from then on. One engine serves the whole suite.
    processes: ids of the processes that it started, all of which the suite may kill; () for an engine in process.
    prompt: a prompt of tokens (int64 [P]) in the form in which the engine takes it.
    """

    name: str
    start: Callable[[Setting], Awaitable[RolloutEngine]]
    marker: str | None = None
    cannot: Mapping[Capability, str] = field(default_factory=dict)
    sample_by: Callable[[RolloutEngine, Sampling], None] = replace_sampling
    processes: Callable[[RolloutEngine], Sequence[int]] = no_processes
    prompt: Callable[[np.ndarray], np.ndarray] = as_it_is
    start_timeout_s: float = 240.0


def constructed(path: str) -> Callable[[Setting], Awaitable[RolloutEngine]]:
    """Start an engine as the runner does: by calling the class at "module:Class". Imports it no sooner."""

    async def start(setting: Setting) -> RolloutEngine:
        return construct(named(path), setting)

    return start


def construct(engine_class: Callable[..., RolloutEngine], setting: Setting) -> RolloutEngine:
    return engine_class(
        setting.model,
        sampling=setting.sampling,
        slots=setting.slots,
        seed=setting.seed,
        clock=setting.clock,
        device=setting.device,
        name=setting.name,
    )


def named(path: str) -> Any:
    """The object at "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
