"""The training engines that the suite runs, their layouts, and what it has one rank do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from engines.torch.checkpoint import SavedState
from harness.config import ModelConfig, TrainingConfig
from harness.config.registries import find
from harness.protocols import TrainEngine, TrainingSetting
from harness.transfer_queue import Ragged
from harness.weight_sync.plan import pack, plan_transfer, unpack
from harness.weight_sync.transports import LocalReceiver
from tests.support.fsdp_samples import CPU, FREE, SMALL, Tensors, batch_of, computed, save
from tests.support.processes import run_ranks

FOUR_LAYERS = replace(SMALL, layers=4)
MODELS: Mapping[str, ModelConfig] = {
    "tied": FOUR_LAYERS,
    "untied": replace(FOUR_LAYERS, tied_embeddings=False),
    "experts": replace(
        FOUR_LAYERS, architecture="qwen3_moe", experts=8, active_experts=2, ff=32, tied_embeddings=False
    ),
    "biased": replace(FOUR_LAYERS, architecture="llama", qk_norm=False, attention_bias="all"),
}
USUAL = ("tied", "untied", "experts")
ALGORITHM = replace(FREE, correction="none", kl_coef=0.0)
"""Its first moment is the gradient of the step before, and nothing is clipped."""
LATER = 5, 50  # steps after which weights are looked at
SAMPLES = 8  # of a batch
TOKENS = 25  # of a part of a micro-batch


@dataclass(frozen=True)
class Layout:
    """How a training world is laid out. models: that it takes, of `MODELS`; slow: it makes many steps, as those of more
    than two ranks do, in slow tests."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    expert: int = 1
    models: Sequence[str] = USUAL
    slow: bool = False

    def steps(self, model: str) -> int:
        """Steps that it makes of a model: many only of two, in slow tests."""
        return LATER[-1] if self.long and model in ("tied", "experts") else LATER[0]

    @property
    def long(self) -> bool:
        """Whether it makes many steps."""
        return self.slow or self.world > 2

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data * self.pipeline * self.tensor

    def __str__(self) -> str:
        sizes = {"dp": self.data, "pp": self.pipeline, "tp": self.tensor, "ep": self.expert}
        name = "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one"
        return f"{name}-slow" if self.slow else name


def nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class WorldUnderTest:
    """A training engine, as the suite sees it. path: as `training.engine` has it; layouts: that it is tried in; marker:
    under which its tests run, None for the default run; exact: whether stages leave the bits of untied models as they
    are; values: whether it has critics; prepare: what each rank's process does first."""

    name: str
    path: str
    layouts: Sequence[Layout]
    marker: str | None = None
    exact: bool = False
    values: bool = True
    prepare: Callable[[], None] = nothing


MOE = ("experts",)
TORCH = WorldUnderTest(
    name="torch", path="torch",
    layouts=(
        Layout(models=tuple(MODELS)), Layout(data=2), Layout(pipeline=2), Layout(pipeline=4),
        Layout(data=2, pipeline=2), Layout(tensor=2, models=tuple(MODELS)), Layout(pipeline=2, tensor=2),
        Layout(data=2, expert=2, models=MOE), Layout(data=2, pipeline=2, expert=2, models=MOE),
        Layout(data=2, tensor=2, expert=2, models=MOE),
    ),
    exact=True,
)  # fmt: skip
PLAIN = WorldUnderTest(
    name="plain",
    path="tests.training_contract.plain_world:PlainWorld",
    layouts=(Layout(models=tuple(MODELS)), Layout(models=tuple(MODELS), slow=True)),
    values=False,
)
MEGATRON = WorldUnderTest(
    name="megatron", path="megatron",
    layouts=(
        Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(data=2), Layout(data=2, expert=2, models=MOE),
        Layout(data=2, pipeline=2, expert=2, models=MOE), Layout(pipeline=2, tensor=2),
        Layout(data=2, tensor=2, expert=2, models=MOE),
    ),
    marker="megatron", values=False,
)  # fmt: skip
REGISTERED = {world.name: world for world in (TORCH, PLAIN, MEGATRON)}


@dataclass
class Told:
    """What one rank saw of one model. arrived: weights after the first step as this rank sends them, by a transfer
    plan; for_all: as the first rank does where it sends alone; beside: as an engine beside this rank reads them;
    routed: log-probs by experts that were chosen before, of a model that has any;
    not_finite: the step of gradients that are not; unfinished: what saving between two micro-batches raises."""

    scored: np.ndarray
    squares: np.ndarray
    sums: dict[str, float]
    steps: list[dict[str, float]]
    names: list[str]
    arrived: Tensors
    for_all: Tensors
    beside: Tensors
    reference: np.ndarray
    not_finite: dict[str, float]
    unfinished: str
    values: np.ndarray | None
    routed: np.ndarray | None


def shares(layout: Layout) -> list[range]:
    """Samples of each data-parallel rank."""
    return [range(rank, SAMPLES, layout.data) for rank in range(layout.data)]


def routes_of(samples: Sequence[int], model: ModelConfig) -> Ragged:
    """Experts of the tokens of `batch_of`, drawn for each sample: in every layer others, and of all but its last token
    that has any."""
    batch, rows = batch_of(samples), []
    for place, sample in enumerate(samples):
        tokens = int(batch.prompts.lengths[place] + batch.responses.lengths[place]) - 2
        random = np.random.default_rng(sample)
        order = random.permuted(np.tile(np.arange(model.experts), (tokens, model.layers, 1)), axis=-1)
        rows.append(order[:, :, : model.active_experts].astype(np.uint8).ravel())
    return Ragged.from_rows(rows)


def train_once(policy: TrainEngine, samples: Sequence[int]) -> tuple[dict[str, float], dict[str, float]]:
    """A step of two micro-batches: the sums of the first, and what the step says."""
    first, second = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    sums = computed(policy.accumulate(batch_of(first)))
    computed(policy.accumulate(batch_of(second)))
    return sums, computed(policy.step())


def sent(policy: TrainEngine, rank: int, senders: int) -> Tensors:
    """What this rank sends, of a plan in which so many do."""
    plan = plan_transfer(policy.named_parameters().items(), 4096, holders=policy.holders())
    found: Tensors = {}
    for bucket, owner in zip(plan.buckets, plan.owners(senders), strict=True):
        buffer = torch.zeros(bucket.bytes, dtype=torch.uint8) if owner == rank else None
        pack(bucket, policy.named_parameters(), buffer, owner)
        if buffer is not None:
            found |= {name: tensor.clone() for name, tensor in unpack(bucket, buffer)}
    return found


def one_rank(store: Store, rank: int, under_test: WorldUnderTest, layout: Layout, folder: Path) -> dict[str, Told]:
    """All that the suite asks of a rank. Saves its state after steps 1, 2 and `LATER` of each model."""
    torch.set_num_threads(1)  # as roles have: how many there are decides in which order kernels add up
    under_test.prepare()
    told = {}
    for name in layout.models:
        told[name] = _of_model(under_test, layout, rank, PrefixStore(name, store), name, folder / name)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    return told


def _of_model(under_test: WorldUnderTest, layout: Layout, rank: int, store: Store, name: str, folder: Path) -> Told:
    training = TrainingConfig(
        engine=under_test.path,
        layout="packed",
        tokens_per_micro_batch=TOKENS,
        tensor_parallel=layout.tensor,
        pipeline_parallel=layout.pipeline,
        expert_parallel=layout.expert,
    )
    setting = TrainingSetting(MODELS[name], ALGORITHM, training, store, rank, layout.world, CPU, 60.0, steps=60)
    world = find("training.engine", under_test.path)(setting)
    policy: TrainEngine = world.policy
    mine = list(shares(layout)[rank // training.ranks_together])
    batch = batch_of(range(SAMPLES))
    scored, squares = computed(world.scorer().gradient_squares(batch.prompts, batch.responses))
    reference = world.reference()
    values = routed = None
    if MODELS[name].experts:
        save(policy, folder / "0")
        routes = routes_of(range(SAMPLES), MODELS[name])
        routed = computed(world.scorer().log_probs(batch.prompts, batch.responses, routes)).values
        computed(policy.accumulate(replace(batch_of(mine), routes=routes_of(mine, MODELS[name]))))
        computed(policy.step())
        save(policy, folder / "routed")
        computed(policy.load(folder / "0"))
    if under_test.values:
        values = computed(world.critic(ALGORITHM).values(batch.prompts, batch.responses)).values
    sums, step = train_once(policy, mine)
    save(policy, folder / "1")
    arrived, for_all = sent(policy, rank, layout.world), sent(policy, rank, 1)
    beside = {name: tensor.clone() for name, tensor in LocalReceiver(policy).receive(1)}
    steps = [step]
    for number in range(2, layout.steps(name) + 1):
        steps.append(train_once(policy, mine)[1])
        if number in (2, *LATER):
            save(policy, folder / str(number))
    computed(policy.load(folder / "1"))
    train_once(policy, mine)
    save(policy, folder / "again")
    unscored = computed(reference.log_probs(batch.prompts, batch.responses)).values
    spoilt = batch_of(mine[:2])
    computed(policy.accumulate(replace(spoilt, advantages=np.full(2, np.inf, np.float32))))
    try:
        computed(policy.state())
        unfinished = ""
    except RuntimeError as error:
        unfinished = str(error)
    not_finite = computed(policy.step())
    save(policy, folder / "skipped")
    names = list(policy.named_parameters())
    return Told(
        scored.values, squares.values, sums, steps, names, arrived, for_all, beside, unscored, not_finite,
        unfinished, values, routed,
    )  # fmt: skip


@dataclass
class Run:
    """What all ranks of a layout told, and where their states are."""

    layout: Layout
    ranks: list[dict[str, Told]]
    folder: Path

    def state(self, model: str, step: str, kind: str = "weight") -> Tensors:
        """Weights, or moments, as they were saved after a step, by name."""
        shapes = self._shapes(model)
        found = {}
        with SavedState(self.folder / model / step) as saved:
            for name, shape in shapes.items():
                found[name] = torch.empty(shape)
                saved.read(f"{kind}.{name}", shape, tuple(slice(0, size) for size in shape), found[name])
        return found

    def _shapes(self, model: str) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for told in self.ranks for name, tensor in told[model].arrived.items()}


def run(under_test: WorldUnderTest, layout: Layout, folder: Path) -> Run:
    """One world of processes."""
    return Run(layout, run_ranks(one_rank, layout.world, under_test, layout, folder, timeout_s=300), folder)


Runs = Callable[[WorldUnderTest, Layout], Run]
"""The run of an engine in a layout, the same however often it is asked for."""
