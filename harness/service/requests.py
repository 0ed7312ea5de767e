"""Requests of the service's clients, with bounds on everything that they may ask for."""

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.service.tensors import LENGTHS, ROWS
from harness.transfer_queue.control.spec import QueueSpec, TaskSpec
from harness.transfer_queue.rows.columns import ColumnSpec

GENERATE, TRAIN = "rollout", "train"  # the two tasks that every job has: engines read the first, the trainer the second
TRAINER = "trainer"  # the trainer's name among those of the engines
LONGEST_WAIT_S = 60.0
MOST_ENGINES = 4096
_ROWS_OF_A_BATCH = 1 << 20

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\w.\[\]-]+$")]
DType = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
Version = Annotated[int, Field(ge=0, le=1 << 40)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_WAIT_S)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ColumnRequest(_Request):
    """A column of the job. dtype: of NumPy; ragged: a row has any number of them; shape: of a row, if not."""

    dtype: DType
    ragged: bool = False
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...], Field(max_length=4)] = ()


class TaskRequest(_Request):
    """A task of the job. reads: columns; a row is ready when it has all of them. writes: columns that readers send of
    the rows that they got. lease_s: rows of which they sent less go out again after so many seconds; without, never."""

    reads: Annotated[tuple[Name, ...], Field(min_length=1, max_length=64)]
    writes: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    whole_groups: bool = False
    lease_s: Annotated[float | None, Field(gt=0, le=1e6)] = None


class JobRequest(_Request):
    """A job: batches of `batch_groups` groups of `group_size` rows, of which sample N is trained in batch
    N // batch_groups, no more than ceil(max_staleness) versions after the one that sampled it."""

    columns: Annotated[dict[Name, ColumnRequest], Field(min_length=1, max_length=64)]
    tasks: Annotated[dict[Name, TaskRequest], Field(min_length=2, max_length=32)]
    engines: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_ENGINES)]
    batch_groups: Annotated[int, Field(ge=1, le=_ROWS_OF_A_BATCH)]
    group_size: Annotated[int, Field(ge=1, le=_ROWS_OF_A_BATCH)] = 1
    max_staleness: Annotated[float, Field(ge=0, le=1000)] = 0.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in (GENERATE, TRAIN):
            if name not in self.tasks:
                raise ValueError(f"tasks has no {name!r}: engines read {GENERATE!r}, the trainer {TRAIN!r}")
        if self.tasks[TRAIN].writes or self.tasks[TRAIN].lease_s is not None:
            raise ValueError(f"task {TRAIN!r} writes nothing and has no lease: what it got is trained")
        if not set(self.tasks[TRAIN].reads) & set(self.tasks[GENERATE].writes):
            raise ValueError(f"task {TRAIN!r} reads nothing that {GENERATE!r} writes: no version would have sampled it")
        if len(set(self.engines)) < len(self.engines):
            raise ValueError(f"two engines of one name in {list(self.engines)}")
        if TRAINER in self.engines:
            raise ValueError(f"no engine may be called {TRAINER!r}: versions go by name, and that is the trainer's")
        if twice := sorted(name for name, tasks in Counter(self._writes).items() if tasks > 1):
            raise ValueError(f"columns {twice} are written twice: a row has one value of each")
        if self.batch_rows > _ROWS_OF_A_BATCH:
            raise ValueError(f"a batch of {self.batch_rows} rows is more than {_ROWS_OF_A_BATCH}")
        if taken := sorted(name for name in self.columns if name == ROWS or name.endswith(LENGTHS)):
            raise ValueError(f"columns may not be called {taken}: `{ROWS}` and `<column>{LENGTHS}` are the service's")
        self.queue_spec()
        return self

    @property
    def batch_rows(self) -> int:
        """Samples of a batch."""
        return self.batch_groups * self.group_size

    @property
    def written(self) -> frozenset[str]:
        """The columns that tasks write: prompts come without them."""
        return frozenset(self._writes)

    @property
    def _writes(self) -> list[str]:
        return [name for task in self.tasks.values() for name in task.writes]

    def queue_spec(self) -> QueueSpec:
        """ValueError for what cannot work."""
        columns = {name: ColumnSpec(one.dtype, one.ragged, one.shape) for name, one in self.columns.items()}
        tasks = {
            name: TaskSpec(
                one.reads,
                policy="fifo" if name == TRAIN else "ready",
                whole_groups=one.whole_groups,
                lease_s=one.lease_s,
                writes=one.writes if one.lease_s is not None else (),
            )
            for name, one in self.tasks.items()
        }
        return QueueSpec(columns, tasks)


class AdmitRequest(_Request):
    """Groups below this one may be given to engines, as far as their versions allow."""

    below: Annotated[int, Field(ge=0, le=1 << 40)]


class ReceiveRequest(_Request):
    """Up to `count` rows of a task, at least `minimum` (by default as many), waited for as long. reader: of the task
    `rollout`, the name of an engine."""

    task: Name
    reader: Name
    count: Annotated[int, Field(ge=1, le=_ROWS_OF_A_BATCH)]
    minimum: Annotated[int | None, Field(ge=1, le=_ROWS_OF_A_BATCH)] = None
    timeout_s: Seconds = 30.0


class VersionReport(_Request):
    """The version of the weights that an engine has from now on."""

    version: Version
