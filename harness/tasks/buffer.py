"""Problems dealt to groups by code of the user's, which hears what became of those before:
`task.buffer=my_lab.buffers:Hard`. Its state is written with every version, and read where a run is to go on with it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from harness.config.fields import ConfigError
from harness.config.plugins import load, make
from harness.tasks.task import Problem, Task


class DataBuffer(Protocol):
    """A source of problems in the driver's process, called in the order of events. What it gives a group may depend on
    what it heard: then it depends on time as well, and schedules that compute the same bits otherwise need not."""

    def take(self, task: Task, group: int, seed: int) -> Problem:
        """The problem of a group; `task.problem(group, seed)` is what it would get without a buffer."""

    def record_rewards(self, problem: Problem, group: int, rewards: Sequence[float]) -> None:
        """Take note of the rewards of a group's samples: it was trained, or refused by a filter."""

    def state(self) -> Mapping[str, Any]:
        """All that it knows, as JSON can write it."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""


_METHODS = ("take", "record_rewards", "state", "load")


def buffer_of(path: str, options: Mapping[str, Any], saved: str | None) -> DataBuffer:
    """The buffer that the settings name, with its saved state. Raises ConfigError for what cannot be one, and for a
    file that is not there or that it cannot read."""
    found = load(path, "task.buffer")
    buffer: DataBuffer = make(found, options, "task.buffer_options", path)
    if missing := [name for name in _METHODS if not callable(getattr(buffer, name, None))]:
        raise ConfigError(
            f"task.buffer={path} lacks {', '.join(missing)}; write what harness.tasks.DataBuffer asks for"
        )
    if saved is not None:
        try:
            buffer.load(json.loads(Path(saved).read_text(encoding="utf-8")))
        except Exception as error:  # of the user's code, too
            why = str(error).partition("\n")[0]
            raise ConfigError(
                f"task.buffer_state={saved} cannot be loaded: {type(error).__name__}: {why}; name the buffer.json of a "
                "run with this buffer"
            ) from error
    return buffer


class DealtProblem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The problem of a group that is not over; prompt: token ids; row: "" in older checkpoints."""

    first_sample: int
    group: int
    prompt: list[int]
    answer: str
    row: str = ""


class DealerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a dealer. known: what the buffer's `state` gave, as JSON; out: what it has dealt, and not been told
    of."""

    known: str
    out: list[DealtProblem]


class Dealer:
    """Deals problems to groups, the task's own or those of a buffer, which hears of every group's end. Groups are named
    by the id of their first sample."""

    def __init__(self, task: Task, seed: int, buffer: DataBuffer | None = None) -> None:
        self._task, self._seed, self.buffer = task, seed, buffer
        self._out: dict[int, tuple[Problem, int]] = {}  # with their groups, which are not over

    def problem(self, group: int, first_sample: int) -> Problem:
        """The problem of a group; the same one again where the run went on from a checkpoint."""
        if self.buffer is None:
            return self._task.problem(group, self._seed).numbered(group)
        if (out := self._out.get(first_sample)) is not None:  # before the run went on from a checkpoint
            return out[0]
        problem = self.buffer.take(self._task, group, self._seed)
        self._out[first_sample] = problem, group
        return problem

    def record_rewards(self, first_sample: int, rewards: Sequence[float]) -> None:
        """Tell the buffer the rewards of a group that was trained, or refused."""
        if self.buffer is not None and (out := self._out.pop(first_sample, None)) is not None:
            self.buffer.record_rewards(*out, rewards)

    def forget(self, first_sample: int) -> None:
        """Forget a group that was dropped, and whose rewards nobody knows."""
        self._out.pop(first_sample, None)

    def state(self) -> DealerState | None:
        """The state as of now; None where nobody deals but the task. Raises ConfigError for a buffer whose state is no
        JSON."""
        if self.buffer is None:
            return None
        out = [
            DealtProblem(first, group, problem.prompt.tolist(), problem.answer, problem.row)
            for first, (problem, group) in self._out.items()
        ]
        try:
            return DealerState(json.dumps(dict(self.buffer.state())), out)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"task.buffer: what state() of {type(self.buffer).__name__} gives cannot be written: {error}; give "
                "what JSON has"
            ) from error

    def load(self, state: DealerState) -> None:
        """Go on from what `state` gave. Raises ConfigError for a buffer that cannot."""
        assert self.buffer is not None, "only a buffer's state is saved"
        try:
            self.buffer.load(json.loads(state.known))
        except Exception as error:  # of the user's code
            why = str(error).partition("\n")[0]
            raise ConfigError(
                f"task.buffer: {type(self.buffer).__name__} cannot load what a checkpoint has of it: "
                f"{type(error).__name__}: {why}; let load take what state gives, or start anew with force=true"
            ) from error
        self._out = {
            one.first_sample: (Problem(np.array(one.prompt, np.int64), one.answer, one.row), one.group)
            for one in state.out
        }
